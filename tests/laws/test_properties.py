"""Accumulation equals the full batch for any tree, batch size, pieces and weights, all of them zero included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ftrain as ft

SHAPES = st.lists(st.sampled_from([(), (1,), (3,), (2, 3), (0,), (1, 4, 2)]), min_size=1, max_size=4)
WEIGHTS = st.sampled_from([0.0, 0.0, 1.0, 2.5, 1e-3, 40.0])


def weighted(params, batch):
    """A weighted mean over examples, in which every parameter takes part."""
    scores = sum((leaf * (index + 1)).sin().sum() for index, leaf in enumerate(ft.tree.leaves(params)))
    errors = (scores * batch["x"] - batch["x"].cos()) ** 2
    return ft.Mean((errors * batch["weight"]).sum(), batch["weight"].sum())


def gradient(params, batch, *wrappers):
    """The gradient, as the negative step of plain descent with rate one."""
    step = ft.compose(ft.train_step(weighted, ft.optim.sgd(1.0)), *wrappers)
    state = step.init(params)
    new, metrics = step(state, batch)
    return ft.tree.map(torch.sub, state.params, new.params), metrics


@given(shapes=SHAPES, n=st.integers(1, 5), each=st.integers(1, 3), data=st.data())
def test_accumulation_equals_the_full_batch(shapes, n, each, data):
    length = n * each
    draw = torch.Generator().manual_seed(length)
    params = {"a": [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]}
    weight = data.draw(st.lists(WEIGHTS, min_size=length, max_size=length))
    batch = {
        "x": torch.randn(length, dtype=torch.float64, generator=draw),
        "weight": torch.tensor(weight, dtype=torch.float64),
    }
    full, full_metrics = gradient(params, batch)
    pieces, metrics = gradient(params, batch, ft.accumulate(n))
    torch.testing.assert_close(pieces, full, rtol=1e-12, atol=1e-12 * (1 + float(ft.tree.global_norm(full))))
    torch.testing.assert_close(metrics["loss"], full_metrics["loss"], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("more", [(), (ft.clip(1.0),), (ft.clip(value=0.1), ft.ema(0.5)), (ft.with_amp("fp16"),)])
@pytest.mark.parametrize(
    ("n", "compiled"),
    [(1, ()), (4, ()), (2, (ft.compiled(backend="eager", lowering="whole"),))],
    ids=["eager", "accumulate", "compiled"],
)
def test_no_weight_at_all_moves_nothing_and_brings_no_nan(n, more, compiled):
    step = ft.compose(ft.train_step(weighted, ft.optim.adamw(0.1)), ft.accumulate(n), *more, *compiled)
    params = {"w": torch.ones(3), "b": torch.zeros(())}
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, {"x": torch.randn(4), "weight": torch.zeros(4)})
    torch.testing.assert_close(state.params, params, rtol=0, atol=0)
    assert all(bool(leaf.isfinite().all()) for leaf in ft.tree.leaves(state.opt_state))


class Handed(torch.autograd.Function):
    """The product of the parameters and a part of the batch, which it hands over as their gradient where it can."""

    @staticmethod
    def forward(ctx, leaf, given):
        ctx.save_for_backward(given)
        return (leaf * given).sum()

    @staticmethod
    def backward(ctx, grad):
        (given,) = ctx.saved_tensors
        return given if grad == 1 else given * grad, None


@pytest.mark.parametrize("inner", [(), (ft.clip(1e9),)], ids=["added up", "seen first"])
def test_gradients_that_are_not_its_own_are_not_written(inner):
    batch = {"x": torch.randn(4, 3), "y": torch.randn(4)}
    given = ft.tree.clone(batch)

    def loss(params, batch):
        # One gradient for two leaves, one that is a number seen as many, and one that lies in the batch.
        shared = (params["a"] + params["b"]) * batch["y"].mean()
        return shared.sum() + params["c"].sum() + Handed.apply(params["d"], batch["x"][0])

    def gradient(batch, *wrappers):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), *wrappers)
        state = step.init({name: torch.zeros(3) for name in "abcd"})
        return ft.tree.map(torch.neg, step(state, batch)[0].params)

    actual = gradient(batch, *inner, ft.accumulate(2))
    assert torch.equal(batch["x"], given["x"])
    halves = [gradient({name: part[half : half + 2] for name, part in given.items()}) for half in (0, 2)]
    torch.testing.assert_close(actual, ft.tree.map(lambda a, b: (a + b) / 2, *halves))


def test_a_metric_of_yes_and_no_is_the_share_of_yes():
    def loss(params, batch):
        return (params["w"] * batch).mean(), {"positive": (batch > 0).all()}

    step = ft.accumulate(4)(ft.train_step(loss, ft.optim.sgd(1.0)))
    _, metrics = step(step.init({"w": torch.ones(())}), torch.tensor([1.0, -1.0, 2.0, 3.0]))
    assert float(metrics["positive"]) == 0.75
