"""Tuning: into how many microbatches a batch may be split, and which losses may be."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.errors import DeviceError
from ftrain.profiling.tuning import search
from tests.profiling.problem import batch, make, squares
from tests.profiling.tuning import WIDTH, predicted_peak, step_and_batch, wrapper_names


def test_the_number_of_microbatches_divides_the_batch(timed_trials):
    step, _ = step_and_batch()
    assert [row.microbatches for row in timed_trials(step, batch(6, WIDTH), memory="1GB").rows] == [1, 2]
    assert [row.microbatches for row in timed_trials(step, batch(7, WIDTH), memory="1GB").rows] == [1, 7]
    assert [row.microbatches for row in timed_trials(step, batch(1, WIDTH), memory="1GB").rows] == [1]


def test_clipped_microbatches_do_not_change(timed_trials):
    """Clipping other microbatches would be another update."""
    step, inputs = step_and_batch(ft.clip(1.0), ft.accumulate(4))
    trials = timed_trials(step, inputs, memory=predicted_peak(step, inputs) - 1)
    assert wrapper_names(trials.step) == ["remat", "clip", "accumulate"]
    assert {wrapper.text for wrapper in trials.step.wrappers} >= {"accumulate(4)", "clip(norm<=1)"}


def summed_squares(model, batch):
    return squares(model, batch) * batch["x"].numel()


def weighted_mean(model, batch):
    """Return a weighted mean as a plain number, which does not hold the total weight."""
    return ((model(batch["x"]) - batch["y"]).square().mean(1) * batch["w"]).sum() / batch["w"].sum()


def contrastive(model, batch):
    """Return a loss that compares each example with all others of the batch."""
    logits = F.normalize(model(batch["x"]), dim=1) @ F.normalize(batch["y"], dim=1).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def weighted_mean_with_weight(model, batch):
    """Return `weighted_mean` with the total weight, so that it can be computed in microbatches."""
    return ft.Mean(weighted_mean(model, batch) * batch["w"].sum(), batch["w"].sum())


MICROBATCHES = {squares: 2, weighted_mean_with_weight: 2, summed_squares: 1, weighted_mean: 1, contrastive: 1}
"""Loss -> the largest number of microbatches that the test expects among the trials."""


@pytest.mark.parametrize(
    ("wrappers", "criterion", "microbatches"),
    [
        # With autocast, `make test` takes one loss that may be split and one that may not.
        pytest.param(
            wrappers,
            criterion,
            microbatches,
            id=f"{name}-{criterion.__name__}-{microbatches}",
            marks=pytest.mark.exhaustive if wrappers and criterion not in (squares, weighted_mean) else [],
        )
        for name, wrappers in (("", ()), ("bf16", (ft.with_amp("bf16"),)))
        for criterion, microbatches in MICROBATCHES.items()
    ],
)
def test_a_loss_that_microbatches_would_change_is_not_split(timed_trials, criterion, microbatches, wrappers):
    step = make(*wrappers, width=WIDTH, optimizer=ft.optim.sgd(1e-3), criterion=criterion, drop=0.1)
    inputs = {**batch(64, WIDTH), "w": torch.arange(64.0)}
    trials = timed_trials(step, inputs, memory="1GB")
    assert max(row.microbatches for row in trials.rows if row.predicted) == microbatches
    refused = [row for row in trials.rows if "does not apply" in row.verdict]
    assert len(refused) == (microbatches == 1)
    if refused:
        assert "the loss of the batch is" in refused[0].verdict
        assert "return a Mean(total, weight)" in repr(trials)


def test_the_microbatches_of_a_loss_that_is_no_mean_do_not_change(timed_trials, monkeypatch):
    monkeypatch.setattr(search, "memory_report", lambda *step: [])
    step = make(ft.accumulate(4), width=WIDTH, optimizer=ft.optim.sgd(1e-3), criterion=summed_squares)
    inputs = batch(64, WIDTH)
    trials = timed_trials(step, inputs, memory="1GB")
    assert {row.microbatches for row in trials.rows if row.predicted} == {4}
    with pytest.raises(DeviceError, match="The number of microbatches does not change: the loss of the batch is"):
        timed_trials(step, inputs, memory=int(1.01 * sum(leaf.nbytes for leaf in tree.leaves((step.init(), inputs)))))


def test_a_loss_that_cannot_be_evaluated_is_taken_to_be_a_mean(timed_trials):
    def criterion(model, batch):
        if not model.training:
            raise ValueError("for training alone")
        return squares(model, batch)

    step = make(width=WIDTH, criterion=criterion)
    assert [row.microbatches for row in timed_trials(step, batch(6, WIDTH), memory="1GB").rows] == [1, 2]


@pytest.mark.parametrize("choice", [search.NO_REMAT, search.FULL])
def test_the_memory_of_many_microbatches_follows_from_two(choice):
    step, inputs = step_and_batch(ft.clip(1.0))
    trial = search.Search(step, None, inputs, "1GB")._predict(8, choice)
    expected = ft.anatomy(trial.step, None, inputs)
    assert trial.predicted == pytest.approx(expected.peak, rel=1e-3)
    assert trial.flops == pytest.approx(sum(expected.flops.values()), rel=1e-2)


def test_a_batch_whose_tensors_disagree_on_the_number_of_examples_is_one_batch(timed_trials):
    trials = timed_trials(make(), {**batch(16), "edges": torch.zeros(2, 40)}, {"": 0.5}, memory="1GB")
    assert trials.examples is None
    assert repr(trials).startswith("1 batch within 953.7 MiB")
    header, row = repr(trials).splitlines()[2:4]
    assert header.split()[-1] == "batches/s"
    assert "2.0  <- fastest" in row


class WithBatchSizedBuffer(nn.Module):
    """Has a buffer with a row for each of 8 examples, so it runs on no smaller batch but one of one example."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("offsets", torch.zeros(8, 4))

    def forward(self, x):
        return torch.tanh(self.inner(x) + self.offsets).square().mean()


def test_a_batch_that_cannot_be_split_stays_whole():
    step = ft.train_step(
        ft.from_module(WithBatchSizedBuffer(), lambda model, batch: model(batch["x"])), ft.optim.adamw(1e-3)
    )
    trials = ft.trials(step, step.init(), {"x": torch.randn(8, 4)}, memory="1MB", rounds=1)
    assert trials.step is not None
    assert [row.microbatches for row in trials.rows if row.seconds] == [1]
    assert "the loss fails for half of the batch: The size of tensor" in str(trials)
    predicted = ft.trials(step, None, {"x": torch.randn(8, 4)}, memory="1MB")
    assert {row.microbatches for row in predicted.rows if row.predicted} == {1, 8}  # One example is broadcast to eight.


def test_the_error_when_nothing_fits_is_about_a_step_with_the_microbatches_that_must_not_change(monkeypatch):
    explained = []
    monkeypatch.setattr(search, "memory_report", lambda step, state, batch: explained.append(step) or ["a report"])
    step, inputs = make(ft.clip(1.0), ft.accumulate(4)), batch(8)
    with pytest.raises(DeviceError, match=r"tune: nothing fits into[\s\S]*a report"):
        ft.tune(step, step.init(), inputs, memory="10KiB")
    (explained_step,) = explained
    assert {"clip", "accumulate"} <= {*wrapper_names(explained_step)}
