"""The Python numbers that a function reads beside its arguments; a captured graph has them as constants."""

from __future__ import annotations

import dis
import functools
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, EnumType
from functools import partial
from operator import attrgetter, is_, itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ftrain.errors import LIBRARIES

SCALARS = {bool, int, float, complex, str, bytes}
"""Classes of values that lead to no other constants."""

CONSTANTS = int, float, complex, str, bytes, type(None), slice, range, Enum, np.generic, torch.dtype, torch.device
"""Classes of values that are compared by their text."""

IMPLICIT = {"forward", "__call__", "__enter__", "__exit__", "__getattr__", "__getitem__", "__iter__", "__bool__"}
IMPLICIT |= {"__float__", "__int__", "__add__", "__radd__", "__mul__", "__rmul__"}
"""Methods that are called without their name."""

NO_SETTINGS = {"__name__", "__doc__", "__module__", "__qualname__", "__class__", "__file__", "__dict__"}
NO_SETTINGS |= vars(nn.Module()).keys()
"""Attributes that Python and torch set."""

FOREIGN = {"torch", "ftrain", "builtins", "numpy", "functools", "logging", "random", "threading"}
"""Packages whose objects have no settings of the user; modules of `torch.nn` have."""

MOST_OBJECTS = 5000
"""The number of objects after which the search ends: what a model of a thousand parts has, several times."""
MOST_ITEMS = 1000
"""The length above which a dict or a list holds data and not settings."""
MOST_VALUES = 32
"""The length above which the numbers in a list are data."""

