"""The blocks of a model, such as its layers: find them, and let a wrapper change how they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from torch import nn

from ftrain._context import setting
from ftrain.errors import OptionError
from ftrain.step.swap_params import Slot

Region: TypeAlias = Callable[..., Any]
"""``region(function, slots, choice, *args, **kwargs)``: runs a block and changes how, by rematerialisation, say."""

Wanted: TypeAlias = Sequence[type[nn.Module] | str] | Mapping[type[nn.Module] | str, Any] | Callable[..., Any]
"""Which modules are blocks: types and dotted names, or a dict from these to the choice for each, or
``(name, module) -> choice``, None for a module that is not a block."""

F = TypeVar("F", bound=Callable[..., Any])

Watcher: TypeAlias = Callable[..., Any]
"""``watcher(name, run, *args, **kwargs)``: observes a function that `block` marks, and calls it through `run`."""

_region: ContextVar[Region | None] = ContextVar("ftrain_region", default=None)
_watcher: ContextVar[Watcher | None] = ContextVar("ftrain_watcher", default=None)
_unrecorded: ContextVar[bool] = ContextVar("ftrain_unrecorded", default=False)


def block(function: F) -> F:
    """Mark a function as one block of a model, which `remat` recomputes as a whole.

    Without `remat` it runs unchanged. Pass the tensors that it uses as arguments: those in its closure must not be
    replaced before it is recomputed.
    """
    run = functools.partial(_through_region, function, (), None)

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        watcher = _watcher.get()
        return run(*args, **kwargs) if watcher is None else watcher(function.__name__, run, *args, **kwargs)

    return marked  # type: ignore[return-value]


def _through_region(function: Callable[..., Any], slots: Sequence[Slot], choice: Any, *args: Any, **kwargs: Any) -> Any:
    region = _region.get()
    if region is None:
        return function(*args, **kwargs)
    return region(function, slots, choice, *args, **kwargs)


def within(region: Region | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function whose blocks run through a region, or unchanged if it is None.

    The region is set in the thread that runs the function, which may be one of autograd's.
    """
    token = _region.set(region)
    try:
        return function(*args, **kwargs)
    finally:
        _region.reset(token)


@contextmanager
def forwarding(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Context in which modules run other functions instead of their `forward`."""
    # An attribute of the instance hides the method of the class until it is deleted again.
    attributes = [(part.__dict__, part.__dict__.get("forward"), forward) for part, forward in forwards]
    try:
        for of_part, _, forward in attributes:
            of_part["forward"] = forward
        yield
    finally:
        for of_part, replaced, _ in attributes:
            if replaced is None:
                # Ctrl-C may have come before it was set.
                of_part.pop("forward", None)
            else:
                of_part["forward"] = replaced


unrecorded = functools.partial(setting, _unrecorded, True)
"""``() -> context`` for operations that only observe the run. A recomputation does not repeat them, so they are not
recorded."""

is_unrecorded = _unrecorded.get
"""``() -> bool``: whether the current operation is in a context of `unrecorded`."""


watched_by = functools.partial(setting, _watcher)
"""``watcher -> context`` in which the watcher observes each call of a function that `block` marks."""


@contextmanager
def through(region: Region, blocks: Iterable[tuple[nn.Module, Sequence[Slot], Any]]) -> Iterator[None]:
    """Context in which blocks, with their slots and choices, and functions that `block` marks run through a region."""
    # An adapter or an observer may have replaced the `forward` of a module.
    forwards = [(part, functools.partial(_through_region, part.forward, *more)) for part, *more in blocks]
    with setting(_region, region), forwarding(forwards):
        yield


def find_blocks(module: nn.Module, wanted: Wanted | None) -> dict[nn.Module, Any]:
    """Return the blocks of a module and the choice for each: those in `wanted`. Default: `repeated_children`.

    If a name and a type match the same module, the name counts. Raises an OptionError if nothing matches.
    """
    named = dict(module.named_modules())
    if wanted is None:
        blocks = dict.fromkeys(repeated_children(module))
    elif isinstance(wanted, Sequence | Mapping):
        choices = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
        _require_blocks(module, named, choices)
        blocks = _chosen_blocks(named, choices)
    else:
        chosen = {part: wanted(name, part) for name, part in named.items()}
        blocks = {part: choice for part, choice in chosen.items() if choice is not None}
    if not blocks:
        lists = [name or "itself" for name, part in named.items() if isinstance(part, nn.ModuleList | nn.Sequential)]
        problem = (
            "has no repeated children with children of their own in a ModuleList or Sequential"
            if wanted is None
            else "has no such blocks"
        )
        raise OptionError(
            f"remat: {type(module).__name__} {problem} (its lists: {', '.join(lists) or 'none'}); name the blocks by "
            "blocks=[...], types or dotted names"
        )
    return blocks


def _chosen_blocks(named: Mapping[str, nn.Module], choices: Mapping[Any, Any]) -> dict[nn.Module, Any]:
    """Return the choice for each module whose name, or one of whose types, is a key of `choices`."""
    types = [key for key in choices if isinstance(key, type)]
    blocks = {}
    for name, part in named.items():
        matches = [name] if name in choices else [cls for cls in types if isinstance(part, cls)]
        if matches:
            blocks[part] = choices[matches[0]]
    return blocks


def _require_blocks(module: nn.Module, named: Mapping[str, nn.Module], choices: Mapping[Any, Any]) -> None:
    """Check that every name and type in `choices` matches a module. Raises an OptionError if not."""
    missing = [f"{key!r}" for key in choices if not isinstance(key, type) and key not in named]
    types = [key for key in choices if isinstance(key, type)]
    missing += [cls.__name__ for cls in types if not any(isinstance(part, cls) for part in named.values())]
    if missing:
        known = ", ".join(sorted({type(part).__name__ for part in named.values()}))
        raise OptionError(f"remat: {type(module).__name__} has no block {', '.join(missing)}; its types are {known}")


def repeated_children(module: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a module: members of a `ModuleList` or `Sequential` that share their type.

    A member counts if it has children, and at least one other member has its type. In nested lists, only the outermost
    list with such members counts. The members of a `ModuleList` or `ModuleDict` in a list, which has no forward, count
    as members of that list.
    """
    if isinstance(module, nn.ModuleList | nn.Sequential):
        members = [*_members(module)]
        types = [type(member) for member in members]
        repeated = [member for member in members if types.count(type(member)) > 1 and [*member.children()]]
        if repeated:
            return repeated
    return [part for child in module.children() for part in repeated_children(child)]


def _members(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and type(child).forward is nn.Module.forward:
            yield from _members(child)
        else:
            yield child
