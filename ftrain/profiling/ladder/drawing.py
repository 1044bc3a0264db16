"""Speed against memory: a point for each technique."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from ftrain._plotting import as_file, blank, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(points: Sequence[tuple[str, str, float, float]], path: str | PathLike[str] | None = None) -> Figure:
    """Draw points ``(name, group, speed, memory)``, each numbered as the list beside them."""
    file, figure = as_file(path), blank(9.0, 4.5)
    axes = figure.add_subplot()
    groups = list(dict.fromkeys(group for _, group, _, _ in points))
    for number, (name, group, speed, memory) in enumerate(points):
        colour = f"C{groups.index(group)}"
        axes.plot(speed, memory, "o", color=colour, label=f"{number}  {name}")
        axes.annotate(str(number), (speed, memory), (4, 4), textcoords="offset points", fontsize=8, color=colour)
    axes.axhline(1, color="black", linewidth=0.5, alpha=0.4)
    axes.axvline(1, color="black", linewidth=0.5, alpha=0.4)
    axes.set(xlabel="examples a second, relative to the step as given", ylabel="peak of memory, relative")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, handletextpad=0.2)
    return save(figure, file)
