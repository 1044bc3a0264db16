"""A schedule of the weight decay: as a loop that sets `weight_decay` in the groups of `torch.optim`."""

import copy

import pytest
import torch

import ftrain as ft
from ftrain.errors import OptionError
from tests.parity.fifty_steps import TIGHT
from tests.parity.loop_by_hand import WRAPPERS, assert_same_model, criterion, make_batches, make_mlp, run, seeded

DECAY = ft.schedules.cosine(0.04, 20, end=0.4)
BIASES = {"matrices": ["*.weight"], "rest": ["*.bias"]}


def optimizers(name, decay):
    """Return our optimizer and a function that makes that of torch, whose first group decays."""
    if name == "muon":
        ours = ft.optim.partition(
            {"matrices": ft.optim.muon(0.02, weight_decay=decay), "rest": ft.optim.sgd(0.0)}, BIASES
        )
        return ours, lambda weights, biases: torch.optim.Muon(weights, lr=0.02)
    groups = [{"weight_decay": 0.0}, {"weight_decay": 0.0}]
    return ft.optim.adamw(1e-2, weight_decay=decay), lambda *params: torch.optim.AdamW(
        [{"params": each, **group} for each, group in zip(params, groups, strict=True)], lr=1e-2
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_scheduled_decay_equals_groups_of_torch(name, wrapper):
    model, batches = seeded(make_mlp), make_batches("mlp", steps=20)
    ours, make_theirs = optimizers(name, DECAY)
    step = ft.compose(ft.train_step(ft.from_module(model, criterion), ours), *WRAPPERS[wrapper]())
    state, losses = run(step, step.init(), batches)
    theirs, expected = copy.deepcopy(model), []
    optimizer = make_theirs(*[[p for p in theirs.parameters() if (p.ndim > 1) == decays] for decays in (True, False)])
    for index, batch in enumerate(batches):
        optimizer.param_groups[0]["weight_decay"] = DECAY(index)
        theirs.zero_grad()
        loss = criterion(theirs, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    torch.testing.assert_close(losses, expected, **TIGHT)
    assert_same_model(theirs, state)


@pytest.mark.parametrize(
    "make", [ft.optim.lion, ft.optim.adamw_8bit, lambda *args, **kw: ft.optim.adamw(*args, state_dtype="bf16", **kw)]
)
def test_a_constant_schedule_decays_as_the_number(make):
    model, batches = seeded(make_mlp, torch.float32), make_batches("mlp", steps=5, dtype=torch.float32)
    loss_fn = ft.from_module(model, criterion)
    number, scheduled = (ft.train_step(loss_fn, make(1e-2, weight_decay=decay)) for decay in (0.1, lambda step: 0.1))
    expected, _ = run(number, number.init(), batches)
    actual, _ = run(scheduled, scheduled.init(), batches)
    assert all(torch.equal(actual.params[key], leaf) for key, leaf in expected.params.items())


def test_a_scheduled_decay_prints_is_reported_and_checked():
    step = ft.train_step(ft.from_module(seeded(make_mlp), criterion), ft.optim.adamw(1e-2, weight_decay=DECAY))
    assert "adamw(constant(0.01), weight_decay=cosine(0.04, 20, end=0.4))" in repr(step)
    batch = make_batches("mlp", steps=1)[0]
    state, metrics = step(step.init(), batch)
    assert metrics["weight_decay"] == DECAY(0)
    assert metrics["lr"] == 1e-2
    falling = ft.train_step(step.loss, ft.optim.adamw(1e-2, weight_decay=lambda step: 0.1 - step))
    with pytest.raises(OptionError, match=r"adamw: weight_decay at step 1 is -0\.9, needs a number in \[0, inf\]"):
        falling(state, batch)
    for factory in (ft.optim.adam, ft.optim.sgd, ft.optim.lamb, ft.optim.adafactor, ft.optim.schedule_free_adamw):
        with pytest.raises(OptionError, match=r"weight_decay is cosine\(.*, needs a number"):
            factory(1e-2, weight_decay=DECAY)
