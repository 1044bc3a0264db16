"""The law of a split step: its gradient in pieces of the batch gives the same update, for any wrappers."""

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError
from ftrain.step.microbatch import most_pieces, split_batch
from ftrain.training.oom_retry import split_step
from tests.training.out_of_memory import (
    assert_close,
    batches,
    fit,
    loss,
    loss_without_dropout,
    params,
    unweighted_loss,
)
from tests.training.problem import assert_bitwise


def make_step(*wrappers, loss=loss_without_dropout):
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True), *wrappers)


@pytest.mark.parametrize("pieces", [2, 4, 6, 100])
@pytest.mark.parametrize("length", [1, 5, 6])
@pytest.mark.parametrize("loss", [loss_without_dropout, unweighted_loss])
@pytest.mark.parametrize(
    "wrappers", [(), (ft.clip(0.1),), (ft.clip(0.1), ft.accumulate(1)), (ft.accumulate(1), ft.ema(0.9))]
)
def test_a_split_is_the_same_update(pieces, length, loss, wrappers):
    step = make_step(*wrappers, loss=loss)
    state, (batch,) = step.init(params()), batches(1, length)
    expected, expected_metrics = step(state, batch)
    actual, metrics = split_step(step, pieces)(state, batch)
    assert_close(actual, expected)
    assert metrics.keys() == expected_metrics.keys()
    for name in metrics.keys() - {"worst"}:  # The mean over pieces of a largest value is another number.
        assert float(metrics[name]) == pytest.approx(float(expected_metrics[name]), abs=1e-12)


@pytest.mark.parametrize("loss", [loss, unweighted_loss])
def test_equal_pieces_have_the_bits_of_accumulate(loss):
    step = make_step(loss=loss)
    state, (batch,) = step.init(params()), batches(1)
    split_state, _ = split_step(step, 3)(state, batch)
    accumulated_state, _ = make_step(ft.accumulate(3), loss=loss)(state, batch)
    assert_bitwise(split_state, accumulated_state)


def test_clip_within_accumulate_clips_the_microbatches_and_not_the_pieces():
    """The pieces of a microbatch are added up before it is clipped."""
    step = make_step(ft.clip(0.1), ft.accumulate(2))
    state, (batch,) = step.init(params()), batches(1)
    expected, _ = step(state, batch)
    assert_close(split_step(step, 3)(state, batch)[0], expected)
    # Microbatches as small as the pieces give another update, so that the comparison above can fail.
    finer, _ = make_step(ft.clip(0.1), ft.accumulate(6))(state, batch)
    assert not torch.allclose(finer.params["w1"], expected.params["w1"], rtol=1e-6)


@pytest.mark.parametrize("loss", [loss_without_dropout, unweighted_loss])
def test_pieces_of_unequal_length_need_no_second_gradient(loss):
    step = make_step(loss=loss)
    state = step.init({**params(), "w1": params()["w1"].repeat(1000, 1)})
    gradient_bytes = []
    for length in (6, 5):
        (batch,) = batches(1, length)
        batch["x"] = batch["x"].repeat(1, 1000)
        anatomy = ft.anatomy(split_step(step, 2), state, batch, measure=False)
        gradient_bytes.append(anatomy.most["gradients"])
    # A second gradient would take 96,000 bytes more.
    assert gradient_bytes[1] == pytest.approx(gradient_bytes[0], abs=100)


def test_split_batch_loses_no_example():
    (batch,) = batches(1, 7)
    for count in range(1, 9):
        pieces = split_batch(batch, count)
        assert len(pieces) == min(count, 7)
        for name in ("x", "y", "weight"):
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), batch[name])
        # A tensor without axes is no example.
        assert all(piece["scale"] is batch["scale"] for piece in pieces)


@pytest.mark.parametrize("batch", [{"x": torch.zeros(3), "y": torch.zeros(4)}, {"n": 3}, torch.zeros(0, 2)])
def test_a_batch_without_examples_or_of_unequal_lengths_is_one_piece(batch):
    assert most_pieces(batch) == 1


def test_update_in_backward_refuses_to_be_split():
    with pytest.raises(ComposeError, match=r"fit\(on_oom='split'\) needs all gradients at once"):
        fit(make_step(ft.update_in_backward()), batches(1))
