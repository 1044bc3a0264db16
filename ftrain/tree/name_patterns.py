"""Masks: which leaves of a tree something applies to, as a function or as patterns of their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import Tensor

from ftrain import tree
from ftrain.errors import OptionError
from ftrain.types import PyTree

Select: TypeAlias = Callable[[str, Tensor], bool]
"""``(name, leaf) -> bool``, with names as in `ftrain.tree.leaf_names`."""

Mask: TypeAlias = Select | Sequence[str]
"""A function ``(name, leaf) -> bool``, or patterns of names such as ``["head.*"]``."""


def matrices(name: str, leaf: Tensor) -> bool:
    """The usual decay mask: what has two axes or more, so neither biases nor norms."""
    return leaf.ndim >= 2


def everything(name: str, leaf: Tensor) -> bool:
    """Every leaf, as `torch.optim` decays them."""
    return True


@dataclass(frozen=True)
class _Patterns:
    """Leaves whose names match one of several patterns, `origin` being where these were written."""

    origin: str
    patterns: tuple[str, ...]

    def __call__(self, name: str, leaf: Tensor) -> bool:
        """Whether a leaf of that name is meant."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def as_select(origin: str, mask: Mask) -> Select:
    """Return a mask as a function.

    Args:
        origin: where it was written, for messages: ``"adamw: decay_mask"``.
        mask: a function or patterns.

    Raises:
        OptionError: for neither, a bare string say.
    """
    if callable(mask):
        return mask
    if isinstance(mask, str) or not isinstance(mask, Sequence) or not all(isinstance(each, str) for each in mask):
        needed = f"a list of patterns, [{mask!r}]," if isinstance(mask, str) else "patterns of names"
        raise OptionError(f"{origin} is {mask!r}, needs {needed} or a function (name, leaf) -> bool")
    return _Patterns(origin, tuple(mask))


def require_matches(select: Select, params: PyTree) -> None:
    """Check that each pattern of a mask matches a leaf.

    Raises:
        OptionError: naming the first one that does not, and names that are near it.
    """
    if not isinstance(select, _Patterns):
        return
    known = tree.leaf_names(params)
    for pattern in select.patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise OptionError(
                f"{select.origin} names {pattern!r}, and no parameter matches; there are {near(pattern, known)}"
            )


def near(pattern: str, known: Sequence[str]) -> str:
    """List names for a message, those that are most like a pattern first."""
    close = get_close_matches(pattern, known, n=tree.MAX_LISTED, cutoff=0.3)
    listed = list(dict.fromkeys([*close, *known]))
    return ", ".join(listed[: tree.MAX_LISTED]) + ", ..." * (len(listed) > tree.MAX_LISTED)
