"""Tuning: the error when nothing fits, amounts of memory, and wrong arguments."""

import pytest
import torch

import ftrain as ft
from ftrain.backends.format_bytes import parse_bytes
from ftrain.errors import ComposeError, ConsumedError, DeviceError, OptionError, StructureError
from tests.profiling.problem import batch, make
from tests.profiling.tuning import WIDTH, step_and_batch


def test_the_error_when_nothing_fits_explains_the_memory():
    """The state alone is larger than the limit."""
    step, inputs = make(width=WIDTH), batch(4, WIDTH)
    with pytest.raises(DeviceError) as caught:
        ft.tune(step, step.init(), inputs, memory="300 KiB")
    text = str(caught.value)
    assert text.startswith("tune: nothing fits into 300.0 KiB; with ")
    for expected in (
        "remat=",
        "at the peak, predicted",
        "parameters",
        "optimizer state",
        "What would need less",
        "ft.optim.adamw_8bit",
        "ft.optim.adafactor",
        "trainable=",
    ):
        assert expected in text


@pytest.mark.parametrize("memory", ["8", "8 apples", "GB", "-1GB", 0, -5, 1.5, True, ["1GB"]])
def test_an_invalid_amount_of_memory_is_refused(memory):
    step, inputs = step_and_batch()
    with pytest.raises(OptionError, match=r"tune: memory is .*; needs bytes, as a number or as in '8GB' or '512MiB'"):
        ft.tune(step, step.init(), inputs, memory=memory)


def test_amounts_of_memory():
    amounts = {
        "8GB": 8 * 10**9,
        "8GiB": 8 * 2**30,
        "1.5 mb": 1_500_000,
        "2TiB": 2**41,
        "10kB": 10_000,
        "7B": 7,
        12: 12,
    }
    assert parse_bytes("tune", 8e9) == 8 * 10**9
    assert {amount: parse_bytes("tune", amount) for amount in amounts} == amounts


def test_tune_refuses_other_steps_other_states_no_rounds_and_spent_states():
    step, inputs = step_and_batch()
    with pytest.raises(ComposeError, match="tune: the step is function; needs a Step"):
        ft.tune(lambda state, batch: (state, {}), step.init(), inputs)
    with pytest.raises(StructureError):
        ft.tune(step, make(width=WIDTH, optimizer=ft.optim.sgd(0.1)).init(), inputs)
    with pytest.raises(OptionError, match="tune: rounds is 0"):
        ft.tune(step, step.init(), inputs, memory="1GB", rounds=0)
    spent = step.init()
    ft.donated()(step)(spent, inputs)
    with pytest.raises(ConsumedError):
        ft.tune(step, spent, inputs, memory="1GB")


@pytest.mark.parametrize("options", [{}, {"mesh": (1, 2)}])
def test_tune_needs_a_state_for_a_step_without_a_module(options):
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"^tune: .* has no module; pass a state: tune\(step, step\.init"):
        ft.tune(step, None, torch.ones(4), memory="1GB", **options)
