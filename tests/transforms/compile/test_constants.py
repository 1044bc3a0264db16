"""The class `Constants`: which objects are searched for numbers, when they are searched again, and what is not kept."""

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import torch
from torch import nn

from ftrain.transforms.compile.constants import Constants


def test_a_hook_reads_a_changed_number_again():
    model, settings = nn.Linear(3, 1), SimpleNamespace(rate=1.0)
    model.register_forward_hook(lambda module, inputs, output: output * settings.rate)
    constants = Constants(model)
    values = constants.values()
    assert constants.values() is values
    settings.rate = 2.0
    assert constants.values() != values


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float = 1.0
    epoch: int = 0


def test_equal_settings_in_a_new_object_are_no_change():
    box = SimpleNamespace(settings=Settings(), bound=float("nan"))
    constants = Constants(lambda x: x * box.settings.rate + box.bound)
    values = constants.values()
    for epoch in range(3):
        box.settings, box.bound = dataclasses.replace(box.settings, epoch=epoch), float("nan")
        assert constants.values() is values


def test_an_attribute_that_fails_when_it_is_read_is_no_constant():
    class Failing:
        def __get__(self, owner, owner_type):
            raise RuntimeError("computed")

    class Owner:
        failing = Failing()

    owner = Owner()
    assert not Constants(lambda: owner.failing).values()


def test_an_object_that_fails_when_its_class_is_asked_for_has_no_constants():
    """As a proxy that is not yet bound to its object does."""

    class Unbound:
        @property
        def __class__(self):
            raise RuntimeError("not bound")

        @property
        def __dict__(self):
            raise RuntimeError("not bound")

    unbound, rate = Unbound(), 2.0
    assert [*Constants(lambda x: x * rate if unbound is None else x).values().values()] == ["2.0"]


def test_a_dict_of_tensors_has_no_constants():
    """If it had, each new batch would start a search."""
    trainer = SimpleNamespace(batch={"x": torch.ones(1)}, rate=1.0)
    assert Constants(lambda: trainer.batch["x"] * trainer.rate).values().keys() == {
        "<lambda>.trainer",
        "<lambda>.trainer.rate",
    }


def test_a_replaced_object_is_not_kept():
    box = SimpleNamespace(settings=Settings())
    constants, old_settings = Constants(lambda: box.settings.rate), weakref.ref(box.settings)
    constants.values()
    box.settings = Settings()
    constants.values()
    gc.collect()
    assert old_settings() is None
