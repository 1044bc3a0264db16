"""Mixed precision: the dtypes that it takes, of autocast and of the parameters."""

import dataclasses

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, OptionError, StructureError
from tests.faults.problem import batch, failing, make, params, squares


@pytest.mark.parametrize("names", [("fp16", "bf16"), ("bf16", "fp16"), ("bf16", "tf32"), ("fp16", "fp16")])
def test_two_precisions_at_once_are_refused(names):
    first, second = names
    with failing(ComposeError, f"with_amp({second})", "already has the wrapper with_amp", f"<- with_amp({first})"):
        make(squares, ft.with_amp(first), ft.with_amp(second))


@pytest.mark.parametrize("dtype", [torch.float32, "fp32", "BF16", None, 16, ["bf16"], {}])
def test_an_unknown_dtype_is_refused(dtype):
    with failing(OptionError, "with_amp", repr(dtype), "bf16, fp16, tf32, fp8"):
        ft.with_amp(dtype)
    # Without a dtype, an evaluation computes as the loss does.
    if dtype is not None:
        with failing(OptionError, "evaluate", repr(dtype), "bf16, fp16 and None"):
            ft.evaluate(ft.eval_step(squares), make().init(params()), [batch()], dtype=dtype)


NARROW = [("fp16", torch.bfloat16), ("fp16", torch.float16), ("bf16", torch.float16)]
"""Dtypes of autocast and of parameters that do not train together."""


@pytest.mark.parametrize(("name", "dtype"), NARROW)
def test_16_bit_parameters_do_not_train_in_mixed_precision(name, dtype):
    """`torch.amp.GradScaler` refuses float16 gradients, and unscales bfloat16 ones within bfloat16."""
    step = make(squares, ft.with_amp(name))
    narrow_params = {**params(), "w": params()["w"].to(dtype)}
    found = str(dtype).removeprefix("torch.")
    with failing(StructureError, f"with_amp({name})", "params.w", found, "float32", "freeze"):
        step.init(narrow_params)
    state = step.init(params())
    with failing(StructureError, f"with_amp({name})", "params.w"):
        step(dataclasses.replace(state, params=narrow_params), batch())


@pytest.mark.parametrize(("name", "dtype"), [*NARROW, ("bf16", torch.bfloat16)])
def test_frozen_parameters_may_have_16_bits(name, dtype):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].to(dtype).requires_grad_(False)
    loss = ft.from_module(model, lambda model, batch: model(batch).float().square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.with_amp(name))
    state, losses = step.init(), []
    for _ in range(5):
        state, metrics = step(state, torch.ones(3, 4))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert {leaf.dtype for leaf in tree.leaves(state.frozen)} == {dtype}
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.float32}


def test_bfloat16_parameters_stay_bfloat16_under_bf16():
    step = make(squares, ft.with_amp("bf16"))
    state, _ = step(step.init(tree.cast(params(), torch.bfloat16)), batch())
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.bfloat16}
