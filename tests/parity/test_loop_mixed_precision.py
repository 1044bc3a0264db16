"""Mixed precision equals the loop by hand with autocast and `GradScaler`."""

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.transforms.amp import loss_scale as amp
from tests.parity.fifty_steps import STEPS
from tests.parity.loop_by_hand import MODELS, criterion, make_batches, models, run, seeded, train_by_hand


def train_in_autocast_by_hand(model, batches, dtype, *, make_optimizer, scaler=None):
    """Train a copy of the model under autocast, and return the copy, its losses and a trace of the scaler.

    The trace has (scale, growth tracker, parameters) after each step, and is empty without a scaler.
    """
    model = copy.deepcopy(model).train()
    optimizer = make_optimizer(model.parameters())
    losses, trace = [], []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = criterion(model, batch)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            params = {name: param.detach().clone() for name, param in model.named_parameters()}
            trace.append((scaler.get_scale(), scaler._get_growth_tracker(), params))
        losses.append(loss.detach())
    return model, losses, trace


def sgd(params, *, fused=False):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=fused)


def fused_sgd(params):
    return sgd(params, fused=True)


def fused_adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0, fused=True)


OPTIMIZERS = {
    "sgd": (lambda: ft.optim.sgd(0.05, momentum=0.9), fused_sgd),
    "adamw": (lambda: ft.optim.adamw(1e-2), fused_adamw),
}


@pytest.mark.parametrize("family", OPTIMIZERS)
@models
def test_bf16_is_bitwise_the_autocast_loop(model_name, family):
    ours, make = OPTIMIZERS[family]
    model, batches = seeded(MODELS[model_name], torch.float32), make_batches(model_name, dtype=torch.float32)
    step = ft.with_amp("bf16")(ft.train_step(ft.from_module(model, criterion), ours()))
    state, losses = run(step, step.init(), batches)
    reference, expected, _ = train_in_autocast_by_hand(model, batches, torch.bfloat16, make_optimizer=make)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert all(torch.equal(state.params[name], param.detach()) for name, param in reference.named_parameters())
    assert all(torch.equal(state.buffers[name], buffer) for name, buffer in reference.named_buffers())
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(state.opt_state))
    # The computation was in bfloat16: in float32 the first loss is another one.
    _, float32_losses = train_by_hand(model, batches, make_optimizer=make)
    assert not torch.equal(float32_losses[0], expected[0])


GROWTH_INTERVAL = 7


def overflowing(batches, at):
    """Return the batches, with inputs that overflow in float16 at the indices `at`."""
    return [dict(batch, x=batch["x"] * 1e6) if k in at else batch for k, batch in enumerate(batches)]


@pytest.mark.parametrize("family", OPTIMIZERS)
@models
def test_fp16_scales_as_grad_scaler_does(model_name, family, monkeypatch):
    """Scale, growth tracker, skipped steps and parameters are the same, after single overflows and several in a row."""
    monkeypatch.setattr(amp, "GROWTH_INTERVAL", GROWTH_INTERVAL)
    ours, make = OPTIMIZERS[family]
    # Torch's fused SGD takes the infinities of a step that is to be skipped into its momentum.
    make = sgd if family == "sgd" else make
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if family == "sgd" else {"rtol": 0, "atol": 0}
    model = seeded(MODELS[model_name], torch.float32)
    batches = overflowing(make_batches(model_name, dtype=torch.float32), at=(0, 5, 20, 21, 22, 40))
    scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL)
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (
        amp.INITIAL_SCALE,
        amp.GROWTH,
        1 / amp.GROWTH,
    )
    _, expected, trace = train_in_autocast_by_hand(model, batches, torch.float16, make_optimizer=make, scaler=scaler)

    step = ft.with_amp("fp16")(ft.train_step(ft.from_module(model, criterion), ours()))
    state = step.init()
    skipped, scales = [], []
    for k, batch in enumerate(batches):
        before = state
        state, metrics = step(state, batch)
        scale, tracker, params = trace[k]
        slot = state.slots["with_amp"]
        scales.append(scale)
        assert (float(slot["scale"]), int(slot["good"])) == (scale, tracker), f"step {k}"
        torch.testing.assert_close(metrics["loss"], expected[k].float(), **tolerance, equal_nan=True)
        torch.testing.assert_close(state.params, params, **tolerance)
        if metrics["skipped"]:
            skipped.append(k)
            for part in ("params", "opt_state", "buffers"):
                old, new = tree.leaves(getattr(before, part)), tree.leaves(getattr(state, part))
                assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True)), f"step {k}: {part}"
    # The injected overflows were skipped, and the scale also grew in between.
    assert {0, 5, 20, 21, 22, 40} <= set(skipped)
    assert len(skipped) < STEPS / 2
    assert any(a < b for a, b in itertools.pairwise(scales))
    assert int(state.step) == STEPS
    if family == "adamw":
        assert float(state.opt_state["count"]) == STEPS - len(skipped)


def test_fp16_scale_is_bounded_as_that_of_grad_scaler(monkeypatch):
    """With small gradients the scale doubles again and again; at infinity every later step would be skipped."""
    monkeypatch.setattr(amp, "GROWTH_INTERVAL", 1)
    step = ft.with_amp("fp16")(ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1)))
    state = step.init({"w": torch.ones(2)})
    slot = {"scale": torch.tensor(2.0**126), "good": torch.tensor(0)}
    state = dataclasses.replace(state, slots={"with_amp": slot})

    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    scales, expected = [], []
    for _ in range(4):
        state, _ = step(state, torch.full((2,), 0.001))
        scales.append(float(state.slots["with_amp"]["scale"]))
        optimizer.zero_grad()
        scaler.scale((weight * 0.001).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    assert expected == [2.0**127] * 4
    assert scales == expected
    torch.testing.assert_close(state.params["w"], weight.detach())


def test_constants_are_those_of_grad_scaler():
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_growth_interval() == amp.GROWTH_INTERVAL
    assert scaler.get_scale() == amp.INITIAL_SCALE
