"""Figures of matplotlib, if it is installed, and their files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ftrain.errors import FtrainError, OptionError, as_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Without a date, equal figures have equal bytes.
_METADATA: dict[str, dict[str, str | None]] = {".png": {}, ".svg": {"Date": None}}


def as_file(path: str | PathLike[str] | None) -> Path | None:
    """Return the path of an image file. Raises an OptionError if it ends neither in .png nor in .svg."""
    if path is None:
        return None
    file = as_path("plot", "path", path)
    if file.suffix.lower() not in _METADATA:
        raise OptionError(f"plot: path is {str(file)!r}; it must end in {' or '.join(_METADATA)}.")
    return file


def blank(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, outside of pyplot. Raises an FtrainError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FtrainError("plot: needs matplotlib, which is not installed: pip install 'matplotlib>=3.8'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, file: Path | None) -> Figure:
    """Write a figure, if there is a file, and return it."""
    if file is not None:
        import matplotlib

        # Without a salt, the ids in an SVG are random.
        with matplotlib.rc_context({"svg.hashsalt": "ftrain"}):
            figure.savefig(file, dpi=150, metadata=_METADATA[file.suffix.lower()])
    return figure
