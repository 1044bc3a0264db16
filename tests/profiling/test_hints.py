"""Hints of a step: the facts that are measured, and wrong arguments."""

import dataclasses
import time

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, ConsumedError, DataError, StructureError
from ftrain.profiling import rates
from ftrain.profiling.hints import facts_of, run
from tests.profiling.problem import assert_unchanged, batch, make, scripted


def test_facts_of_a_step():
    step, inputs = make(ft.with_amp("bf16"), ft.compiled(backend="eager")), batch()
    state = step.init()
    facts = facts_of(step, state, inputs, 0.5)
    assert (facts.compiled, facts.mixed, facts.tf32, facts.seconds) == (True, True, False, 0.5)
    assert facts.operations > 50
    assert facts.flops > 2 * 64 * 16 * 32 * 6
    assert facts.multiple(torch.bfloat16) == 1
    assert facts.rate > 1e6
    assert 1e-8 < facts.launch < 1e-2


def test_rates_are_measured_on_random_numbers_without_use_of_the_global_generator(monkeypatch):
    inputs, before = [], torch.get_rng_state()

    def record_inputs(work, device):
        inputs.extend(work.args)
        return 1.0

    monkeypatch.setattr(rates, "fastest", record_inputs)
    rates.matmul_rate(torch.device("cpu"), torch.float32)
    assert all(0.9 < tensor.float().std() < 1.1 and tensor.is_contiguous() for tensor in inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_hints_of_a_step(monkeypatch):
    """The operations of the step seem slow to launch, and its data sleep."""
    monkeypatch.setattr(rates, "launch_seconds", lambda device: 1.0)

    class Slow(list):
        def __iter__(self):
            for item in list.__iter__(self):
                time.sleep(0.01)
                yield item

    step, inputs = make(), batch(4)
    state = step.init()
    before = tree.clone((state, inputs))
    hints = {hint.name: hint for hint in ft.hints(step, state, inputs, data=Slow([inputs] * 4))}
    assert_unchanged(state, inputs, before)
    assert {"launches", "loader"} <= set(hints)
    assert not {"dimensions", "TF32 off", "attention"} & set(hints)
    assert all(hint.evidence and hint.advice for hint in hints.values())


def test_a_model_of_convolutions_is_tried_in_bfloat16_if_that_is_native(monkeypatch):
    cpu = ft.backends.get("cpu")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 1))
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.train_step(loss, ft.optim.sgd(0.1))
    monkeypatch.setattr(run, "race", scripted({"BFLOAT16": 0.5}))
    for emulated in ((), (torch.bfloat16,)):
        changed = dataclasses.replace(cpu, emulated_dtypes=lambda emulated=emulated: emulated)
        monkeypatch.setitem(ft.backends.registry._records, "cpu", changed)
        hints = {hint.name for hint in ft.hints(step, step.init(), torch.randn(2, 1, 4, 4))}
        assert ("float32" in hints) == (not emulated)


def test_a_batch_that_cannot_be_doubled_gives_no_hint_about_its_size():
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1))
    assert "small batch" not in {hint.name for hint in ft.hints(step, step.init({"w": torch.ones(3)}), torch.ones(()))}


def test_twice_the_batch_does_not_run_if_it_is_predicted_not_to_fit(monkeypatch):
    """A host that runs out of memory raises no error: its kernel kills the process."""
    lengths, step, inputs = set(), make(), batch(64)
    state = step.init()
    peak = ft.anatomy(step, state, inputs, measure=False).peak

    def wrap(grad):
        def recording(state, batch, rng):
            lengths.add(len(batch["x"]))
            return grad(state, batch, rng)

        return recording

    record_lengths = ft.Wrapper("record_lengths", grad=ft.OnGrad(wrap))
    for free, expected in ((int(1.5 * peak), {64}), (2 * peak, {64, 128})):
        cpu = dataclasses.replace(ft.backends.get("cpu"), free=lambda free=free: free)
        monkeypatch.setitem(ft.backends.registry._records, "cpu", cpu)
        lengths.clear()
        ft.hints(record_lengths(step), state, inputs)
        assert lengths == expected


def test_hints_refuse_other_steps_other_states_iterators_and_spent_states():
    step, inputs = make(), batch(4)
    with pytest.raises(ComposeError, match="hints: the step is function; needs a Step"):
        ft.hints(lambda state, batch: (state, {}), step.init(), inputs)
    with pytest.raises(StructureError):
        ft.hints(step, make(optimizer=ft.optim.sgd(0.1)).init(), inputs)
    with pytest.raises(DataError):
        ft.hints(step, step.init(), inputs, data=iter([inputs]))
    spent = step.init()
    ft.donated()(step)(spent, inputs)
    with pytest.raises(ConsumedError):
        ft.hints(step, spent, inputs)


@pytest.mark.parametrize(
    ("capability", "multiples"),
    [((6, 1), (1, 1)), ((7, 0), (8, 1)), ((7, 5), (8, 1)), ((8, 0), (64, 32)), ((9, 0), (64, 32))],
)
def test_the_multiples_of_nvidia(monkeypatch, capability, multiples):
    from ftrain.backends import cuda

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert tuple(map(cuda.BACKEND.multiple, (torch.float16, torch.float32))) == multiples


def test_the_free_memory_of_a_device_includes_its_unused_cache(monkeypatch):
    from ftrain.backends.device_module import DeviceModule

    class Module:
        @staticmethod
        def mem_get_info():
            return 1000, 8000

        @staticmethod
        def memory_reserved():
            return 500

        @staticmethod
        def memory_allocated():
            return 200

    device = DeviceModule("toy")
    monkeypatch.setattr(torch, "get_device_module", lambda name: Module)
    assert device.free() == 1300
    monkeypatch.setattr(torch, "get_device_module", lambda name: object())
    assert device.free() is None
