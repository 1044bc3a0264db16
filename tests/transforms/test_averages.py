"""Averages of the parameters: `swa`, `ema` and `averaged`."""

import math

import pytest
import torch

import ftrain as ft
from ftrain import optim, tree
from ftrain.errors import OptionError, StructureError
from tests.bits import assert_same_bits
from tests.optim.quadratic import F64, train


def product(params, batch):
    return (params["w"] * batch).sum()


@pytest.mark.parametrize(
    "wrappers", [(), (ft.donated(),), (ft.compiled(backend="eager"),)], ids=["eager", "donated", "compiled"]
)
@pytest.mark.parametrize(("start", "every"), [(0, 1), (3, 1), (2, 4), (50, 1)])
def test_swa_equals_the_averaged_model_of_torch(start, every, wrappers):
    def criterion(model, batch):
        return model(batch).square().mean()

    module = torch.nn.Linear(3, 2).double()
    averages = torch.optim.swa_utils.AveragedModel(module)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    step = ft.compose(ft.train_step(ft.from_module(module, criterion), optim.sgd(0.1)), ft.swa(start, every), *wrappers)
    state = step.init()
    draw = torch.Generator().manual_seed(0)
    for number in range(1, 21):
        batch = torch.randn(4, 3, generator=draw, dtype=F64)
        state, _ = step(state, batch)
        sgd.zero_grad()
        criterion(module, batch).backward()
        sgd.step()
        if number > start and (number - start) % every == 0:
            averages.update_parameters(module)
    # Before the first average, the parameters themselves.
    averaged_module = averages.module if int(averages.n_averaged) else module
    expected = {name: leaf.detach() for name, leaf in averaged_module.named_parameters()}
    torch.testing.assert_close(ft.averaged(state).params, expected, rtol=1e-9, atol=1e-12)


def test_swa_does_not_count_skipped_updates():
    step = ft.compose(ft.train_step(product, optim.sgd(1.0)), ft.swa(1), ft.skip_nonfinite())
    state = step.init({"w": torch.zeros(1)})
    for batch in (1.0, math.nan, 2.0, math.inf, 4.0):
        state, _ = step(state, torch.tensor(batch))
    assert float(state.slots["swa"]["updates"]) == 3
    # The updates that are not skipped make w -1, -3 and -7, and averaging starts after the first.
    assert float(ft.averaged(state).params["w"]) == pytest.approx((-3.0 - 7.0) / 2)


def test_a_donated_step_writes_its_averages_in_place():
    step = ft.compose(ft.train_step(product, optim.sgd(0.1)), ft.swa(), ft.ema(), ft.donated())
    state = step.init({"w": torch.ones(3)})

    def addresses(slots):
        return slots["swa"]["params"]["w"].data_ptr(), slots["ema"]["w"].data_ptr()

    before = addresses(state.slots)
    state, _ = step(state, torch.ones(3))
    assert addresses(state.slots) == before


@pytest.mark.parametrize(
    "wrappers", [(), (ft.donated(),), (ft.compiled(backend="eager"),)], ids=["eager", "donated", "compiled"]
)
def test_a_scheduled_decay_equals_the_averaged_model_of_torch(wrappers):
    def warming_up(step):
        return min(0.9, (1 + step) / (10 + step))

    def criterion(model, batch):
        return model(batch).square().mean()

    module = torch.nn.Linear(3, 2).double()
    averages = torch.optim.swa_utils.AveragedModel(
        module, avg_fn=lambda average, leaf, count: average.lerp(leaf, 1 - warming_up(int(count) - 1))
    )
    averages.update_parameters(module)  # The first update is a copy: `ema` starts with the initial parameters.
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    step = ft.train_step(ft.from_module(module, criterion), optim.sgd(0.1))
    step = ft.compose(step, ft.ema(decay=warming_up), *wrappers)
    state = step.init()
    draw = torch.Generator().manual_seed(0)
    for number in range(12):
        batch = torch.randn(4, 3, generator=draw, dtype=F64)
        old, old_average = state, tree.clone(state.slots["ema"])
        state, metrics = step(old, batch)
        if not step.donate:
            assert_same_bits(old.slots["ema"], old_average)
        assert metrics["ema_decay"] == warming_up(number)
        sgd.zero_grad()
        criterion(module, batch).backward()
        sgd.step()
        averages.update_parameters(module)
    expected = {name: leaf.detach() for name, leaf in averages.module.named_parameters()}
    torch.testing.assert_close(ft.averaged(state).params, expected, rtol=1e-9, atol=1e-12)


def test_a_schedule_of_the_decay_prints_and_is_checked_at_every_step():
    step = ft.compose(ft.train_step(product, optim.sgd(0.1)), ft.ema(ft.schedules.cosine(0.996, 100, end=1.0)))
    assert "<- ema(cosine(0.996, 100, end=1))" in repr(step)
    above_1 = ft.compose(ft.train_step(product, optim.sgd(0.1)), ft.ema(decay=lambda step: 1.0 + step))
    state, _ = above_1(above_1.init({"w": torch.ones(3)}), torch.ones(3))
    with pytest.raises(OptionError, match=r"ema: ema_decay at step 1 is 2\.0, needs a number in \[0, 1\]"):
        above_1(state, torch.ones(3))
    no_number = ft.compose(ft.train_step(product, optim.sgd(0.1)), ft.ema(decay=lambda step: None))
    with pytest.raises(OptionError, match="the schedule of ema_decay, <lambda>, returned a NoneType at step 0"):
        no_number.init({"w": torch.ones(3)})
    for decay in ("0.9", 1.0, None):
        with pytest.raises(OptionError, match=r"ema: decay is .*, needs a number in \[0, 1\)"):
            ft.ema(decay)


def test_averages_of_bfloat16_parameters_are_kept_in_float32():
    step = ft.compose(ft.train_step(product, optim.sgd(1e-2)), ft.swa(), ft.ema(0.9))
    state = step.init({"w": torch.ones(3, dtype=torch.bfloat16)})
    for _ in range(3):
        state, _ = step(state, torch.ones(3, dtype=torch.bfloat16))
    assert state.slots["swa"]["params"]["w"].dtype == torch.float32
    for wrapper in ("ema", "swa"):
        assert ft.averaged(state, wrapper).params["w"].dtype == torch.bfloat16
    assert not torch.equal(state.slots["swa"]["params"]["w"], state.slots["ema"]["w"])
    with pytest.raises(StructureError, match="averaged: the state holds two averages"):
        ft.averaged(state)


def test_swa_and_averaged_refuse_bad_arguments_and_missing_averages():
    with pytest.raises(OptionError, match="swa: every is 0"):
        ft.swa(every=0)
    with pytest.raises(OptionError, match="swa: start is -1"):
        ft.swa(-1)
    state = train(optim.sgd(0.1), 1, ft.ema(0.5))
    with pytest.raises(StructureError, match=r"averaged: .* no average of 'swa', but one of ema; .* with ft\.swa$"):
        ft.averaged(state, "swa")