INSTALLED = tuple({f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")})
"""How the names of files of installed libraries begin."""

GENERATORS = random.Random, np.random.Generator, np.random.RandomState
"""Classes of random generators that a graph would not advance."""

MISSING = "(missing)"

Place: TypeAlias = tuple[Callable[[Any], Any], Any]
"""A function that reads a value again, and its argument."""


class Constants:
    """The numbers, flags and texts that functions and modules read in closures, globals, attributes, dicts and lists.

    A tensor is compared by its identity, a function by its code, and another object by its type: its attributes are
    searched again when another object takes its place. Constants are found by the names in the code of the functions,
    when `values` is first called. Some of them may never be read by the functions. `generators` are the random
    generators of Python and NumPy that it finds in these places.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._left_out: set[str] = set()
        self.generators: list[Any] = []
        self._held: dict[int, Any] = {}
        # The places of the constants, their values, and the texts of the values. One tuple, so that another thread
        # never sees a part of a change.
        self._known: tuple[dict[str, Place], list[Any], dict[str, str]] | None = None

    def values(self) -> Mapping[str, str]:
        """Return the current values of the constants as texts, by name; the same object if none has changed."""
        if self._known is not None:
            places, old_values, texts = self._known
            new_values = _read_all(places) if places else old_values
            # By identity, without a loop of Python: this runs in each call of a step.
            if all(map(is_, new_values, old_values)):
                return texts
            pairs = zip(new_values, old_values, strict=True)
            if all(new is old or (type(new) in SCALARS and type(old) in SCALARS) for new, old in pairs):
                return self._keep(places, new_values)
        # Another object may have other constants.
        search = _Search(self._roots)
        places, self.generators = search.places(), [*search.generators.values()]
        return self._keep(places, _read_all(places))

    def leave_out(self, old: Mapping[str, str]) -> Mapping[str, str]:
        """Leave out the constants that the function itself changed while it was captured.

        `old` has the texts before the capture. Returns the texts of the other constants.
        """
        new = self.values()
        written = changed(old, new)
        if not written or self._known is None:
            return new
        self._left_out.update(written)
        return self._keep(*self._known[:2])

    def _keep(self, places: dict[str, Place], values: list[Any]) -> Mapping[str, str]:
        """Remember the values at places, without those that are left out, and return their texts."""
        kept = {name: value for name, value in zip(places, values, strict=True) if name not in self._left_out}
        texts = {name: self._text(value) for name, value in kept.items()}
        if self._known is not None and texts == self._known[2]:
            texts = self._known[2]
        self._known = {name: places[name] for name in kept}, list(kept.values()), texts
        return texts

    def _text(self, value: Any) -> str:
        if isinstance(value, CONSTANTS):
            return repr(value)
        if isinstance(value, FunctionType):
            value = value.__code__
        elif not isinstance(value, Tensor | type | BuiltinFunctionType):
            return type(value).__qualname__
        # Held, so that no other gets its identity.
        self._held[id(value)] = value
        return f"{getattr(value, '__name__', type(value).__name__)} at {id(value):#x}"


def changed(olds: Mapping[str, str], news: Mapping[str, str]) -> list[str]:
    """Return the names of constants that differ."""
    return [name for name in {**olds, **news} if olds.get(name) != news.get(name)]


READ_ERRORS = AttributeError, KeyError, IndexError, ValueError
"""What reading a constant raises when it is no longer where it was; a ValueError is that of an empty closure cell."""


def _read_all(places: Mapping[str, Place]) -> list[Any]:
    try:
        return [read(owner) for read, owner in places.values()]
    except READ_ERRORS:
        return [_read(*place) for place in places.values()]


def _read(read: Callable[[Any], Any], owner: Any) -> Any:
    try:
        return read(owner)
    except READ_ERRORS:
        return MISSING


class _Search:
    """A search through the objects that functions reach by the names in their code."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._read_names: set[Any] = {*IMPLICIT}
        self._codes: set[CodeType] = set()
        self._objects: dict[int, tuple[str, Any]] = {}
        self.generators: dict[int, Any] = {}
        for root in roots:
            self._add(type(root).__name__ if isinstance(root, nn.Module) else "", root)
        # Code that is reached can name more attributes of objects that are known: repeat until nothing is added.
        old_sizes = None
        while old_sizes != self._sizes():
            old_sizes = self._sizes()
            for name, owner in [*self._objects.values()]:
                if len(self._objects) > MOST_OBJECTS:
                    return
                for child_name, value, place in self._children_of(owner):
                    self._add(_joined(name, child_name), value)
                    if issubclass(type(value), GENERATORS):
                        self.generators[id(value)] = value
                    if type(value) is str and place is not None and value.isidentifier():  # As for `getattr`.
                        self._read_names.add(value)

    def _sizes(self) -> tuple[int, int, int]:
        return len(self._objects), len(self._codes), len(self._read_names)

    def places(self) -> dict[str, Place]:
        """Return how each constant is read, by name."""
        places: dict[str, Place] = {}
        leading = self._leading()
        for owner_name, owner in self._objects.values():
            for child_name, value, place in self._children_of(owner):
                is_constant = id(value) in leading or _is_constant(value, owner)
                if place is None or not is_constant:
                    continue
                name = _joined(owner_name, str(child_name))
                while name in places:
                    name += "'"
                places[name] = place
        return places

    def _leading(self) -> set[int]:
        """Return the identities of the objects that hold constants, or lead to an object that does."""
        leading, parents = list[int](), dict[int, list[int]]()
        for _, owner in self._objects.values():
            children = self._children_of(owner)
            if any(place is not None and _is_constant(value, owner) for _, value, place in children):
                leading.append(id(owner))
            for _, value, _ in children:
                parents.setdefault(id(_unwrapped(value)), []).append(id(owner))
        known = set(leading)
        for each in leading:
            new = {*parents.get(each, ())} - known
            known |= new
            leading.extend(new)
        return known

    def _add(self, name: str, value: Any) -> None:
        try:
            value = _unwrapped(value)
            if id(value) in self._objects or not _may_lead_on(value):
                return
        except Exception:  # A proxy of nothing fails when it is looked at.
            return
        if isinstance(value, FunctionType) and not _is_ours(value):
            name = value.__name__
            self._note(value.__code__)
        # Held here, so that no other object gets its identity.
        self._objects[id(value)] = name, value

    def _note(self, code: CodeType) -> None:
        self._codes.add(code)
        self._read_names.update(code.co_names)
        instructions = [*dis.get_instructions(code)]
        for index, each in enumerate(instructions):
            if each.opname == "IMPORT_NAME":
                self._add(each.argval, sys.modules.get(each.argval))
            elif each.opname == "LOAD_SMALL_INT":  # In Python 3.14 no constant of the code.
                self._read_names.add(each.argval)
            elif each.opname == "LOAD_CONST" and isinstance(each.argval, tuple | frozenset):
                # Keys for a loop, unless they are the names of keyword arguments (Python 3.13).
                is_call = instructions[index + 1].opname.startswith("CALL")
                self._read_names.update(() if is_call else filter(_is_key, each.argval))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._note(constant)
            elif _is_key(constant):  # The key of a dict.
                self._read_names.add(constant)

    def _children_of(self, owner: Any) -> list[tuple[Any, Any, Place | None]]:
        try:
            return [*self._children(owner)]
        except Exception:  # As in `_add`.
            return []

    def _children(self, owner: Any) -> Iterator[tuple[Any, Any, Place | None]]:
        """Yield name, value, and how to read it again; None where that is no constant of a graph."""
        if isinstance(owner, FunctionType):
            yield from _of_function(owner)
            yield from ((name, vars(owner)[name], (attrgetter(name), owner)) for name in self._named(vars(owner)))
        elif isinstance(owner, MethodType):
            yield from (("", each, None) for each in (owner.__func__, owner.__self__))
        elif isinstance(owner, partial):
            yield from (("", each, None) for each in (owner.func, *owner.args))
            yield from ((name, value, None) for name, value in owner.keywords.items())
        elif isinstance(owner, dict):
            # A subclass may compute what it is asked for.
            held = dict(dict.items(owner))
            read = itemgetter if type(owner) is dict else _item_of_subclass
            yield from ((key, held[key], (read(key), owner)) for key in self._named(held))
        elif isinstance(owner, list | tuple):
            few = len(owner) <= MOST_VALUES
            yield from ((str(i), value, (itemgetter(i), owner) if few else None) for i, value in enumerate(owner))
        if not isinstance(owner, FunctionType | MethodType | partial) and type(owner) not in (dict, list, tuple):
            yield from self._of_object(owner)

    def _named(self, values: Mapping[Any, Any]) -> list[Any]:
        """Return the keys that the code of the function has as names."""
        return [name for name in [*values] if _is_key(name) and name in self._read_names]

    def _of_object(self, owner: Any) -> Iterator[tuple[str, Any, Place | None]]:
        """Yield as `_children`, of an object: parts and hooks of a module, methods and attributes that are read."""
        if isinstance(owner, nn.Module):
            yield from _of_module(owner)
        class_attributes: dict[str, Any] = {}
        for cls in reversed((owner if isinstance(owner, type) else type(owner)).__mro__):
            if cls not in (object, nn.Module, ModuleType):
                # A method calls the one that it overrides.
                overridden = [name for name in self._named(class_attributes) if name in vars(cls)]
                yield from (("", class_attributes[name], None) for name in overridden)
                class_attributes |= vars(cls)
        yield from self._of_attributes(owner, class_attributes)

    def _of_attributes(
        self, owner: Any, class_attributes: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any, Place | None]]:
        """Yield as `_children`, of the attributes of an object and of its class that the function names."""
        # A property of the class comes before an attribute of the object.
        descriptors = {name: value for name, value in class_attributes.items() if hasattr(type(value), "__set__")}
        attributes = getattr(owner, "__dict__", {})
        for name in self._named({**class_attributes, **attributes, **descriptors}):
            if name in NO_SETTINGS:
                continue
            is_of_object = name in attributes and name not in descriptors
            value = attributes[name] if is_of_object else class_attributes[name]
            place = attrgetter(name), owner
            if isinstance(value, MemberDescriptorType):
                yield name, _read(*place), place
            elif not is_of_object and hasattr(type(value), "__get__"):
                # What computes its value, and may fail, is not read.
                yield name, value, None
            else:
                yield name, value, place


def _of_module(module: nn.Module) -> Iterator[tuple[str, Any, Place | None]]:
    for name, part in module.named_children():
        yield name, part, None
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        yield "", hook, None


def _is_key(value: Any) -> bool:
    return isinstance(value, str | int)


def _item_of_subclass(key: Any) -> Callable[[Any], Any]:
    return lambda owner: dict.__getitem__(owner, key)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any, Place | None]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        value = _read(read := attrgetter("cell_contents"), cell)
        if not _is_ours(function):
            yield name, value, (read, cell)
        elif not isinstance(value, list | tuple):
            yield name, value, None
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "", default, None
    values = function.__globals__
    if not _is_installed(code.co_filename) and not _is_foreign(str(values.get("__name__"))):
        yield from ((name, values[name], (itemgetter(name), values)) for name in _globals_of(code) & values.keys())


