"""The Python numbers that a function reads beside its arguments; a captured graph has them as constants."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from ftrain.errors import LIBRARIES

SCALARS = {bool, int, float, str}
WRITES = {"STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"}
OF_MODULE = {"training", "__name__", "__doc__", "__module__", "__qualname__"}
FOREIGN = {"torch", "ftrain", "builtins", "numpy", "functools", "logging", "random", "threading"}
"""Packages whose objects have no settings of the user; modules of `torch.nn` have."""

MOST_ITEMS = 1000
"""The length above which a dict or a list holds data and not settings."""

MISSING = "(missing)"

Read: TypeAlias = Callable[[Any], Any]
"""``owner -> value``."""


class Constants:
    """The numbers, flags and texts that functions and modules read in closures, globals, attributes and dicts.

    Of a tensor in a closure or global it is the identity. They are found by names in the code of the functions, when
    `values` is first called. One that the code also writes is left out, as a counter or the length of a cached table.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._places: list[tuple[Read, Any]] | None = None
        self._names: list[str] = []

    def values(self) -> list[Any]:
        """Return the values that they have now."""
        if self._places is None:
            found = [*_Search(self._roots).places()]
            self._names = [name for name, _, _ in found]
            self._places = [(read, owner) for _, read, owner in found]
        try:
            return [read(owner) for read, owner in self._places]
        except (AttributeError, KeyError, ValueError):
            return [_read(read, owner) for read, owner in self._places]

    def texts(self, values: Sequence[Any]) -> dict[str, str]:
        """Return these values as texts, by the names of the constants."""
        return dict(zip(self._names, map(repr, values), strict=True))

    def leave_out(self, old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        """Leave out those that a function has written itself while it was captured; return the other new values."""
        # As texts: a number may have become a tensor, whose comparison is one.
        texts = zip(map(repr, old), map(repr, new), strict=True)
        kept = [index for index, (before, after) in enumerate(texts) if before == after]
        if len(kept) < len(new) and self._places is not None:
            self._names = [self._names[index] for index in kept]
            self._places = [self._places[index] for index in kept]
        return [new[index] for index in kept]


def _read(read: Read, owner: Any) -> Any:
    try:
        return read(owner)
    except (AttributeError, KeyError, ValueError):
        return MISSING


class _Search:
    """A search through the objects that functions reach by the names in their code."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._read_names = {"forward", "__call__"}
        self._written_names: set[str] = set()
        self._codes: set[CodeType] = set()
        self._objects: dict[int, tuple[str, Any]] = {}
        for root in roots:
            self._add(type(root).__name__ if isinstance(root, nn.Module) else "", root)
        # Code that is reached can name more attributes of objects that are known.
        size = None
        while size != (size := (len(self._objects), len(self._codes))):
            for name, owner in [*self._objects.values()]:
                for child_name, value, _ in self._children(owner):
                    self._add(_joined(name, child_name), value)

    def places(self) -> Iterator[tuple[str, Read, Any]]:
        """Yield the name of each constant, the function that reads it, and the argument of that."""
        for name, owner in self._objects.values():
            for child_name, value, read in self._children(owner):
                if read is None or child_name in self._written_names:
                    continue
                if type(value) in SCALARS or isinstance(value, np.generic):
                    yield _joined(name, child_name), read, owner
                elif isinstance(value, Tensor) and isinstance(owner, FunctionType):
                    # A graph sees what is written to it, but not another tensor in its place.
                    yield _joined(name, child_name), partial(_place_of, read), owner

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if id(value) in self._objects or not _may_lead_on(value):
            return
        if isinstance(value, FunctionType) and not _is_ours(value):
            name = value.__name__
            self._note(value.__code__)
        # Held here, so that no other object gets its identity.
        self._objects[id(value)] = name, value

    def _note(self, code: CodeType) -> None:
        self._codes.add(code)
        self._read_names.update(code.co_names)
        self._written_names.update(each.argval for each in dis.get_instructions(code) if each.opname in WRITES)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._note(constant)
            elif isinstance(constant, str):  # A key of a dict.
                self._read_names.add(constant)

    def _children(self, owner: Any) -> Iterator[tuple[str, Any, Read | None]]:
        """Yield name, value, and how to read it again; None where a number is no constant of a graph."""
        if isinstance(owner, FunctionType):
            yield from _of_function(owner)
        elif isinstance(owner, MethodType):
            yield from (("", each, None) for each in (owner.__func__, owner.__self__))
        elif isinstance(owner, partial):
            yield from (("", each, None) for each in (owner.func, *owner.args))
            yield from ((name, value, None) for name, value in owner.keywords.items())
        elif isinstance(owner, dict):
            yield from ((key, owner[key], itemgetter(key)) for key in self._read_names & owner.keys())
        elif isinstance(owner, list | tuple):
            yield from ((str(index), value, None) for index, value in enumerate(owner))
        else:
            yield from self._of_object(owner)

    def _of_object(self, owner: Any) -> Iterator[tuple[str, Any, Read | None]]:
        if isinstance(owner, nn.Module):
            yield from ((name, part, None) for name, part in owner.named_children())
        of_kind: dict[str, Any] = {}
        for kind in reversed((owner if isinstance(owner, type) else type(owner)).__mro__):
            of_kind |= {} if kind in (object, nn.Module, ModuleType) else vars(kind)
        # A property of the class comes before an attribute of the object.
        descriptors = {name: value for name, value in of_kind.items() if isinstance(value, property)}
        values = {**of_kind, **vars(owner), **descriptors}
        for name in self._read_names & values.keys() - OF_MODULE:
            yield name, values[name], attrgetter(name)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any, Read | None]]:
    code = function.__code__
    for index, name in enumerate(code.co_freevars):
        read = partial(_in_cell, index)
        yield name, _read(read, function), None if _is_ours(function) else read
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "", default, None
    if not code.co_filename.startswith(LIBRARIES):
        values = function.__globals__
        yield from ((name, values[name], partial(_in_globals, name)) for name in _globals_of(code) & values.keys())


def _place_of(read: Read, owner: Any) -> str:
    value = read(owner)
    return f"{type(value).__name__} at {id(value):#x}"


def _in_cell(index: int, function: Any) -> Any:
    return function.__closure__[index].cell_contents


def _in_globals(name: str, function: Any) -> Any:
    return function.__globals__[name]


def _is_ours(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(LIBRARIES[0])


def _joined(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner and name else owner or name


def _globals_of(code: CodeType) -> set[str]:
    """Return the names of the globals that code reads, with those of functions within."""
    inner = [_globals_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}.union(*inner)


def _may_lead_on(value: Any) -> bool:
    """Whether an object can hold settings of the user, or lead to some."""
    if isinstance(value, FunctionType | MethodType | partial | nn.Module):
        return True
    if isinstance(value, dict | list | tuple):
        return len(value) <= MOST_ITEMS
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] not in FOREIGN | sys.stdlib_module_names
    kind = value if isinstance(value, type) else type(value)
    return hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in FOREIGN
