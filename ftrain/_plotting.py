"""Create figures with matplotlib, if it is installed, and write them to files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ftrain.errors import FtrainError, OptionError, as_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# An SVG without a date: equal figures are then equal files.
_METADATA: dict[str, dict[str, str | None]] = {".png": {}, ".svg": {"Date": None}}


def as_file(path: str | PathLike[str] | None) -> Path | None:
    """Return the path of an image file; None for None. Raises an OptionError if it ends neither in .png nor in .svg."""
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
    """Write a figure to a file, unless `file` is None, and return the figure."""
    if file is not None:
        import matplotlib

        # Without a salt, the ids in an SVG are random.
        with matplotlib.rc_context({"svg.hashsalt": "ftrain"}):
            figure.savefig(file, dpi=150, metadata=_METADATA[file.suffix.lower()])
    return figure
