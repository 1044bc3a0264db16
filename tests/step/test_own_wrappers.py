"""Wrappers that a user writes: what they read and return is what a step without donation and microbatches gives."""

import dataclasses

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError
from tests.bits import assert_same_bits


def on_grad(change, init=None, **options):
    """Return a wrapper of the gradient: ``change(state, gradients) -> gradients``."""

    def wrap(grad):
        return lambda state, batch, rng: change(state, grad(state, batch, rng))

    return ft.Wrapper("own", grad=ft.OnGrad(wrap, **options), slot=ft.SlotSpec(init) if init else None)


def on_update(change, init=None, **options):
    """Return a wrapper of the update: ``change(old, new) -> new``."""

    def wrap(update):
        def updating(state, gradients, hyper, *, donate):
            return change(state, update(state, gradients, hyper, donate=donate))

        return updating

    return ft.Wrapper("own", update=ft.OnUpdate(wrap, **options), slot=ft.SlotSpec(init) if init else None)


def trained(*wrappers):
    def loss(params, batch):
        return (batch @ params["w"] + params["b"]).square().mean()

    step = ft.compose(ft.train_step(loss, ft.optim.adamw(0.1)), *wrappers)
    state = step.init({"w": torch.ones(3, 2), "b": torch.ones(2)})
    for seed in range(3):
        state, _ = step(state, torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))
    return state


def with_slot(record, field, value):
    return dataclasses.replace(record, **{field: {**getattr(record, field), "own": value}})


READERS = {
    "half of an update": lambda: on_update(
        lambda old, new: dataclasses.replace(new, params=ft.tree.map(lambda a, b: (a + b) / 2, old.params, new.params))
    ),
    "old parameters": lambda: on_update(lambda old, new: with_slot(new, "slots", old.params), ft.tree.clone),
    "the last parameters": lambda: on_update(
        lambda old, new: with_slot(
            dataclasses.replace(new, params=ft.tree.map(torch.add, new.params, old.slots["own"])), "slots", new.params
        ),
        ft.tree.clone,
    ),
    "parameters of the gradient": lambda: on_grad(lambda s, g: with_slot(g, "slots", s.params), ft.tree.clone),
    "the same if accepted": lambda: on_grad(lambda s, g: with_slot(g, "accepted_slots", s.params), ft.tree.clone),
}


@pytest.mark.parametrize("name", READERS)
def test_a_donated_step_has_the_bits_of_one_that_is_not(name):
    reference = trained(READERS[name]())
    assert_same_bits(trained(READERS[name](), ft.donated()), reference)


def test_an_update_that_does_not_read_the_old_state_reuses_its_memory():
    def addresses(wrapper):
        step = ft.compose(ft.train_step(lambda p, b: (p * b).sum(), ft.optim.adamw(0.1)), wrapper, ft.donated())
        state = step.init(torch.ones(3))
        before = state.params.data_ptr()
        return before, step(state, torch.ones(3))[0].params.data_ptr()

    before, after = addresses(on_update(lambda old, new: new, reads_old_state=False))
    assert before == after


def refusing(state, gradients):
    return dataclasses.replace(gradients, accept=torch.tensor(False))


def test_a_refusal_that_would_not_be_read_is_an_error():
    with pytest.raises(ComposeError, match=r"accept, which is read only .* ft.OnGrad\(wrap, may_refuse_updates=True\)"):
        trained(on_grad(refusing))


def test_a_refusal_of_one_microbatch_refuses_the_update():
    def refuse_first(state, gradients):
        accepts = state.slots["own"] % 2 == 1
        return with_slot(dataclasses.replace(gradients, accept=accepts), "slots", state.slots["own"] + 1)

    wrapper = on_grad(refuse_first, lambda params: torch.zeros(()), may_refuse_updates=True)
    state = trained(wrapper, ft.accumulate(2))
    assert_same_bits(state.params, {"w": torch.ones(3, 2), "b": torch.ones(2)})
    assert state.slots["own"] == 6


@pytest.mark.parametrize("field", ["slots", "accepted_slots"])
def test_a_slot_goes_from_microbatch_to_microbatch(field):
    def count(state, gradients):
        return with_slot(gradients, field, state.slots["own"] + 1)

    state = trained(on_grad(count, lambda params: torch.zeros(())), ft.accumulate(2))
    assert state.slots["own"] == 6
