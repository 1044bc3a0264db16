"""The memory of an eager step for gradients and updates, and that a skipped update writes nothing."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import optim, tree
from ftrain.tree import element_slices
from tests.profiling.live_memory import LivePeak
from tests.step.modules import mean_square
from tests.step.states import assert_same_bits

WIDTH, LAYERS = 16, 8
NAN_AT = 2


def make_step(optimizer, *wrappers):
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    torch.manual_seed(0)
    loss = ft.from_module(nn.Sequential(*layers), mean_square)
    return ft.compose(ft.train_step(loss, optimizer), *wrappers)


@pytest.mark.parametrize(
    "wrappers",
    [
        [ft.clip(1e-3)],
        [ft.clip(value=1e-3)],
        [ft.skip_spikes(1.0, warmup=1, action="clip")],
        [ft.with_amp("fp16"), ft.clip(1e-3)],
        [ft.accumulate(2), ft.clip(1e-3)],
        [ft.skip_nonfinite(3)],
    ],
    ids=lambda wrappers: " ".join(wrapper.text for wrapper in wrappers),
)
def test_a_donated_step_needs_the_memory_of_one_gradient(wrappers, monkeypatch):
    monkeypatch.setattr(element_slices, "LEAST_AT_ONCE", WIDTH * WIDTH)
    step, batch = make_step(optim.adamw(1e-3), *wrappers, ft.donated()), torch.ones(2, WIDTH)
    state = step.init(seed=0)
    for _ in range(2):
        state, _ = step(state, batch)
    assert extra_memory(step, state, batch) < 1.5


def test_a_step_that_may_skip_its_update_needs_the_memory_of_one_new_state():
    step, batch = make_step(optim.adamw(1e-3), ft.skip_nonfinite(3)), torch.ones(2, WIDTH)
    # The gradient (1), and new parameters with two moments (3).
    assert extra_memory(step, step.init(seed=0), batch) < 4.5


def extra_memory(step, state, batch):
    """Return the peak memory of a step without its inputs, divided by the memory of the parameters."""
    params = sum(leaf.nbytes for leaf in tree.leaves(state.params))
    with LivePeak((state, batch)) as live:
        at_rest = live.peak
        step(state, batch)
    return (live.peak - at_rest) / params


@pytest.mark.parametrize("wrapper", [ft.skip_nonfinite(3), ft.with_amp("fp16")], ids=lambda wrapper: wrapper.text)
@pytest.mark.parametrize(
    "optimizer",
    [
        optim.adamw(1e-2, weight_decay=0.1, amsgrad=True),
        optim.adam(1e-2),
        optim.sgd(1e-2, momentum=0.9),
        optim.adagrad(1e-2),
        # The kernels of these have no flag that skips the update.
        optim.lion(1e-2),
        optim.adamw_8bit(1e-2, min_size=1),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_a_skipped_update_changes_nothing_and_a_donated_state_has_the_same_bits(optimizer, wrapper):
    batches = [torch.full((2, WIDTH), torch.nan if number == NAN_AT else number + 1.0) for number in range(4)]
    states = []
    for donation in ([], [ft.donated()]):
        step = make_step(optimizer, wrapper, *donation)
        state = step.init(seed=0)
        for number, batch in enumerate(batches):
            before = tree.clone(state)
            state, metrics = step(state, batch)
            if number == NAN_AT:
                assert metrics["skipped"]
            if metrics["skipped"]:  # In float16 other steps may overflow, too.
                assert_same_bits((state.params, state.opt_state), (before.params, before.opt_state))
        states.append(state)
    assert_same_bits(*states)
