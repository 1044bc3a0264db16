"""Figures of matplotlib, where that is installed, and the files they go to."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ftrain.errors import FtrainError, OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A drawing of the same things has the same bytes, so none has a date.
_METADATA: dict[str, dict[str, str | None]] = {".png": {}, ".svg": {"Date": None}}


def as_file(path: str | PathLike[str] | None) -> Path | None:
    """Return the path of a picture.

    Raises:
        OptionError: when it ends neither in .png nor in .svg.
    """
    if path is None:
        return None
    file = Path(path)
    if file.suffix.lower() not in _METADATA:
        raise OptionError(f"plot: path is {str(file)!r}; it must end in {' or '.join(_METADATA)}.")
    return file


def blank(width: float, height: float) -> Figure:
    """Return an empty figure, in inches, which no global list of figures holds.

    Raises:
        FtrainError: when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FtrainError("plot: needs matplotlib, which is not installed: pip install 'ftrain[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, file: Path | None) -> Figure:
    """Write a figure, if there is a file, and return it."""
    if file is not None:
        import matplotlib

        # Else the ids in an SVG are drawn at random.
        with matplotlib.rc_context({"svg.hashsalt": "ftrain"}):
            figure.savefig(file, dpi=150, metadata=_METADATA[file.suffix.lower()])
    return figure
