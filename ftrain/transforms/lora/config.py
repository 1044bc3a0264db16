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
        targets = () if isinstance(self.targets, str) or not isinstance(self.targets, Collection) else self.targets
        if not targets or not all(isinstance(pattern, str) for pattern in targets):
            raise OptionError(
                f"lora: targets is {self.targets!r}, needs a list of patterns of names, as ['*.q_proj', '*.v_proj']"
            )

    @property
    def scale(self) -> float:
        """The factor of the product BA."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def text(self, *more: str) -> str:
        """Return how the wrapper prints."""
        parts = [f"{self.rank}", f"alpha={self.alpha:g}"]
        if self.dropout:
            parts.append(f"dropout={self.dropout:g}")
        parts += [name for name in ("dora", "rslora") if getattr(self, name)]
        return f"lora({', '.join([*parts, *more])})"


def keys_of(key: Tensor, count: int) -> list[Tensor]:
    """Return a key for each of `count` adapters."""
    # A step has a number of at least 0, so no step draws the same random numbers.
    return list(random.split(random.fold_in(key, -1), count))


def missing(text: str, name: str) -> str:
    """Return the message for parameters without adapters."""
    return (
        f"{text}: params has no {name}: they are of a step without this ft.lora, or merged; make the state with "
        "step.init(), or evaluate a merged one with the loss before ft.lora (step.base), or ft.adapters.unmerge it"
    )
