"""`skip_spikes` beyond the matrix of laws: spikes, warm-up, norms that do not enter, and bitwise resumption."""

import math

import pytest
import torch

import ftrain as ft
from ftrain.errors import OptionError
from tests.bits import assert_same_bits
from tests.transforms.modes import modes

LR = 0.5
OPTIONS = {"factor": 2.0, "window": 8, "warmup": 3}
not_finite = pytest.mark.parametrize("value", [math.inf, math.nan])


def linear(params, batch):
    """A loss whose gradient is the batch."""
    return (params["w"] * batch).sum()


def batch_of_norm(norm):
    return torch.full((4,), norm / 2)


def train_on(step, norms, state=None):
    """Return the state after a step with a gradient of each norm, and in which steps there was a spike."""
    if state is None:
        state = step.init({"w": torch.zeros(4)})
    spikes = []
    for norm in norms:
        state, metrics = step(state, batch_of_norm(norm))
        spikes.append(bool(metrics["spike"]))
    return state, spikes


def train(norms, *outer, state=None, optimizer=None, **options):
    """Return the result of `train_on` for a step with `skip_spikes`."""
    step = ft.train_step(linear, optimizer or ft.optim.sgd(LR))
    return train_on(ft.compose(step, ft.skip_spikes(**options), *outer), norms, state)


def sum_of_applied_norms(state):
    """Return the sum of the gradients' norms by which the parameters have moved."""
    return float(-state.params["w"][0]) * 2 / LR


@modes
def test_a_spike_is_skipped(mode):
    state, spikes = train([1, 1, 1, 100, 1, 1.5], *mode, **OPTIONS)
    assert spikes == [False, False, False, True, False, False]
    assert sum_of_applied_norms(state) == pytest.approx(5.5)
    assert int(state.step) == 6
    slot = state.slots["skip_spikes"]
    assert int(slot["spikes"]) == 1
    assert int(slot["count"]) == 6
    # The norm of a skipped gradient enters as well.
    assert slot["norms"].tolist() == [1, 1, 1, 100, 1, 1.5, 0, 0]


@modes
def test_a_skipped_step_changes_only_the_slot_and_the_count(mode):
    options = {**OPTIONS, "optimizer": ft.optim.adamw(0.1)}
    before, _ = train([1, 2, 1.5], *mode, **options)
    before = ft.tree.clone(before)
    after, spikes = train([50], *mode, state=ft.tree.clone(before), **options)
    assert spikes == [True]
    for part in ("params", "buffers", "opt_state", "rng"):
        assert_same_bits(getattr(after, part), getattr(before, part))
    assert int(after.step) == 4


@modes
def test_a_spike_is_clipped_to_the_limit(mode):
    state, spikes = train([1, 1, 1, 100, 1.5], *mode, action="clip", **OPTIONS)
    assert spikes == [False, False, False, True, False]
    assert sum_of_applied_norms(state) == pytest.approx(3 + 2 + 1.5)
    assert state.slots["skip_spikes"]["norms"][3] == 100


def test_there_is_no_spike_during_the_warmup():
    _, spikes = train([1, 100, 1, 100], **OPTIONS)
    assert spikes == [False, False, False, True]


@modes
@not_finite
def test_norms_that_are_not_finite_do_not_enter(mode, value):
    outer = (ft.skip_nonfinite(), *mode)
    state, spikes = train([1, value, 1, value, 1, 100, 1], *outer, **OPTIONS)
    finite_state, _ = train([1, 1, 1, 100, 1], *outer, **OPTIONS)
    assert spikes == [False, False, False, False, False, True, False]
    assert_same_bits(state.slots["skip_spikes"], finite_state.slots["skip_spikes"])
    assert_same_bits(state.params, finite_state.params)
    assert int(state.slots["skip_nonfinite"]["skipped"]) == 2


