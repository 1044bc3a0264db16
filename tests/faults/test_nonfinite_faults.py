"""Losses that are not finite: the step is skipped and counted; too many in a row are an error."""

import re

import pytest
import torch

import ftrain as ft
from ftrain.errors import NonFiniteError, OptionError
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, params, squares


def scaled(params, batch):
    return squares(params, batch) * batch["scale"]


def batches(*scales):
    return [{**batch(), "scale": torch.tensor(float(scale))} for scale in scales]


def guarded(limit, *wrappers):
    return make(scaled, ft.skip_nonfinite(limit), *wrappers)


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
def test_fit_stops_and_keeps_the_last_good_state(bad, donate, wrappers):
    step = guarded(3, ft.ema(0.9), *wrappers)
    data = batches(1, 1, bad, bad, bad, bad, 1)
    with failing(NonFiniteError, "skip_nonfinite", "3 steps in a row", "limit 3", "learning rate", "batch") as caught:
        ft.fit(step, step.init(params()), data, log_every=1, progress=False, donate=donate)
    state, history = caught.value.result
    good, _ = ft.fit(step, step.init(params()), data[:2], progress=False)
    for part in ("params", "opt_state", "buffers", "frozen"):
        assert_same_bits(getattr(state, part), getattr(good, part))
    assert_same_bits(state.slots["ema"], good.slots["ema"])
    assert int(state.step) == 5
    assert history["skipped"] == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert history["step"] == [1, 2, 3, 4, 5]
    assert int(state.slots["skip_nonfinite"]["skipped"]) == 3


def test_fit_raises_when_it_next_reads_metrics():
    step = guarded(2)
    data = batches(1, *["nan"] * 9)
    with failing(NonFiniteError, "skip_nonfinite", "limit 2", "3 in all") as caught:
        ft.fit(step, step.init(params()), data, log_every=4, progress=False)
    assert int(caught.value.result.state.step) == 4


def test_fit_raises_at_the_end_too():
    step = guarded(2)
    with failing(NonFiniteError, "2 steps in a row"):
        ft.fit(step, step.init(params()), batches(1, "nan", "nan"), progress=False)


def test_fewer_bad_steps_than_the_limit_are_only_counted():
    step = guarded(3)
    state, history = ft.fit(
        step, step.init(params()), batches("nan", "nan", 1, "nan", "nan"), log_every=1, progress=False
    )
    counters = {"skipped": 4, "in_a_row": 2, "steps": 5, "reached": 0}
    assert {name: int(value) for name, value in state.slots["skip_nonfinite"].items()} == counters
    assert history["skipped"] == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_step_check_raises_in_a_loop_by_hand():
    step = guarded(2)
    state = step.init(params())
    for index, inputs in enumerate(batches(1, "nan", "nan", 1)):
        if index == 3:
            with failing(NonFiniteError, "2 steps in a row", "step 2 was the first", "last good step"):
                step.check(state)
        else:
            step.check(state)
        state, _ = step(state, inputs)
    # A later check raises it too, unless `since` says that the caller has continued after it.
    with failing(NonFiniteError, "2 steps in a row", "step 2 was the first"):
        step.check(state)
    step.check(state, since=3)


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
def test_a_streak_is_counted_over_runs_and_between_readings(wrappers):
    """The streak began before this run, and has ended when the metrics are read."""
    step = guarded(3, *wrappers)
    state, _ = ft.fit(step, step.init(params()), batches(1, "nan", "nan"), progress=False)
    with failing(NonFiniteError, "3 steps in a row", "step 2 was the first", "3 in all") as caught:
        ft.fit(step, state, batches("nan", 1, "nan", 1, 1), log_every=5, progress=False)
    # A run that continues from this state does not raise again for the same streak.
    state, _ = ft.fit(step, caught.value.result.state, batches(1, "nan", "nan", 1), progress=False)
    with failing(NonFiniteError, "step 10 was the first"):
        ft.fit(step, state, batches("nan", "nan", "nan", "nan"), log_every=3, progress=False)


@pytest.mark.parametrize("at", [2, 3])
def test_a_streak_is_counted_over_a_resumed_run(at, tmp_path):
    """The streak had begun when the run was saved."""
    step, options = guarded(3), {"log_every": 6, "progress": False}

    def end(batch):
        if len(seen) == at:
            raise KeyboardInterrupt
        seen.append(batch)
        return 1

    seen, data = [], batches(1, "nan", "nan", "nan", 1, 1, 1)
    with pytest.raises(KeyboardInterrupt):
        ft.fit(
            step,
            step.init(params()),
            data,
            checkpoints=ft.Checkpoints(tmp_path, every=2),
            throughput={"n": end},
            **options,
        )
    with failing(NonFiniteError, "3 steps in a row", "step 2 was the first", "3 in all"):
        ft.fit(step, step.init(params()), data, checkpoints=ft.Checkpoints(tmp_path, every=2), **options)


