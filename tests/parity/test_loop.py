"""Fifty steps, also with clipping, equal those of a torch training loop written by hand."""

import copy
import math

import pytest
import torch
from torch import nn

import ftrain as ft
from tests.parity.fifty_steps import STEPS, TIGHT
from tests.parity.loop_by_hand import (
    MODELS,
    WRAPPERS,
    assert_same_model,
    criterion,
    make_batches,
    make_mlp,
    models,
    run,
    seeded,
    train_by_hand,
)


# The tests of the laws compare donated and compiled steps with eager ones; here each is compared with the loop once.
@pytest.mark.parametrize(
    ("model_name", "wrapper"), [("mlp", "eager"), ("conv", "eager"), ("mlp", "donated"), ("conv", "compiled")]
)
def test_a_step_equals_the_loop_by_hand(model_name, wrapper):
    model, batches = seeded(MODELS[model_name]), make_batches(model_name)
    step = ft.compose(ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)), *WRAPPERS[wrapper]())
    before = copy.deepcopy(model.state_dict())
    state, losses = run(step, step.init(), batches)
    theirs, expected = train_by_hand(model, batches)
    torch.testing.assert_close(losses, expected, **TIGHT)
    assert_same_model(theirs, state)
    assert int(state.step) == STEPS
    assert expected[-1] != expected[0]
    # The parameters of the step are in its state, so those of the module are unchanged.
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@models
def test_sgd_with_param_groups(model_name):
    """Weight decay on matrices only: a parameter group in torch, a decay mask in ftrain."""
    model, batches = seeded(MODELS[model_name]), make_batches(model_name)

    def grouped(params):
        params = list(params)
        matrices = [param for param in params if param.ndim >= 2]
        others = [param for param in params if param.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    optimizer = ft.optim.sgd(0.05, momentum=0.9, weight_decay=0.05, decay_mask=lambda name, leaf: leaf.ndim >= 2)
    step = ft.train_step(ft.from_module(model, criterion), optimizer)
    state, losses = run(step, step.init(), batches)
    theirs, expected = train_by_hand(model, batches, make_optimizer=grouped)
    torch.testing.assert_close(losses, expected, **TIGHT)
    assert_same_model(theirs, state)


CLIPS = {
    "norm": (lambda: ft.clip(0.5), lambda params: nn.utils.clip_grad_norm_(params, 0.5)),
    "value": (lambda: ft.clip(value=0.02), lambda params: nn.utils.clip_grad_value_(params, 0.02)),
    "none": (lambda: ft.clip(math.inf), lambda params: nn.utils.clip_grad_norm_(params, math.inf)),
}


@pytest.mark.parametrize(
    ("model_name", "limit", "wrapper"),
    [
        ("mlp", "norm", "eager"),
        ("mlp", "none", "eager"),
        ("conv", "value", "eager"),
        ("conv", "norm", "donated"),
        ("mlp", "value", "compiled"),
    ],
)
def test_clip_equals_torchs_clipping(model_name, limit, wrapper):
    ours, theirs = CLIPS[limit]
    model, batches = seeded(MODELS[model_name]), make_batches(model_name)
    step = ft.compose(
        ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)), ours(), *WRAPPERS[wrapper]()
    )
    state, norms = step.init(), []
    for batch in batches:
        state, metrics = step(state, batch)
        norms.append(float(metrics["grad_norm"]))
    expected = []

    def clip(params):
        params = list(params)
        expected.append(float(nn.utils.get_total_norm([param.grad for param in params])))
        theirs(params)

    reference, _ = train_by_hand(model, batches, clip=clip)
    assert_same_model(reference, state)
    assert norms == pytest.approx(expected, rel=1e-12)
    # Some gradients are longer than the limit of 0.5 and some shorter, so both cases are tested.
    assert limit == "value" or min(norms) < 0.5 < max(norms)


@pytest.mark.parametrize("limit", CLIPS)
def test_clip_is_bitwise_torchs_in_float32(limit):
    ours, theirs = CLIPS[limit]
    model, batches = seeded(make_mlp, torch.float32), make_batches("mlp", dtype=torch.float32)
    step = ours()(ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)))
    state, _ = run(step, step.init(), batches)

    # The last bit of the norm depends on the order of its addends, and the leaves of a state are sorted by name.
    names = [name for name, _ in model.named_parameters()]

    def clip(params):
        by_name = dict(zip(names, params, strict=True))
        theirs([by_name[name] for name in sorted(names)])

    reference, _ = train_by_hand(
        model, batches, clip=clip, make_optimizer=lambda params: torch.optim.SGD(params, lr=0.1, fused=True)
    )
    assert_same_model(reference, state, {"rtol": 0, "atol": 0})