@modes
@not_finite
def test_a_norm_that_is_not_finite_is_not_written_into_a_full_window(mode, value):
    """Until the next norm replaces it, it would make the limit too large or NaN."""
    options = {"factor": 2.0, "quantile": 1.0, "window": 2, "warmup": 1}
    _, spikes = train([1, 1, value, 100], *mode, ft.skip_nonfinite(), **options)
    assert spikes == [False, False, False, True]


def test_gradients_that_stay_large_are_applied_in_the_end():
    _, spikes = train([1] * 8 + [10] * 8, **OPTIONS)
    assert spikes == [False] * 8 + [True] * 5 + [False] * 3


@pytest.mark.parametrize(("quantile", "limit"), [(0.0, 1), (0.25, 2), (0.5, 3), (0.6, 3), (1.0, 5)])
def test_the_limit_is_a_quantile_of_the_last_norms(quantile, limit):
    norms = [4, 1, 3, 5, 2]
    for earlier, window in (([90, 70], 5), ([], 8)):  # The window is full, or has room for more norms.
        options = {"factor": 1.0, "quantile": quantile, "window": window, "warmup": len(earlier + norms)}
        for norm, is_spike in ((limit, False), (limit + 0.01, True)):
            _, spikes = train([*earlier, *norms, norm], **options)
            assert spikes[-1] is is_spike


def test_a_single_microbatch_around_it_is_the_whole_batch():
    _, spikes = train([1, 1, 1, 100], ft.accumulate(1), **OPTIONS)
    assert spikes == [False, False, False, True]


@pytest.mark.parametrize("action", ["skip", "clip"])
def test_there_is_no_spike_where_most_gradients_are_zero(action):
    """Every gradient is above a limit of 0, so that nothing would be learned."""
    state, spikes = train([0, 0, 0, 0, 1, 0, 2], action=action, **OPTIONS)
    assert spikes == [False] * 7
    assert sum_of_applied_norms(state) == pytest.approx(3)


@pytest.mark.parametrize("outer", [(), (ft.donated(),)], ids=["eager", "donated"])
def test_a_run_resumes_bitwise(outer, tmp_path):
    norms = [1, 2, 1, 9, 1.5, 1, 30, 2, 1]
    whole, spikes = train(norms, *outer, **OPTIONS)
    half, first_spikes = train(norms[:5], *outer, **OPTIONS)
    ft.checkpoint.save(tmp_path / "half", half)
    loaded = ft.checkpoint.load(tmp_path / "half", like=half)
    resumed, last_spikes = train(norms[5:], *outer, state=loaded, **OPTIONS)
    assert_same_bits(resumed, whole)
    assert first_spikes + last_spikes == spikes
    assert spikes.count(True) == 2


def test_before_clip_it_has_the_whole_norm_and_after_it_the_clipped_norm():
    norms = [1, 1, 1, 100]
    base_step, clip, skip = ft.train_step(linear, ft.optim.sgd(LR)), ft.clip(1.0), ft.skip_spikes(**OPTIONS)
    _, spikes_before_clip = train_on(ft.compose(base_step, skip, clip), norms)
    assert spikes_before_clip == [False, False, False, True]
    _, spikes_after_clip = train_on(ft.compose(base_step, clip, skip), norms)
    assert spikes_after_clip == [False] * 4


@pytest.mark.parametrize(
    ("dtype", "norm_dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)], ids=["bf16", "f64"]
)
def test_norms_are_kept_in_float32_or_the_widest_dtype_of_a_parameter(dtype, norm_dtype):
    step = ft.skip_spikes(ft.train_step(linear, ft.optim.sgd(LR)))
    assert step.init({"w": torch.zeros(4, dtype=dtype)}).slots["skip_spikes"]["norms"].dtype == norm_dtype


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
def test_options_of_skip_spikes_out_of_range_are_refused(options, message):
    with pytest.raises(OptionError, match=f"skip_spikes: {message}"):
        ft.skip_spikes(**options)
