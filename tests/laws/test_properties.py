"""Accumulation equals the full batch for any tree, batch size, number of pieces and weights, zeros included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ftrain as ft

SHAPES = st.lists(st.sampled_from([(), (1,), (3,), (2, 3), (0,), (1, 4, 2)]), min_size=1, max_size=4)
WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 2.5, 1e-3, 40.0])


def weighted(params, batch):
    """Return a weighted mean over examples that depends on every parameter."""
    scores = sum((leaf * (index + 1)).sin().sum() for index, leaf in enumerate(ft.tree.leaves(params)))
    errors = (scores * batch["x"] - batch["x"].cos()) ** 2
    return ft.Mean((errors * batch["weight"]).sum(), batch["weight"].sum())


def gradient(params, batch, *wrappers):
    """Return the gradient, as the difference that one step of plain SGD with rate 1 makes, and the metrics."""
    step = ft.compose(ft.train_step(weighted, ft.optim.sgd(1.0)), *wrappers)
    state = step.init(params)
    new, metrics = step(state, batch)
    return ft.tree.map(torch.sub, state.params, new.params), metrics


@given(shapes=SHAPES, n=st.integers(1, 5), examples=st.integers(1, 3), data=st.data())
def test_accumulation_equals_the_full_batch(shapes, n, examples, data):
    length = n * examples
    draw = torch.Generator().manual_seed(length)
    params = {"a": [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]}
    weight = data.draw(st.lists(WEIGHTS, min_size=length, max_size=length))
    batch = {
        "x": torch.randn(length, dtype=torch.float64, generator=draw),
        "weight": torch.tensor(weight, dtype=torch.float64),
    }
    full, full_metrics = gradient(params, batch)
    accumulated, metrics = gradient(params, batch, ft.accumulate(n))
    torch.testing.assert_close(accumulated, full, rtol=1e-12, atol=1e-12 * (1 + float(ft.tree.global_norm(full))))
    torch.testing.assert_close(metrics["loss"], full_metrics["loss"], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("more", [(), (ft.clip(1.0),), (ft.clip(value=0.1), ft.ema(0.5)), (ft.with_amp("fp16"),)])
@pytest.mark.parametrize(
    ("n", "compiled"),
    [(1, ()), (4, ()), (2, (ft.compiled(backend="eager", lowering="whole"),))],
    ids=["eager", "accumulate", "compiled"],
)
def test_weights_of_zero_change_no_parameter_and_give_no_nan(n, more, compiled):
    step = ft.compose(ft.train_step(weighted, ft.optim.adamw(0.1)), ft.accumulate(n), *more, *compiled)
    params = {"w": torch.ones(3), "b": torch.zeros(())}
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, {"x": torch.randn(4), "weight": torch.zeros(4)})
    torch.testing.assert_close(state.params, params, rtol=0, atol=0)
    assert all(bool(leaf.isfinite().all()) for leaf in ft.tree.leaves(state.opt_state))


class GradientIsInput(torch.autograd.Function):
    """The sum of the product of a parameter and a tensor; where it can, it returns that tensor itself as gradient."""

    @staticmethod
    def forward(ctx, leaf, factor):
        ctx.save_for_backward(factor)
        return (leaf * factor).sum()

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return factor if grad == 1 else factor * grad, None


# With a wrapper inside, `accumulate` gets the gradients from it and not from autograd.
@pytest.mark.parametrize("inner", [(), (ft.clip(1e9),)], ids=["alone", "clip inside"])
def test_accumulate_does_not_write_into_gradients_that_share_memory(inner):
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4)}
    original = ft.tree.clone(batch)

    def loss(params, batch):
        # a and b have one gradient, that of c is an expanded number, and that of d is a part of the batch.
        shared = (params["a"] + params["b"]) * batch["y"].mean()
        return shared.sum() + params["c"].sum() + GradientIsInput.apply(params["d"], batch["x"][0])

    def gradient(batch, *wrappers):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *wrappers)
        state = step.init({name: torch.zeros(3) for name in "abcd"})
        return ft.tree.map(torch.neg, step(state, batch)[0].params)

    actual = gradient(batch, *inner, ft.accumulate(2))
    assert torch.equal(batch["x"], original["x"])
    halves = [gradient({name: value[start : start + 2] for name, value in original.items()}) for start in (0, 2)]
    torch.testing.assert_close(actual, ft.tree.map(lambda a, b: (a + b) / 2, *halves))


def test_a_boolean_metric_is_the_share_of_pieces_where_it_is_true():
    def loss(params, batch):
        return (params["w"] * batch).mean(), {"positive": (batch > 0).all()}

    step = ft.accumulate(4)(ft.train_step(loss, ft.optim.sgd(1.0)))
    _, metrics = step(step.init({"w": torch.ones(())}), torch.tensor([1.0, -1.0, 2.0, 3.0]))
    assert float(metrics["positive"]) == 0.75
