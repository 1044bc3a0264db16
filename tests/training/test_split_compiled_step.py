"""A compiled step in pieces: one graph for the gradient of a piece, whatever their number, and the same update."""

from contextlib import contextmanager

import pytest
import torch

import ftrain as ft
from ftrain.training.oom_retry import split_step
from ftrain.transforms.compile import capture as capturing
from tests.training.out_of_memory import (
    assert_close,
    batches,
    fit,
    loss_that_fits,
    loss_without_dropout,
    make_step,
    params,
    splits,
    train_by_hand,
)
from tests.training.problem import assert_bitwise


class DropoutNet(torch.nn.Module):
    """A net with torch's dropout, which a compiled step draws for each example."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x))))[:, 0]


def weighted(model, batch):
    error = (model(batch["x"]) - batch["y"]).square() * batch["weight"]
    return ft.Mean(error.sum(), batch["weight"].sum()), {"largest": error.detach().max()}


def unweighted(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make_dropout_step(criterion, backend="eager"):
    loss = ft.from_module(DropoutNet().double(), criterion)
    return make_step(ft.clip(0.1), ft.ema(0.9), ft.compiled(lowering="whole", backend=backend), loss=loss)


@contextmanager
def graph_sizes():
    """Yield a list to which each capture adds the number of nodes of its graph."""
    sizes, capture = [], capturing.capture

    def recording_capture(*args):
        captured = capture(*args)
        sizes.append(len(captured.graph.nodes))
        return captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "capture", recording_capture)
        yield sizes


@pytest.mark.parametrize(
    ("backend", "criterion", "length", "pieces"),
    [
        ("eager", weighted, 12, 4),
        ("eager", weighted, 1, 2),
        ("eager", unweighted, 5, 4),
        pytest.param("eager", weighted, 5, 4, marks=pytest.mark.exhaustive),
        pytest.param("inductor", weighted, 5, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiled_step_in_pieces_is_the_same_update(backend, criterion, length, pieces):
    """With the dropout of the whole batch; called again it gives the same bits."""
    step, (batch,) = make_dropout_step(criterion, backend), batches(1, length)
    expected, expected_metrics = step(step.init(seed=1), batch)
    split = split_step(step, pieces)
    actual, metrics = split(step.init(seed=1), batch)
    assert_close(actual, expected)
    assert float(metrics["loss"]) == pytest.approx(float(expected_metrics["loss"]), rel=1e-12)
    assert_bitwise(split(step.init(seed=1), batch)[0], actual)


def test_the_graphs_of_a_step_in_pieces_are_those_of_one_piece_and_of_the_update():
    """There is one for each length of a piece; all are as small for many pieces as for few."""
    step = make_dropout_step(weighted)
    sizes = {}
    for length, pieces in [(12, 2), (12, 4), (5, 4), (1, 2)]:
        with graph_sizes() as sizes[length, pieces]:
            split_step(step, pieces)(step.init(seed=1), *batches(1, length))
    assert len(sizes[12, 2]) == 2
    assert max(sizes[12, 4]) == max(sizes[12, 2])
    assert len(sizes[12, 4]) == 2
    # The pieces have 2, 1, 1 and 1 examples.
    assert len(sizes[5, 4]) == 3
    assert len(sizes[1, 2]) == 2


def test_splitting_a_compiled_step_captures_graphs_of_single_pieces():
    """Only pieces of 2 examples fit; no try captures a graph of all the pieces."""
    step = make_step(ft.compiled(lowering="whole", backend="eager"), loss=loss_that_fits(2))
    data = batches(3, 16)
    with graph_sizes() as sizes:
        state, history = fit(step, data)
    assert splits(history) == {1: 8}
    assert len(sizes) == 2
    assert_close(state, train_by_hand(make_step(loss=loss_without_dropout), data))


def test_a_resumed_run_of_a_compiled_step_in_pieces_has_the_same_bits(tmp_path):
    step = make_step(ft.compiled(lowering="whole", backend="eager"), loss=loss_that_fits(2))
    data = batches(3, 16)
    expected, _ = fit(step, data)
    fit(step, data, steps=2, checkpoints=ft.Checkpoints(tmp_path, every=1))
    resumed, _ = fit(step, data, steps=3, checkpoints=ft.Checkpoints(tmp_path, every=1))
    assert_bitwise(resumed, expected)


def weighted_of_linear(model, batch):
    return weighted(lambda x: model(x)[:, 0], batch)


@pytest.mark.parametrize("donate", [False, True])
def test_pieces_of_a_compiled_fp16_step(donate):
    """Also within the microbatches of `accumulate`; an overflow in one piece skips the whole update."""
    step = make_step(
        ft.with_amp("fp16"),
        ft.accumulate(2),
        ft.compiled(lowering="whole", backend="eager", donate=donate),
        loss=ft.from_module(torch.nn.Linear(3, 1, bias=False), weighted_of_linear),
    )
    split = split_step(step, 3)
    (batch,) = batches(1, 12, torch.float32)
    # Small gradients: those of a few examples could overflow where the mean of all does not.
    batch |= {name: batch[name] / 10 for name in ("x", "y")}
    state = step.init(seed=1)
    expected, _ = step(ft.tree.clone(state), batch)
    actual, metrics = split(state, batch)
    assert not metrics["skipped"]
    assert_close(actual.params, expected.params, 1e-3)
    assert torch.equal(actual.slots["with_amp"]["scale"], expected.slots["with_amp"]["scale"])
    batch["x"][7] = float("inf")
    params_before = ft.tree.clone(actual.params)
    actual, metrics = split(actual, batch)
    assert metrics["skipped"]
    assert_bitwise(actual.params, params_before)


# Where torch breaks a graph, it reads .grad of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_step_that_cannot_be_captured_is_split_uncompiled():
    def data_dependent_loss(params, batch):
        return loss_without_dropout(params, batch) if float(batch["x"].sum()) > -1e9 else None

    step, data = make_step(ft.compiled(backend="eager"), loss=data_dependent_loss), batches(1)
    state, _ = split_step(step, 2)(step.init(params()), data[0])
    assert_close(state, train_by_hand(make_step(loss=loss_without_dropout), data))
