"""What a low-rank adapter consists of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ftrain import random
from ftrain.errors import OptionError, require_positive, require_range


@dataclass(frozen=True)
class Config:
    """The options of `ftrain.lora`.

    Args:
        rank: columns of B and rows of A.
        alpha: what the product of the two is scaled by, times the rank.
        targets: patterns of the names of what is adapted.
        dropout: rate at which the inputs of the adapters are dropped in training.
        dora: whether each output has a magnitude of its own.
        rslora: whether the scale falls with the root of the rank.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False

    @property
    def scale(self) -> float:
        """What the product BA is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def text(self) -> str:
        """How it prints, without the closing parenthesis."""
        marks = ["dora"] * self.dora + ["rslora"] * self.rslora
        parts = [f"{self.rank}", f"alpha={self.alpha:g}", *[f"dropout={self.dropout:g}"] * bool(self.dropout), *marks]
        return f"lora({', '.join(parts)}"


def config(
    rank: int, alpha: float | None, targets: Sequence[str], dropout: float, *, dora: bool, rslora: bool
) -> Config:
    """Return the options of `ftrain.lora`, which have been checked.

    Raises:
        OptionError: for one out of its range.
    """
    require_positive("lora", "rank", rank)
    alpha = float(rank) if alpha is None else alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise OptionError(f"lora: alpha is {alpha!r}, needs a positive number")
    require_range("lora", "dropout", dropout, 0.0, 1.0)
    if isinstance(targets, str) or not isinstance(targets, Sequence) or not all(isinstance(t, str) for t in targets):
        example = [targets] if isinstance(targets, str) else ["*.q_proj", "*.v_proj"]
        raise OptionError(f"lora: targets is {targets!r}, needs a list of patterns of names: {example!r}")
    if not targets:
        raise OptionError("lora: targets is empty; needs patterns of names, such as ['*.q_proj', '*.v_proj']")
    return Config(rank, float(alpha), tuple(targets), float(dropout), bool(dora), bool(rslora))


def keys_of(key: Tensor, count: int) -> list[Tensor]:
    """Return a key for each of so many adapters."""
    # No step has this number, so that none draws what the adapters begin with.
    return list(random.split(random.fold_in(key, -1), count))


def missing(text: str, name: str) -> str:
    """Say that parameters were made without adapters."""
    return f"{text}: params has no {name}, for they were made without this ft.lora; make the state with step.init()"
