"""Averages of parameters equal their closed form and those of torch, and can be trained on."""

import pytest
import torch

import ftrain as ft
from ftrain import tree
from tests.parity.fifty_steps import STEPS, TIGHT
from tests.parity.loop_by_hand import REORDERED, WRAPPERS, criterion, make_batches, make_mlp, run, seeded, train_by_hand


@pytest.mark.parametrize(("decay", "wrapper"), [(0.0, "eager"), (0.9, "donated"), (0.999, "compiled")])
def test_ema_equals_the_closed_form_and_averaged_model(decay, wrapper):
    """Equals the closed form d^n p_0 + (1 - d) sum_k d^(n - k) p_k, and torch's `AveragedModel`."""
    model, batches = seeded(make_mlp), make_batches("mlp")
    step = ft.compose(
        ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)), ft.ema(decay), *WRAPPERS[wrapper]()
    )
    state = step.init()
    params_by_step = [tree.clone(state.params)]
    for batch in batches:
        state, _ = step(state, batch)
        params_by_step.append(tree.clone(state.params))
    weights = [decay**STEPS] + [(1 - decay) * decay ** (STEPS - k) for k in range(1, STEPS + 1)]
    assert sum(weights) == pytest.approx(1.0)
    closed = {
        name: sum(weight * p[name] for weight, p in zip(weights, params_by_step, strict=True))
        for name in params_by_step[0]
    }
    average = ft.averaged(state).params
    torch.testing.assert_close(average, closed, **REORDERED)

    swa = torch.optim.swa_utils
    theirs = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(decay))
    theirs.update_parameters(model)
    train_by_hand(model, batches, after=theirs.update_parameters)
    torch.testing.assert_close(average, {n: p.detach() for n, p in theirs.module.named_parameters()}, **REORDERED)


@pytest.mark.parametrize("wrapper", ["donated", "compiled"])
def test_training_on_from_the_average(wrapper):
    """In `ft.averaged(state)` parameters and averages are the same tensors: a donated step must update them once."""
    model, batches = seeded(make_mlp), make_batches("mlp", steps=4)
    plain = ft.ema(0.9)(ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)))
    donating = ft.donated(plain) if wrapper == "donated" else ft.compiled(backend="eager", donate=True)(plain)
    trained, _ = run(plain, plain.init(), batches[:2])
    expected, _ = run(plain, ft.averaged(trained), batches[2:])
    actual, _ = run(donating, ft.averaged(tree.clone(trained)), batches[2:])
    torch.testing.assert_close(actual.params, expected.params, **TIGHT)
    torch.testing.assert_close(actual.slots, expected.slots, **TIGHT)