def test_a_gradient_that_is_not_finite_is_skipped_although_the_loss_is_finite():
    def root(params, batch):
        return params["w"].sum().sqrt() + params["b"]

    step = make(root, ft.skip_nonfinite(1))
    state = step.init({"w": torch.zeros(3), "b": torch.zeros(())})
    new, metrics = step(state, batch())
    assert bool(metrics["skipped"])
    assert_same_bits(new.params, state.params)
    with failing(NonFiniteError, "gradient"):
        step.check(new)


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("log_every", [1, 4])
def test_fit_warns_of_the_first_loss_that_is_not_finite(bad, log_every):
    step = make(scaled)
    data = batches(1, 1, bad, 1, bad, 1)
    with pytest.warns(UserWarning, match="fit: the loss of step 3") as caught:
        _, history = ft.fit(step, step.init(params()), data, log_every=log_every, progress=False)
    (warning,) = caught
    text = rf"fit: the loss of step 3 is {bad}.*learning rate.*ft\.clip.*ft\.skip_nonfinite\(\).*on_nonfinite='raise'"
    assert re.search(text, str(warning.message))
    assert warning.filename == __file__
    assert history["step"] == [1, 2, 3, 4, 5, 6]


def test_fit_raises_at_a_loss_that_is_not_finite_and_saves_no_state_from_after_it(tmp_path):
    step, records = make(scaled), []
    options = {"on_nonfinite": "raise", "log_every": 3, "loggers": [records.append], "progress": False}
    checkpoints = ft.Checkpoints(tmp_path, every=2, keep=1)
    data = batches(1, 1, 1, 1, "nan", 1, 1, 1)
    with failing(
        NonFiniteError, "the loss of step 5 is nan", "newest checkpoint before it is that of step 4"
    ) as caught:
        ft.fit(step, step.init(params()), data, checkpoints=checkpoints, **options)
    assert caught.value.result.history["step"] == [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert int(caught.value.result.state.step) == 6
    assert checkpoints.steps() == [4]


def test_the_newest_checkpoint_before_a_nonfinite_loss_is_pinned(tmp_path):
    step = make(scaled)
    checkpoints = ft.Checkpoints(tmp_path, every=1, keep=2)
    with pytest.warns(UserWarning, match="checkpoint of step 2, the newest before it, is pinned"):
        ft.fit(step, step.init(params()), batches(1, 1, 1, "nan", 1, 1, 1), checkpoints=checkpoints, progress=False)
    assert checkpoints.steps() == [2, 6, 7]
    kept = checkpoints.latest(before=2).parts["state"].params
    assert all(bool(leaf.isfinite().all()) for leaf in kept.values())


@pytest.mark.parametrize("wrappers", [(ft.skip_nonfinite(),), (ft.with_amp("fp16"),)], ids=["skip", "fp16"])
def test_skipped_steps_are_not_warned_of(wrappers):
    step = make(scaled, *wrappers)
    _, history = ft.fit(step, step.init(params()), batches(1, "nan", 1), on_nonfinite="raise", progress=False)
    # The first scale of fp16 may overflow, too.
    assert history["skipped"][1:] == [1.0, 0.0]


def test_a_loss_that_is_not_finite_can_be_ignored():
    step = make(scaled)
    _, history = ft.fit(step, step.init(params()), batches(1, "nan"), on_nonfinite="ignore", progress=False)
    assert len(history) == 2
    with failing(OptionError, "on_nonfinite is 'stop'", "warn, raise, ignore"):
        ft.fit(step, step.init(params()), batches(1), on_nonfinite="stop", progress=False)


def test_without_the_wrapper_nothing_is_skipped():
    step = make(scaled)
    state, metrics = step(step.init(params()), batches("nan")[0])
    assert torch.isnan(metrics["loss"])
    assert torch.isnan(state.params["w"]).all()
    step.check(state)


def test_after_many_overflows_in_fp16_a_finite_step_is_right():
    """A scale of 2**16 that is halved 200 times would be 0, and gradients divided by it NaN."""
    step = make(scaled, ft.with_amp("fp16"))
    state = step.init(params())
    bad, good = batches("inf", 1)
    for _ in range(200):
        state, metrics = step(state, bad)
        assert bool(metrics["skipped"])
    assert_same_bits(state.params, params())
    assert float(state.slots["with_amp"]["scale"]) == 2.0**-24
    state, metrics = step(state, good)
    assert not bool(metrics["skipped"])
    expected, _ = make(scaled)(make(scaled).init(params()), good)
    torch.testing.assert_close(state.params, expected.params)


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_a_batch_with_a_mean_of_weight_zero_does_not_end_a_run(action):
    """Its loss is NaN, and the step changes nothing."""

    def counted(params, batch):
        errors = (batch["x"] @ params["w"] + params["b"]).square()
        return ft.Mean((errors * batch["counts"]).sum(), batch["counts"].sum())

    step = ft.train_step(counted, ft.optim.sgd(0.1))
    data = [
        {**batch, "counts": torch.full((len(batch["x"]),), float(n % 2 == 0))}
        for n, batch in enumerate(batches(1, 1, 1, 1))
    ]
    with pytest.warns(
        UserWarning, match="step 2 is nan, and the parameters after it are finite: its batch has nothing"
    ) as caught:
        state, history = ft.fit(step, step.init(params()), data, on_nonfinite=action, log_every=1, progress=False)
    assert len(caught) == 1
    assert [loss == loss for loss in history["loss"]] == [True, False, True, False]
    assert ft.tree.all_finite(state.params)
