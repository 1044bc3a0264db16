"""`skip_spikes` beyond the matrix of laws: spikes, warm-up, norms that do not enter, and bitwise resumption."""

import math

import pytest
import torch

import ftrain as ft
from ftrain.errors import OptionError
from tests.laws.pipelines import assert_equal

CAPTURED = ft.compiled(lowering="whole", backend="eager")
modes = pytest.mark.parametrize("more", [(), (ft.donated(),), (CAPTURED,)], ids=["eager", "donated", "captured"])
RATE = 0.5


def linear(params, batch):
    """A loss whose gradient is the batch."""
    return (params["w"] * batch).sum()


def train(norms, *more, state=None, optimizer=None, **options):
    """Make a step with a gradient of each of these norms; return the last state, and where it acted."""
    step = ft.compose(ft.train_step(linear, optimizer or ft.optim.sgd(RATE)), ft.skip_spikes(**options), *more)
    state = step.init({"w": torch.zeros(4)}) if state is None else state
    acted = []
    for norm in norms:
        state, metrics = step(state, torch.full((4,), norm / 2))
        acted.append(bool(metrics["spike"]))
    return state, acted


def moved(state):
    """How far the parameters have gone, in sums of gradient norms."""
    return float(-state.params["w"][0]) * 2 / RATE


OPTIONS = {"factor": 2.0, "window": 8, "warmup": 3}


@modes
def test_a_spike_is_skipped(more):
    state, acted = train([1, 1, 1, 100, 1, 1.5], *more, **OPTIONS)
    assert acted == [False, False, False, True, False, False]
    assert moved(state) == pytest.approx(5.5)
    assert int(state.step) == 6
    slot = state.slots["skip_spikes"]
    assert int(slot["spikes"]) == 1
    assert int(slot["count"]) == 6
    # What is skipped enters as well.
    assert slot["norms"].tolist() == [1, 1, 1, 100, 1, 1.5, 0, 0]


@modes
def test_a_skipped_step_changes_only_the_slot_and_the_count(more):
    options = {**OPTIONS, "optimizer": ft.optim.adamw(0.1)}
    before, _ = train([1, 2, 1.5], *more, **options)
    before = ft.tree.clone(before)
    after, acted = train([50], *more, state=ft.tree.clone(before), **options)
    assert acted == [True]
    for part in ("params", "buffers", "opt_state", "rng"):
        assert_equal(getattr(after, part), getattr(before, part))
    assert int(after.step) == 4


@modes
def test_a_spike_is_clipped_to_the_limit(more):
    state, acted = train([1, 1, 1, 100, 1.5], *more, action="clip", **OPTIONS)
    assert acted == [False, False, False, True, False]
    assert moved(state) == pytest.approx(3 + 2 + 1.5)
    assert state.slots["skip_spikes"]["norms"][3] == 100


def test_it_does_not_act_before_it_is_warm():
    assert train([1, 100, 1, 100], **OPTIONS)[1] == [False, False, False, True]


@modes
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_that_are_not_finite_do_not_enter(more, bad):
    guards = (ft.skip_nonfinite(), *more)
    with_bad, acted = train([1, bad, 1, bad, 1, 100, 1], *guards, **OPTIONS)
    without, _ = train([1, 1, 1, 100, 1], *guards, **OPTIONS)
    assert acted == [False, False, False, False, False, True, False]
    assert_equal(with_bad.slots["skip_spikes"], without.slots["skip_spikes"])
    assert_equal(with_bad.params, without.params)
    assert int(with_bad.slots["skip_nonfinite"]["skipped"]) == 2


@modes
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_takes_no_place_of_a_full_window(more, bad):
    """It would stand there until the next one, of which the limit is then too large or NaN."""
    options = {"factor": 2.0, "quantile": 1.0, "window": 2, "warmup": 1}
    _, acted = train([1, 1, bad, 100], *more, ft.skip_nonfinite(), **options)
    assert acted == [False, False, False, True]


def test_gradients_that_stay_large_are_taken_in_the_end():
    _, acted = train([1] * 8 + [10] * 8, **OPTIONS)
    assert acted == [False] * 8 + [True] * 5 + [False] * 3


@pytest.mark.parametrize(("quantile", "limit"), [(0.0, 1), (0.25, 2), (0.5, 3), (0.6, 3), (1.0, 5)])
def test_quantiles_of_the_last_norms(quantile, limit):
    options = {"factor": 1.0, "quantile": quantile, "window": 5, "warmup": 7}
    norms = [90, 70, 4, 1, 3, 5, 2]
    for norm, acts in ((limit, False), (limit + 0.01, True)):
        assert train([*norms, norm], **options)[1][-1] is acts


@pytest.mark.parametrize("action", ["skip", "clip"])
def test_it_does_not_act_where_most_gradients_are_zero(action):
    """Every gradient is above a limit of 0, so that nothing would be learned."""
    state, acted = train([0, 0, 0, 0, 1, 0, 2], action=action, **OPTIONS)
    assert acted == [False] * 7
    assert moved(state) == pytest.approx(3)


@pytest.mark.parametrize("more", [(), (ft.donated(),)], ids=["", "donated"])
def test_a_run_resumes_bitwise(more, tmp_path):
    norms = [1, 2, 1, 9, 1.5, 1, 30, 2, 1]
    whole, acted = train(norms, *more, **OPTIONS)
    half, begun = train(norms[:5], *more, **OPTIONS)
    ft.checkpoint.save(tmp_path / "half", half)
    loaded = ft.checkpoint.load(tmp_path / "half", like=half)
    resumed, rest = train(norms[5:], *more, state=loaded, **OPTIONS)
    assert_equal(resumed, whole)
    assert begun + rest == acted
    assert acted.count(True) == 2


def test_before_clip_it_sees_the_norm_and_after_it_what_is_left():
    outside = ft.compose(
        ft.train_step(linear, ft.optim.sgd(RATE)), ft.clip(1.0), ft.skip_spikes(**OPTIONS, action="skip")
    )
    state = outside.init({"w": torch.zeros(4)})
    for norm in (1, 1, 1, 100):
        state, metrics = outside(state, torch.full((4,), norm / 2))
    assert not metrics["spike"]
    assert train([1, 1, 1, 100], ft.clip(1.0), **OPTIONS)[1] == [False, False, False, True]


def test_the_norm_is_kept_as_wide_as_the_widest_parameter():
    step = ft.skip_spikes(ft.train_step(linear, ft.optim.sgd(RATE)))
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert step.init({"w": torch.zeros(4, dtype=dtype)}).slots["skip_spikes"]["norms"].dtype == wide


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"factor": 0}, "factor is 0, needs a positive number"),
        ({"factor": "3"}, "factor is '3', needs a positive number"),
        ({"factor": True}, "factor is True"),
        ({"quantile": 1.5}, r"quantile is 1.5, needs a number in \[0, 1\]"),
        ({"window": 0}, "window"),
        ({"warmup": 0}, "warmup"),
        ({"action": "stop"}, "action is 'stop'; choices are skip, clip"),
        ({"action": ["skip"]}, "action is .'skip'.; choices are skip, clip"),
        ({"action": torch.ones(2).numpy()}, "action is array.*; choices are skip, clip"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(OptionError, match=f"skip_spikes: {message}"):
        ft.skip_spikes(**options)
