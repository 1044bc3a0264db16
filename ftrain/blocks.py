"""The blocks of a model: what rematerialisation computes again as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from torch import nn

from ftrain.errors import OptionError
from ftrain.slots import Slot, slots_of
from ftrain.types import Adapters

Region: TypeAlias = Callable[..., Any]
"""``region(function, slots, *args, **kwargs)``: runs a block in a special way, rematerialised say."""

F = TypeVar("F", bound=Callable[..., Any])

_region: ContextVar[Region | None] = ContextVar("ftrain_region", default=None)


def block(function: F) -> F:
    """Mark a function as one block of a model: what `remat` recomputes as a whole.

    Outside of a rematerialised step it runs as it is. Tensors that it closes over must not be
    replaced between its forward and its recomputation; pass those as arguments.
    """

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return _through_region(function, (), *args, **kwargs)

    return marked  # type: ignore[return-value]


def _through_region(function: Callable[..., Any], slots: Sequence[Slot], *args: Any, **kwargs: Any) -> Any:
    region = _region.get()
    if region is None:
        return function(*args, **kwargs)
    return region(functools.partial(_as_one, function), slots, *args, **kwargs)


def _as_one(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block, in which further blocks belong to it, each time that it runs."""
    token = _region.set(None)
    try:
        return function(*args, **kwargs)
    finally:
        _region.reset(token)


class Blocks:
    """The blocks of a module, with the adapters in them, ready to be run through a region."""

    def __init__(self, parts: Sequence[nn.Module], adapters: Adapters | None = None) -> None:
        self._forwards: list[tuple[dict[str, Any], Any]] = []
        for part in parts:
            forward = part.forward if adapters is None else adapters.forward(part)
            slots = slots_of(part) if adapters is None else [*slots_of(part), *adapters.slots(part)]
            self._forwards.append((part.__dict__, functools.partial(_through_region, forward, slots)))

    @contextmanager
    def through(self, region: Region) -> Iterator[None]:
        """Run the forward of every block, and every function marked by `block`, through `region`."""
        token = _region.set(region)
        before = [place.get("forward") for place, _ in self._forwards]
        try:
            # An attribute of the instance hides the method of the class until it is deleted again.
            for place, forward in self._forwards:
                place["forward"] = forward
            yield
        finally:
            _region.reset(token)
            for (place, _), forward in zip(self._forwards, before, strict=True):
                if forward is None:
                    del place["forward"]
                else:
                    place["forward"] = forward


def find_blocks(module: nn.Module, wanted: Sequence[type[nn.Module] | str] | None) -> list[nn.Module]:
    """Return the blocks of a module: the given types or names, else the repeated children.

    Repeated children are the members of a `ModuleList` or `Sequential` that has at least two of one
    type with children of their own; the outermost ones where such lists nest.

    Raises:
        OptionError: when nothing matches; the message lists what there is.
    """
    named = dict(module.named_modules())
    if wanted is None:
        found = _repeated_children(module)
    else:
        types, names = (
            tuple(w for w in wanted if isinstance(w, type)),
            {w for w in wanted if isinstance(w, str)},
        )
        found = [part for name, part in named.items() if name in names or isinstance(part, types)]
        missing = [f"{w!r}" for w in names if w not in named]
        missing += [w.__name__ for w in types if not any(isinstance(part, w) for part in named.values())]
        if missing:
            known = ", ".join(sorted({type(part).__name__ for part in named.values()}))
            raise OptionError(
                f"remat: {type(module).__name__} has no block {', '.join(missing)}; types in it are {known}"
            )
    if not found:
        lists = [name for name, part in named.items() if isinstance(part, nn.ModuleList | nn.Sequential)]
        raise OptionError(
            f"remat: {type(module).__name__} has no repeated children in a ModuleList or Sequential (lists in it: "
            f"{', '.join(lists) or 'none'}); name the blocks with blocks=[...], types or dotted names"
        )
    return found


def _repeated_children(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        children = list(module)
        types = [type(child) for child in children]
        repeated = [child for child in children if types.count(type(child)) > 1 and any(True for _ in child.children())]
        if repeated:
            return repeated
    return [part for child in module.children() for part in _repeated_children(child)]
