"""Objects that a compiled function reads beside its arguments: a change in an object, or another object, is seen."""

import dataclasses
import enum
import functools
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

import ftrain as ft


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: float = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    rate: float = 1.0


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


class Scaler:
    def __init__(self):
        self.rate = 1.0

    def scale(self, x):
        return x * self.rate

    def __rmul__(self, x):
        return x * self.rate


class Overriding(Scaler):
    scale_by_partial = functools.partialmethod(Scaler.scale)

    def scale(self, x):
        return super().scale(x)


class Dynamic:
    """Like a configuration of omegaconf: finds its attributes in a dict."""

    def __init__(self):
        self._content = {"rate": 1.0}

    def __getattr__(self, name):
        return self.__dict__["_content"][name]


def set_rate(owner):
    owner.rate = 2.0


def set_item_rate(mapping):
    mapping["rate"] = 2.0


def set_first(container):
    container[0] = 2.0


def assert_change_is_read_again(box, read, change):
    """Check that a compiled function which reads the value in a box computes as eagerly before and after a change."""
    function = ft.compiled(backend="eager")(lambda state, x: (state, {"loss": read(box.value, x)}))
    state, x = torch.ones(()), torch.tensor([1.0, 2.0])
    before = function(state, x)[1]["loss"]
    assert torch.equal(before, read(box.value, x))
    change()
    expected = read(box.value, x)
    assert before.dtype != expected.dtype or not torch.equal(before, expected)
    after = function(state, x)[1]["loss"]
    assert after.dtype == expected.dtype
    assert torch.equal(after, expected)


# Two values, and how a function reads one of them.
REPLACED = {
    "a frozen object": (Frozen(), Frozen(2.0), lambda value, x: x * value.rate),
    "a dict": ({"rate": 1.0}, {"rate": 2.0}, lambda value, x: x * value["rate"]),
    "a tuple": ((1.0, 1.0), (2.0, 1.0), lambda value, x: x * value[0]),
    "None by a number": (None, 2.0, lambda value, x: x if value is None else x * value),
    "a whole number by a float": (1, 1.0, lambda value, x: x.long() * value),
    "zero by its negative": (0.0, -0.0, lambda value, x: x / value),
    "an enum": (Mode.SUM, Mode.MEAN, lambda value, x: x.sum() if value is Mode.SUM else x.mean()),
    "a function of torch": (torch.exp, torch.tanh, lambda value, x: value(x)),
    "a function": (lambda x: x, lambda x: 2 * x, lambda value, x: value(x)),
    "a dtype": (torch.float32, torch.float64, lambda value, x: x.to(value)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_value_in_place_of_another_is_read_again(name):
    old, new, read = REPLACED[name]
    box = SimpleNamespace(value=old)
    assert_change_is_read_again(box, read, lambda: setattr(box, "value", new))


KEY = "rate"
# How an object is made, how a function reads it, and how it is changed.
CHANGED = {
    "a number in a list": (lambda: [1.0], lambda value, x: x * value[0], set_first),
    "slots": (Slots, lambda value, x: x * value.rate, set_rate),
    "a method that another calls by super": (Overriding, lambda value, x: value.scale(x), set_rate),
    "a partial method": (Overriding, lambda value, x: value.scale_by_partial(x), set_rate),
    "an operator": (Scaler, lambda value, x: x.sum() * value, set_rate),
    "attributes in a dict": (Dynamic, lambda value, x: x * value.rate, lambda value: set_item_rate(value._content)),
    "a dict in an object": (lambda: UserDict(rate=1.0), lambda value, x: x * value["rate"], set_item_rate),
    "a whole number as key": (lambda: {0: 1.0}, lambda value, x: x * value[0], set_first),
    "a name in a variable": (Scaler, lambda value, x: x * getattr(value, KEY), set_rate),
    "names in a loop": (
        lambda: {"rate": 1.0},
        lambda value, x: sum(x * value[key] for key in ("rate",)),
        set_item_rate,
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_within_an_object_is_read_again(name):
    make, read, change = CHANGED[name]
    box = SimpleNamespace(value=make())
    assert_change_is_read_again(box, read, lambda: change(box.value))
