"""`evaluate(dtype=)`: a loss in 16 bits, from a state that stays in float32."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, params, squares
from tests.laws.models import make_batch, make_model, token_loss
from tests.laws.pipelines import train_on


class Casts(TorchDispatchMode):
    """Records the shape of each tensor that is cast to 16 bits."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and returned.dtype in (torch.bfloat16, torch.float16):
            self.shapes.append(tuple(returned.shape))
        return returned


def trained(*wrappers):
    """Return a step, and its state after two steps."""
    loss = ft.from_module(make_model(0.3, torch.float32), token_loss)
    step = ft.compose(ft.train_step(loss, ft.optim.adamw(0.05)), *wrappers)
    state, _ = train_on(step, [make_batch(index) for index in range(2)])
    return step, state


@pytest.mark.parametrize("dtype", ["bf16", "fp16", torch.bfloat16, "float16"])
def test_an_evaluation_casts_once_and_leaves_the_state(dtype):
    step, state = trained()
    before, counts = tree.clone(state), []
    param_shapes = {tuple(param.shape) for param in state.params.values()}
    evaluation = ft.eval_step(step.base)
    for number in (1, 4):
        with Casts() as casts:
            ft.evaluate(evaluation, state, [make_batch(index) for index in range(number)], dtype=dtype)
        counts.append(sum(shape in param_shapes for shape in casts.shapes))
    # The parameters and the running statistics, which have the same shapes: once for any number of batches.
    assert counts[0] == counts[1] == len(state.params) + sum("running" in name for name in state.buffers)
    assert_same_bits(state, before)
    actual = ft.evaluate(evaluation, state, [make_batch(7)], dtype=dtype)
    expected = ft.evaluate(evaluation, state, [make_batch(7)])
    assert actual != expected
    assert actual["loss"] == pytest.approx(expected["loss"], rel=2e-2)


def test_an_evaluation_computes_in_the_dtype_throughout():
    output_dtypes, param_dtypes, buffer_dtypes = set(), set(), {}

    def record_output(module, inputs, output):
        output_dtypes.add(output.dtype)

    def criterion(model, batch):
        leaf_modules = [module for module in model.modules() if not list(module.children())]
        hooks = [module.register_forward_hook(record_output) for module in leaf_modules]
        loss = token_loss(model, batch)
        for hook in hooks:
            hook.remove()
        param_dtypes.update(leaf.dtype for leaf in model.parameters())
        buffer_dtypes.update((name, leaf.dtype) for name, leaf in model.named_buffers())
        return loss

    model = make_model(0.3, torch.float32)
    state = ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)).init()
    ft.evaluate(ft.eval_step(ft.from_module(model, criterion)), state, [make_batch(0)], dtype="bf16")
    assert param_dtypes == {torch.bfloat16}
    assert {dtype for name, dtype in buffer_dtypes.items() if "running" in name} == {torch.bfloat16}
    assert {dtype for name, dtype in buffer_dtypes.items() if "num_batches" in name} == {torch.int64}
    assert output_dtypes == {torch.bfloat16}


def test_an_evaluation_allows_buffers_that_the_model_replaces_by_float32_ones():
    """Rotary embeddings of transformers do so if their frequencies depend on the length."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            self.scale = torch.full((1,), float(len(x)))
            return self.linear(x.to(self.linear.weight.dtype)) * self.scale

    loss = ft.from_module(Scaled(), lambda model, x: model(x).square().mean())
    state, data = ft.train_step(loss, ft.optim.sgd(0.1)).init(), [torch.ones(2, 3)]
    expected = ft.evaluate(ft.eval_step(loss), state, data)["loss"]
    assert ft.evaluate(ft.eval_step(loss), state, data, dtype="bf16")["loss"] == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_batch_without_examples_changes_no_evaluation(dtype):
    """The mean over no example is NaN, or 0 if the loss guards against that."""
    state, inputs = make().init(params()), batch()
    empty = {name: leaf[:0] for name, leaf in inputs.items()}

    def guarded_squares(params, batch):
        return squares(params, batch).nan_to_num()

    for loss in (squares, guarded_squares):
        expected = ft.evaluate(ft.eval_step(loss), state, [inputs], dtype=dtype)
        assert ft.evaluate(ft.eval_step(loss), state, [empty, inputs, empty], dtype=dtype) == expected


def test_labels_and_weights_of_a_batch_stay_exact():
    labels = []

    def loss(params, batch):
        labels.append((batch["y"].dtype, batch["y"].tolist()))
        return ft.Mean(squares(params, batch) * 0 + batch["y"].sum(), torch.tensor(1.0))

    inputs = {**batch(), "y": torch.tensor([1.0, 257.0, 70001.0, 0.1])}
    state = make().init(params())
    actual = ft.evaluate(ft.eval_step(loss), state, [inputs], dtype="fp16")
    assert labels == [(torch.float32, inputs["y"].tolist())]
    assert actual["loss"] == float(inputs["y"].sum())


def test_an_evaluation_in_bf16_of_adapters_on_frozen_parameters():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    # The outputs are within 3.2 of zero, so their differences from 9 are large, and bfloat16 changes the loss by < 1%.
    loss = ft.from_module(model, lambda model, batch: (model(batch).float() - 9).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.lora(2, targets=["0"]))
    state, before = step.init(seed=3), step.init(seed=3)
    expected = ft.evaluate(ft.eval_step(step.loss), state, [torch.ones(3, 4)])
    actual = ft.evaluate(ft.eval_step(step.loss), state, [torch.ones(3, 4)], dtype="bf16")
    assert actual["loss"] == pytest.approx(expected["loss"], rel=0.01)
    assert_same_bits(state, before)


def test_an_evaluation_in_bf16_casts_floating_point_buffers_and_no_integers():
    def loss(params, batch, buffers):
        assert buffers["count"].dtype == torch.int64
        assert buffers["mean"].dtype == torch.bfloat16
        return squares(params, batch), {}, buffers

    step = ft.train_step(loss, ft.optim.sgd(0.1))
    state = step.init(params(), buffers={"count": torch.tensor(3), "mean": torch.ones(2)})
    ft.evaluate(ft.eval_step(loss), state, [batch()], dtype="bf16")
    assert state.buffers["mean"].dtype == torch.float32


@pytest.mark.parametrize(("trained_in", "dtype"), [("fp16", "bf16"), ("bf16", "fp16"), ("bf16", torch.float16)])
def test_an_evaluation_in_another_dtype_than_that_of_the_loss_is_refused(trained_in, dtype):
    step, state = trained(ft.with_amp(trained_in))
    with failing(ComposeError, "evaluate", repr(dtype), f"computes in {trained_in}", f"with_amp({trained_in})"):
        ft.evaluate(ft.eval_step(step.loss), state, [make_batch(0)], dtype=dtype)
    # The same dtype, and another one for the loss without the wrapper, are no error.
    ft.evaluate(ft.eval_step(step.loss), state, [make_batch(0)], dtype=trained_in)
    ft.evaluate(ft.eval_step(step.base), state, [make_batch(0)], dtype=dtype)
