"""The key that an optimizer draws from: of the step, of each label, never that of the loss."""

import pytest
import torch

import ftrain as ft
from ftrain import optim, random, tree
from ftrain.types import RNG, Optimizer


def keeping():
    """An optimizer that keeps the key it was given."""

    def update(grads, opt_state, params, hyper, *, donate=False):
        return params, {"key": hyper[RNG].clone()}

    return Optimizer(lambda params: {"key": torch.zeros(2, dtype=torch.int64)}, update, {}, "keeping", needs_rng=True)


def loss(params, batch, rng):
    key = torch.zeros(2, dtype=torch.int64) if rng is None else rng
    return tree.leaves(params)[0].sum() * batch, {"key": key.clone()}


def run(step, steps=3):
    """The keys of the optimizer and of the loss in a few steps."""
    state = step.init({"a": torch.ones(1), "b": torch.ones(1)}, seed=5)
    keys = []
    for _ in range(steps):
        state, metrics = step(state, torch.tensor(1.0))
        keys.append((tree.clone(state.opt_state), metrics["key"]))
    return keys


WRAPPERS = {
    "eager": [],
    "donated": [ft.donated()],
    "skip": [ft.skip_nonfinite()],
    "whole": [ft.compiled(lowering="whole", backend="eager")],
    "split": [ft.compiled(lowering="split", backend="eager")],
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_is_the_same_however_the_step_runs(name):
    step = ft.train_step(loss, keeping(), allow_unused=True)
    actual = run(ft.compose(step, *WRAPPERS[name]))
    for index, (state, key) in enumerate(actual):
        words = random.fold_in_key_data((5, 0), index)
        assert random.key_data(key) == words
        assert random.key_data(state["key"]) == random.update_key_data(words) != words


def test_is_another_for_each_label_and_step():
    optimizer = optim.partition({name: keeping() for name in "ab"}, lambda name, leaf: name)
    step = ft.train_step(loss, optimizer, allow_unused=True)
    actual = run(step)
    keys = {random.key_data(state[name]["key"]) for state, _ in actual for name in "ab"}
    assert len(keys) == 2 * len(actual)
    assert not keys & {random.key_data(key) for _, key in actual}
    assert optimizer.needs_rng
    assert not optim.partition({"a": optim.sgd(0.1)}, lambda name, leaf: "a").needs_rng
    torch.testing.assert_close(actual, run(ft.compiled(lowering="whole", backend="eager")(step)))


def test_golden_key_data():
    assert random.update_key_data((2024, 0)) == (2024 ^ 0x75706461, 0x74655F6B)
