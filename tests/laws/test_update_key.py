"""The random key of an optimizer: another one for each step and each label of a partition, and not that of the loss."""

import pytest
import torch

import ftrain as ft
from ftrain import optim, random, tree
from ftrain.types import RNG, Optimizer


def key_recorder():
    """Return an optimizer whose state is the key of its last update."""

    def update(grads, opt_state, params, hyper, *, donate=False):
        return params, {"key": hyper[RNG].clone()}

    return Optimizer(
        lambda params: {"key": torch.zeros(2, dtype=torch.int64)}, update, {}, "key_recorder", needs_rng=True
    )


def loss(params, batch, rng):
    key = torch.zeros(2, dtype=torch.int64) if rng is None else rng
    return tree.leaves(params)[0].sum() * batch, {"key": key.clone()}


def run(step, steps=3):
    """Return for each step the state of the optimizer, which holds its key, and the key of the loss."""
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
def test_the_key_is_the_same_in_every_kind_of_step(name):
    step = ft.train_step(loss, key_recorder(), allow_unused=True)
    keys = run(ft.compose(step, *WRAPPERS[name]))
    for index, (opt_state, key) in enumerate(keys):
        words = random.fold_in_key_data((5, 0), index)
        assert random.key_data(key) == words
        assert random.key_data(opt_state["key"]) == random.update_key_data(words) != words


def test_each_label_and_step_has_its_own_key():
    optimizer = optim.partition({name: key_recorder() for name in "ab"}, lambda name, leaf: name)
    step = ft.train_step(loss, optimizer, allow_unused=True)
    keys = run(step)
    optimizer_keys = {random.key_data(opt_state[name]["key"]) for opt_state, _ in keys for name in "ab"}
    assert len(optimizer_keys) == 2 * len(keys)
    assert not optimizer_keys & {random.key_data(loss_key) for _, loss_key in keys}
    assert optimizer.needs_rng
    assert not optim.partition({"a": optim.sgd(0.1)}, lambda name, leaf: "a").needs_rng
    torch.testing.assert_close(keys, run(ft.compiled(lowering="whole", backend="eager")(step)))


def test_the_key_of_an_update_is_that_of_the_step_xor_two_words():
    # The words of the key, xor "upda" and "te_k" in ASCII.
    assert random.update_key_data((2024, 0)) == (2024 ^ 0x75706461, 0x74655F6B)
