"""Dropout depends on the seed and the step alone; a loop by hand with the same seeds draws the same masks."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import random
from tests.parity.fifty_steps import F64, TIGHT
from tests.parity.loop_by_hand import CLASSES, WRAPPERS, adamw, assert_same_model, criterion, make_batches, run, seeded


def make_dropout():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.4), nn.Linear(32, CLASSES))


def keyed_loss(params, batch, rng):
    hidden = random.dropout(rng, torch.relu(batch["x"] @ params["w"]), 0.4)
    return F.cross_entropy(hidden @ params["v"], batch["y"])


def dropout_steps():
    draw = torch.Generator().manual_seed(3)
    params = {
        "w": torch.randn(6, 32, generator=draw, dtype=F64),
        "v": torch.randn(32, CLASSES, generator=draw, dtype=F64),
    }
    module = ft.train_step(ft.from_module(seeded(make_dropout), criterion), ft.optim.adamw(1e-2))
    keyed = ft.train_step(keyed_loss, ft.optim.adamw(1e-2))
    return {"stock": (module, None), "keyed": (keyed, params)}


@pytest.mark.parametrize(
    ("name", "wrapper"), [("stock", "donated"), ("stock", "compiled"), ("keyed", "eager"), ("keyed", "compiled")]
)
def test_dropout_depends_on_the_seed_alone(name, wrapper):
    step, params = dropout_steps()[name]
    step = ft.compose(step, *WRAPPERS[wrapper]())
    batches = make_batches("mlp", steps=10)

    def losses(seed, torch_seed):
        with torch.random.fork_rng():
            torch.manual_seed(torch_seed)
            before = torch.get_rng_state()
            _, actual = run(step, step.init(params, seed=seed), batches)
            assert torch.equal(before, torch.get_rng_state())
        return [float(loss) for loss in actual]

    first = losses(seed=0, torch_seed=1)
    assert first == losses(seed=0, torch_seed=2)
    assert all(a != b for a, b in zip(first, losses(seed=1, torch_seed=1), strict=True))


def test_dropout_differs_from_step_to_step():
    step, _ = dropout_steps()["stock"]
    batch = make_batches("mlp", steps=1)[0]
    state = step.init()
    new, first = step(state, batch)
    _, again = step(state, batch)
    _, next_step = step(dataclasses.replace(state, step=new.step), batch)
    assert torch.equal(first["loss"], again["loss"])
    assert not torch.equal(first["loss"], next_step["loss"])


def test_stock_dropout_by_hand():
    """A loop by hand that seeds torch from the key of each step draws the same dropout masks."""
    model, batches = seeded(make_dropout), make_batches("mlp")
    step = ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2))
    state, losses = run(step, step.init(seed=4), batches)

    reference = copy.deepcopy(model).train()
    optimizer = adamw(reference.parameters())
    expected = []
    with torch.random.fork_rng():
        for k, batch in enumerate(batches):
            torch.manual_seed(random.seed_of(random.key_data(random.fold_in(random.key(4), k))))
            optimizer.zero_grad()
            loss = criterion(reference, batch)
            loss.backward()
            optimizer.step()
            expected.append(loss.detach())
    torch.testing.assert_close(losses, expected, **TIGHT)
    assert_same_model(reference, state)
