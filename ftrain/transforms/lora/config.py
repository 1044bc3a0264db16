"""The options of low-rank adapters, and functions for those of modules and of trees."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from ftrain import random
from ftrain.errors import OptionError, require_positive, require_positive_number, require_range, require_switches


@dataclass(frozen=True)
class Config:
    """The options of `ftrain.lora`, which describes them. Raises an OptionError when one is not in its range."""

    rank: int
    alpha: float
    targets: Sequence[str]
    dropout: float
    dora: bool
    rslora: bool

    def __post_init__(self) -> None:
        require_positive("lora", "rank", self.rank)
        require_positive_number("lora", "alpha", self.alpha)
        require_range("lora", "dropout", self.dropout, 0.0, 1.0)
        require_switches("lora", dora=self.dora, rslora=self.rslora)
        is_collection = isinstance(self.targets, Collection) and not isinstance(self.targets, str)
        if not is_collection or not self.targets or not all(isinstance(pattern, str) for pattern in self.targets):
            raise OptionError(
                f"lora: targets is {self.targets!r}, needs a list of patterns of names, as ['*.q_proj', '*.v_proj']"
            )

    @property
    def scale(self) -> float:
        """The factor of the product BA."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def text(self, *more: str) -> str:
        """Return how the wrapper prints: the options that are not the default, and `more`."""
        options = [f"{self.rank}", f"alpha={self.alpha:g}"]
        if self.dropout:
            options.append(f"dropout={self.dropout:g}")
        options += [name for name in ("dora", "rslora") if getattr(self, name)]
        return f"lora({', '.join([*options, *more])})"


def keys_of(key: Tensor, count: int) -> list[Tensor]:
    """Return a key for each of `count` adapters."""
    # Steps fold in their numbers, which start at 0, so no step draws the same random numbers.
    return list(random.split(random.fold_in(key, -1), count))


def missing(text: str, name: str) -> str:
    """Return the message for parameters without adapters."""
    return (
        f"{text}: params has no {name}: they are of a step without this ft.lora, or merged; make the state with "
        "step.init(), or evaluate a merged one with the loss before ft.lora (step.base), or ft.adapters.unmerge it"
    )