def _is_constant(value: Any, owner: Any) -> bool:
    kind = type(value)  # Not what a proxy says, which may fail.
    if issubclass(kind, Tensor):
        # A graph sees what is written to it, but not another tensor in its place.
        return isinstance(owner, FunctionType | nn.Module)
    return issubclass(kind, (*CONSTANTS, BuiltinFunctionType, FunctionType, type))


def _unwrapped(value: Any) -> Any:
    """Return the function in what a class or a decorator made of it."""
    kind = type(value)
    if issubclass(kind, staticmethod | classmethod):
        return value.__func__
    if issubclass(kind, property):
        return value.fget
    if issubclass(kind, functools.cached_property | functools.partialmethod):
        return value.func
    return value.__wrapped__ if kind is functools._lru_cache_wrapper else value


def _is_ours(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(LIBRARIES[0])


def _joined(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner and name else owner or name


@functools.lru_cache(maxsize=4096)
def _globals_of(code: CodeType) -> set[str]:
    """Return the names of the globals that code reads, with those of functions within."""
    inner = [_globals_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}.union(*inner)


def _is_installed(file: str) -> bool:
    """Whether code is that of a library, whose globals are no settings of the user, and lead to all of it."""
    return file.startswith((*LIBRARIES, *INSTALLED))


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in FOREIGN | sys.stdlib_module_names


def _may_lead_on(value: Any) -> bool:
    """Whether an object can hold settings of the user, or lead to some."""
    if isinstance(value, FunctionType | MethodType | partial | nn.Module):
        return True
    if isinstance(value, dict | list | tuple):
        return len(value) <= MOST_ITEMS
    if isinstance(value, Enum | EnumType):
        return False
    if isinstance(value, ModuleType):
        return not _is_foreign(value.__name__) and not _is_installed(str(getattr(value, "__file__", "")))
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, type) and _is_installed(str(getattr(sys.modules.get(kind.__module__), "__file__", ""))):
        return False
    has_attributes = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
    return has_attributes and kind.__module__.partition(".")[0] not in FOREIGN
