"""A picture of the memory of a step over its operations, stacked by what it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from os import PathLike
from typing import TYPE_CHECKING

from ftrain._plotting import as_file, blank, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(curves: Mapping[str, Sequence[int]], phases: Sequence[str], path: str | PathLike[str] | None = None) -> Figure:
    """Draw the bytes of each kind over the operations of a step, with its phases above.

    Args:
        curves: kind -> bytes at each operation.
        phases: the phase of each operation.
        path: a PNG or SVG file to write. Default: none.
    """
    file, figure = as_file(path), blank(8.0, 4.0)
    axes = figure.add_subplot()
    mebibytes = [[size / 2**20 for size in curve] for curve in curves.values()]
    axes.stackplot(range(len(phases)), mebibytes, labels=list(curves), linewidth=0, step="post")
    axes.set(xlabel="operation", ylabel="MiB")
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    start = 0
    for phase, operations in groupby(phases):
        length = len(list(operations))
        is_wide_enough_for_text = length > len(phases) / 20
        if is_wide_enough_for_text:
            axes.axvline(start, color="black", linewidth=0.5, alpha=0.4)
            axes.text(start + length / 2, 1.0, phase, ha="center", va="bottom", transform=axes.get_xaxis_transform())
        start += length
    figure.legend(loc="outside right upper", frameon=False, reverse=True)
    return save(figure, file)
