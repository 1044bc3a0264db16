"""Steps with accumulation equal the loop by hand: losses with weights, clipping, and running statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F

import ftrain as ft
from ftrain.types import Mean
from tests.parity.fifty_steps import F64, STEPS
from tests.parity.loop_by_hand import (
    CLASSES,
    REORDERED,
    WRAPPERS,
    Conv,
    adamw,
    assert_same_model,
    criterion,
    make_batches,
    make_mlp,
    run,
    seeded,
)


def make_tokens(steps=STEPS, rows=8, length=5):
    """Return batches whose rows have 0 to `length` labels that count, so that some microbatches have none."""
    draw = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(steps):
        x = torch.randn(rows, length, 6, generator=draw, dtype=F64)
        y = torch.randint(CLASSES, (rows, length), generator=draw)
        kept = torch.randint(length + 1, (rows, 1), generator=draw)
        kept[:2] = 0
        kept[2] = length
        batches.append({"x": x, "y": torch.where(torch.arange(length) < kept, y, -100)})
    return batches


def token_criterion(model, batch):
    return ft.losses.cross_entropy(model(batch["x"]), batch["y"])


def int_weight_criterion(model, batch):
    """Return the loss of `token_criterion` with an integer weight, as `mask.sum()` gives it."""
    total = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="sum")
    return Mean(total, (batch["y"] != -100).sum())


def float32_weight_criterion(model, batch):
    """Return the loss of `token_criterion` with a float32 weight and a float64 total."""
    mean = token_criterion(model, batch)
    return Mean(mean.total, mean.weight.float())


def train_weighted_by_hand(model, batches):
    """Train a copy of the model with the mean loss per token of the whole batch, and return the copy and its losses."""
    model = copy.deepcopy(model).train()
    optimizer = adamw(model.parameters())
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        logits, y = model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        loss = F.cross_entropy(logits, y, ignore_index=-100, reduction="sum") / (y != -100).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


CRITERIA = {"weight": token_criterion, "count": int_weight_criterion, "narrow": float32_weight_criterion}


@pytest.mark.parametrize("name", CRITERIA)
def test_weighted_loss_without_accumulation(name):
    """The weight of a `Mean` may have any dtype; the gradient is as exact as the dtype of the loss."""
    model, batches = seeded(make_mlp), make_tokens()
    step = ft.train_step(ft.from_module(model, CRITERIA[name]), ft.optim.adamw(1e-2))
    state, losses = run(step, step.init(), batches)
    reference, expected = train_weighted_by_hand(model, batches)
    torch.testing.assert_close(losses, expected, **REORDERED)
    assert_same_model(reference, state, REORDERED)


@pytest.mark.parametrize(
    ("name", "pieces", "wrapper"),
    [("weight", 2, "compiled"), ("weight", 4, "eager"), ("count", 4, "donated"), ("count", 8, "eager")],
)
def test_accumulation_of_uneven_weights(name, pieces, wrapper):
    model, batches = seeded(make_mlp), make_tokens()
    loss = ft.from_module(model, CRITERIA[name])
    step = ft.compose(ft.train_step(loss, ft.optim.adamw(1e-2)), ft.accumulate(pieces), *WRAPPERS[wrapper]())
    state, losses = run(step, step.init(), batches)

    reference, expected = train_weighted_by_hand(model, batches)
    torch.testing.assert_close(losses, expected, **REORDERED)
    assert_same_model(reference, state, REORDERED)


def test_accumulation_then_clip_clips_the_whole_gradient():
    model, batches = seeded(make_mlp), make_tokens()
    base = ft.train_step(ft.from_module(model, token_criterion), ft.optim.adamw(1e-2))
    step, full = ft.compose(base, ft.accumulate(4), ft.clip(0.3)), ft.clip(0.3)(base)
    state, _ = run(step, step.init(), batches)
    expected, _ = run(full, full.init(), batches)
    torch.testing.assert_close(state.params, expected.params, **REORDERED)


def test_accumulation_passes_statistics_from_microbatch_to_microbatch():
    """BatchNorm normalises each microbatch by itself, as in the loop by hand."""
    model, batches = seeded(Conv), make_batches("conv")
    step = ft.accumulate(2)(ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)))
    state, losses = run(step, step.init(), batches)

    reference = copy.deepcopy(model).train()
    optimizer = adamw(reference.parameters())
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        microbatches = zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True)
        microbatch_losses = [criterion(reference, {"x": x, "y": y}) for x, y in microbatches]
        mean = sum(microbatch_losses) / 2
        mean.backward()
        optimizer.step()
        expected.append(mean.detach())
    torch.testing.assert_close(losses, expected, **REORDERED)
    assert_same_model(reference, state, REORDERED)
    assert int(state.buffers["norm.num_batches_tracked"]) == 2 * STEPS
