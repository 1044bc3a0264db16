"""Devices that do not exist, or that lack a dtype or a feature."""

import dataclasses

import pytest
import torch

import ftrain as ft
from ftrain.errors import DeviceError
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, params, squares


@pytest.fixture
def cpu_with():
    """A function that replaces fields in the record of the CPU until the test ends."""
    record = ft.backends.get("cpu")
    yield lambda **fields: ft.backends.register(dataclasses.replace(record, describe=lambda: "Turing T4", **fields))
    ft.backends.register(record)


@pytest.mark.parametrize(("dtype", "available"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_a_dtype_that_the_device_cannot_compute_in_is_an_error(dtype, available, cpu_with):
    dtypes = {"bf16": (torch.bfloat16,), "fp16": (torch.float16,)}
    cpu_with(autocast_dtypes=lambda: dtypes[available])
    step = make(squares, ft.with_amp(dtype))
    with failing(DeviceError, "with_amp", "Turing T4", f"compute in {dtype}", available, "float32"):
        step.init(params())
    make(squares, ft.with_amp(available)).init(params())


def test_with_amp_on_a_device_without_any_narrow_dtype_is_an_error(cpu_with):
    cpu_with(autocast_dtypes=tuple)
    with failing(DeviceError, "with_amp", "Turing T4", "float32"):
        make(squares, ft.with_amp("bf16")).init(params())


def test_the_device_of_a_state_from_elsewhere_is_checked_too(cpu_with):
    step = make(squares, ft.with_amp("bf16"))
    state = step.init(params())
    before = ft.tree.clone(state)
    cpu_with(autocast_dtypes=lambda: (torch.float16,))
    with failing(DeviceError, "with_amp", "Turing T4", "bf16"):
        step(state, batch())
    assert_same_bits(state, before)


def test_an_evaluation_in_a_dtype_that_the_device_cannot_compute_in_is_an_error(cpu_with):
    state = make().init(params())
    cpu_with(autocast_dtypes=lambda: (torch.float16,))
    with failing(DeviceError, "evaluate", "Turing T4", "bf16", "fp16"):
        ft.evaluate(ft.eval_step(squares), state, [batch()], dtype="bf16")


def test_tf32_on_a_device_without_it_is_an_error():
    with failing(DeviceError, "with_amp", "CPU", "TF32", "bf16"):
        make(squares, ft.with_amp("tf32")).init(params())


def test_tf32_is_on_within_the_loss_alone(cpu_with):
    entered = []

    class Switch:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *error):
            entered.append(False)

    cpu_with(tf32=Switch)
    step = make(squares, ft.with_amp("tf32"))
    state, _ = step(step.init(params()), batch())
    assert entered == [True, False]
    with pytest.raises(KeyError):
        step(state, {})
    assert entered == [True, False] * 2


@pytest.mark.parametrize("device", ["banana", "banana:0"])
def test_a_device_that_torch_does_not_know_is_an_error(device):
    with failing(DeviceError, "banana", "cpu", "cuda"):
        make().init(params(), device=device)


@pytest.mark.parametrize("device", ["mtia", "meta"])
def test_a_device_that_nobody_registered_is_an_error(device):
    with failing(DeviceError, device, "registered are", "cpu"):
        make().init(params(), device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1)])
def test_a_cuda_device_is_an_error_where_there_is_none(device):
    with failing(DeviceError, "cuda", "available are", "cpu"):
        make().init(params(), device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_a_state_is_made_on_the_device_that_is_named(device):
    assert make().init(params(), device=device).params["w"].device.type == "cpu"
