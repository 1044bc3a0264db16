"""Batches and microbatches of a model of transformers in which no label counts."""

import math

import pytest
import torch

import ftrain as ft
from ftrain.training.oom_retry import split_step
from tests.step.hf_models import (
    IGNORED,
    LENGTH,
    bert,
    build_model,
    gpt2,
    hand_written_with_declared_loss,
    ids,
    run_step,
)

LABELLED = {"labels": ids(1, shape=(2, LENGTH))}
UNLABELLED = {"labels": torch.full((2, LENGTH), IGNORED)}
LABELLED_FIRST = {"labels": torch.cat([LABELLED["labels"], UNLABELLED["labels"]])}
LABELLED_LAST = {"labels": torch.cat([UNLABELLED["labels"], LABELLED["labels"]])}
WHOLE, SPLIT = (ft.compiled(lowering=lowering, backend="eager") for lowering in ("whole", "split"))


def assert_trains_on_labels_only(step, labelled, unlabelled):
    """Check that a batch without labels changes no parameter and is not a bad step; one with labels trains."""
    state = step.init()
    new, metrics = step(state, unlabelled)
    for name, leaf in state.params.items():
        assert torch.equal(new.params[name], leaf), name
    assert torch.isnan(metrics["loss"])
    assert all(int(slot.get("skipped", 0)) == 0 for slot in new.slots.values() if isinstance(slot, dict))
    new, metrics = step(state, labelled)
    assert torch.isfinite(metrics["loss"])
    assert any(not torch.equal(new.params[name], leaf) for name, leaf in state.params.items())


@pytest.mark.parametrize(
    "wrappers",
    [
        [],
        # It raises an error at the first step whose loss or gradient is not finite.
        [ft.skip_nonfinite(1)],
        [ft.with_amp("fp16")],
        [ft.update_in_backward()],
        [WHOLE],
        [SPLIT],
    ],
    ids=["plain", "skip_nonfinite", "fp16", "update_in_backward", "whole", "split"],
)
def test_a_batch_without_a_label_changes_nothing(wrappers):
    loss = ft.from_module(build_model(hand_written_with_declared_loss).float())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    assert_trains_on_labels_only(step, LABELLED, UNLABELLED)


def test_a_batch_without_a_label_changes_nothing_in_bert():
    loss = ft.from_module(build_model(bert("BertForMaskedLM")))
    step = ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True)
    inputs = {"input_ids": ids(shape=(2, LENGTH))}
    assert_trains_on_labels_only(step, {**inputs, **LABELLED}, {**inputs, **UNLABELLED})


def test_a_batch_of_single_tokens_changes_nothing_in_a_causal_model():
    """Such a model does not predict the first token, so that its label does not count."""
    loss = ft.from_module(build_model(gpt2))
    step = ft.skip_nonfinite(1)(ft.train_step(loss, ft.optim.sgd(0.1)))
    labelled = {"input_ids": ids(shape=(2, LENGTH)), **LABELLED}
    assert_trains_on_labels_only(step, labelled, {"input_ids": ids(shape=(2, 1)), "labels": ids(shape=(2, 1))})


@pytest.mark.parametrize(
    ("batch", "wrappers"),
    [
        (LABELLED_LAST, ()),
        (LABELLED_FIRST, ()),
        (LABELLED_FIRST, (ft.skip_nonfinite(1),)),
        (LABELLED_LAST, (ft.clip(100.0), WHOLE)),
        (LABELLED_FIRST, (SPLIT,)),
    ],
    ids=["first", "last", "skip_nonfinite", "whole", "split"],
)
def test_a_microbatch_without_a_label_adds_nothing(batch, wrappers):
    model = build_model(hand_written_with_declared_loss)
    expected, expected_metrics = run_step(model, LABELLED)
    state, metrics = run_step(model, batch, ft.accumulate(2), *wrappers)
    torch.testing.assert_close(state.params, expected.params, rtol=1e-12, atol=0)
    assert float(metrics["loss"]) == pytest.approx(float(expected_metrics["loss"]), rel=1e-12)


def test_an_evaluation_leaves_out_batches_without_a_label():
    loss = ft.from_module(build_model(hand_written_with_declared_loss))
    step, state = ft.eval_step(loss), ft.train_step(loss, ft.optim.sgd(0.1)).init()
    expected = ft.evaluate(step, state, [LABELLED])["loss"]
    assert ft.evaluate(step, state, [UNLABELLED, LABELLED, UNLABELLED])["loss"] == pytest.approx(expected, rel=1e-12)
    with pytest.warns(UserWarning, match="mean of loss is NaN.*no labels that count"):
        assert math.isnan(ft.evaluate(step, state, [UNLABELLED])["loss"])


@pytest.mark.parametrize("rows", [4, 3])
def test_a_batch_split_for_memory_leaves_out_pieces_without_a_label(rows):
    step = ft.train_step(ft.from_module(build_model(hand_written_with_declared_loss)), ft.optim.sgd(0.1))
    expected, _ = step(step.init(), LABELLED)
    state, _ = split_step(step, 2)(step.init(), {"labels": LABELLED_FIRST["labels"][:rows]})
    torch.testing.assert_close(state.params, expected.params, rtol=1e-12, atol=0)
