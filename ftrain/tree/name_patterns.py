"""Masks, which select leaves of a tree by a function or by patterns of their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeAlias, TypeVar

from torch import Tensor

from ftrain import tree
from ftrain.errors import OptionError, listed
from ftrain.types import PyTree

Select: TypeAlias = Callable[[str, Tensor], bool]
"""``(name, leaf) -> bool``, with names as in `ftrain.tree.leaf_names`."""

Mask: TypeAlias = Select | Sequence[str]
"""A function ``(name, leaf) -> bool``, or patterns of names such as ``["head.*"]``."""

T = TypeVar("T")

WILDCARDS = {*"*?["}
"""Characters with a meaning in a pattern; a pattern without them matches one name."""


def matrices(name: str, leaf: Tensor) -> bool:
    """Select leaves with at least two axes: the usual mask of weight decay, without biases and norms."""
    return leaf.ndim >= 2


def everything(name: str, leaf: Tensor) -> bool:
    """Select every leaf: the parameters that `torch.optim` decays."""
    return True


@dataclass(frozen=True)
class _Patterns:
    """Selects leaves whose names match one of several patterns; `origin` names the option for messages."""

    origin: str
    patterns: tuple[str, ...]

    @cached_property
    def wildcards(self) -> list[str]:
        """The patterns that may match several names."""
        return [pattern for pattern in self.patterns if not WILDCARDS.isdisjoint(pattern)]

    @cached_property
    def names(self) -> set[str]:
        """The patterns without wildcards, in a set: a mask may list thousands of names."""
        return set(self.patterns).difference(self.wildcards)

    def __call__(self, name: str, leaf: Tensor) -> bool:
        """Return whether a leaf is selected."""
        return name in self.names or any(fnmatchcase(name, pattern) for pattern in self.wildcards)


def as_select(origin: str, mask: Mask) -> Select:
    """Return a mask as a function. Raises an OptionError if it is neither a function nor a list of patterns.

    `origin` is the function and option, for messages: ``"adamw: decay_mask"``.
    """
    if callable(mask):
        return require_of_leaf(origin, mask, "bool")
    if isinstance(mask, str) or not isinstance(mask, Sequence) or not all(isinstance(each, str) for each in mask):
        needed = f"a list of patterns, [{mask!r}]," if isinstance(mask, str) else "patterns of names"
        raise OptionError(f"{origin} is {mask!r}, needs {needed} or a function (name, leaf) -> bool")
    return _Patterns(origin, tuple(mask))


def require_of_leaf(origin: str, function: Callable[..., T], result: str) -> Callable[..., T]:
    """Return `function` if it can be called with a name and a leaf. Raises an OptionError if not.

    Masks of optax, for example, are functions of a whole tree.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # builtins
        return function
    try:
        signature.bind("name", "leaf")
    except TypeError as error:
        needed = f"(name, leaf) -> {result}, called for each leaf"
        raise OptionError(f"{origin} is a function {signature}; needs {needed}") from error
    return function


def text_of(mask: Mask) -> str:
    """Return the text of a mask, the same in every process: its patterns, or the name of its function or class."""
    if callable(mask):
        return str(getattr(mask, "__name__", type(mask).__name__))
    return str([*mask])


def require_matches(select: Select, params: PyTree) -> None:
    """Check that each pattern of a mask matches a leaf. Raises an OptionError that lists similar names."""
    if not isinstance(select, _Patterns):
        return
    known = tree.leaf_names(params)
    matched_names = select.names.intersection(known)
    for pattern in select.patterns:
        if pattern not in matched_names and not any(fnmatchcase(name, pattern) for name in known):
            raise OptionError(
                f"{select.origin} names {pattern!r}, and no parameter matches; there are {near(pattern, known)}"
            )


def near(pattern: str, known: Sequence[str]) -> str:
    """Return the known names as a text for a message, those most similar to a pattern first."""
    close = get_close_matches(pattern, known, n=tree.MAX_LISTED, cutoff=0.3)
    names = list(dict.fromkeys([*close, *known]))
    return listed(names)
