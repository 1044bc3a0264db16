"""Tuning: which steps are tried and timed, and which one is chosen."""

import dataclasses
import logging

import pytest
import torch

import ftrain as ft
from ftrain import tree
from ftrain.errors import DeviceError
from ftrain.profiling import comparison, rates
from ftrain.profiling.tuning import run
from tests.profiling.problem import assert_unchanged, batch, make, squares
from tests.profiling.tuning import LENGTH, WIDTH, predicted_peak, step_and_batch, verdicts, wrapper_names


def test_with_enough_memory_a_step_stays_as_it_is(timed_trials):
    step, inputs = step_and_batch(ft.clip(1.0))
    trials = timed_trials(step, inputs, {"accumulate": 2.0}, memory="1GB")
    assert wrapper_names(trials.step) == ["clip"]
    assert [(row.microbatches, row.policy) for row in trials.rows] == [(1, "none"), (2, "none")]
    assert trials.rows[0].measured < 1e9
    assert trials.rows[0].verdict.startswith("<- fastest;")
    assert trials.rows[1].verdict == "slower"


def test_the_fastest_step_that_fits_is_chosen(timed_trials):
    step, inputs = step_and_batch()
    limit = predicted_peak(step, inputs) - 1
    for times, chosen in (
        ({"remat(budget=0.5": 0.5}, ["remat"]),
        ({"accumulate(2)": 0.5}, ["accumulate"]),
        ({"accumulate(4)": 0.5}, ["accumulate"]),
    ):
        trials = timed_trials(step, inputs, times, memory=limit)
        assert wrapper_names(trials.step) == chosen
        assert verdicts(trials)[1, "none"] == "does not fit"
        (text,) = times
        assert text in " ".join(str(trials.step).split())


def test_the_chosen_step_is_within_the_limit_as_predicted_and_as_measured(timed_trials):
    step, inputs = step_and_batch()
    whole = predicted_peak(step, inputs)
    state = step.init()
    before = tree.clone((state, inputs))
    for share in (0.9, 0.5):
        limit = int(share * whole)
        trials = timed_trials(step, inputs, memory=limit, state=state)
        (row,) = (row for row in trials.rows if row.verdict.startswith("<-"))
        assert row.step is trials.step
        assert max(row.predicted, row.measured) <= limit
        assert all(row.predicted > limit for row in trials.rows if row.verdict == "does not fit")
    assert_unchanged(state, inputs, before)


def test_the_tuned_step_computes_the_same_update(monkeypatch):
    monkeypatch.setattr(run, "measured_hints", lambda *inputs, **options: [])
    monkeypatch.setattr(run, "MAX_TIMED", 2)
    step, inputs = make(ft.clip(0.1), width=WIDTH, optimizer=ft.optim.sgd(0.1, momentum=0.9)), batch(512, WIDTH)
    state = step.init()
    tuned = ft.tune(step, state, inputs, memory=int(0.7 * predicted_peak(step, inputs)), rounds=1)
    assert wrapper_names(tuned) != wrapper_names(step)
    expected, _ = step(state, inputs)
    actual, _ = tuned(state, inputs)
    torch.testing.assert_close(actual.params, expected.params, rtol=1e-5, atol=1e-7)


def test_the_accumulation_and_rematerialisation_of_the_step_may_change(timed_trials):
    step, inputs = step_and_batch(ft.remat(), ft.accumulate(2), ft.clip(1.0))
    assert wrapper_names(timed_trials(step, inputs, {"accumulate": 2.0}, memory="1GB").step) == ["clip"]
    # The step as given is a candidate too.
    times = {"remat(blocks=2) grad value_and_grad <- accumulate(2)": 0.5}
    trials = timed_trials(step, inputs, times, memory=int(1.01 * predicted_peak(step, inputs)))
    assert repr(trials.step) == repr(step)


def test_a_model_without_blocks_is_only_split_into_microbatches(timed_trials):
    loss = ft.from_module(torch.nn.Linear(WIDTH, WIDTH), squares)
    step, inputs = ft.train_step(loss, ft.optim.sgd(0.1)), batch(LENGTH, WIDTH)
    trials = timed_trials(step, inputs, memory=int(0.9 * predicted_peak(step, inputs)))
    assert verdicts(trials)[1, "full"].startswith("does not apply: remat: Linear has no repeated children")
    # One row says so, not a row for each policy.
    assert {row.policy for row in trials.rows} == {"none", "full"}
    assert wrapper_names(trials.step) == ["accumulate"]


def test_a_model_larger_than_the_memory_of_the_machine_is_tuned():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(30_000, 30_000)) for _ in range(4)))
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step, inputs = ft.train_step(loss, ft.optim.sgd(1e-3)), torch.empty(65_536, 30_000, device="meta")
    whole = ft.anatomy(step, None, inputs).peak
    trials = ft.trials(step, None, inputs, memory=int(0.9 * whole))
    (chosen,) = (row for row in trials.rows if row.verdict.startswith("<-"))
    assert chosen.verdict == "<- computes least"
    assert chosen.predicted < 0.9 * whole
    assert chosen.seconds is None
    assert chosen.policy == "none"
    assert chosen.microbatches == 2


def test_a_step_that_measures_above_the_limit_is_not_chosen(timed_trials, monkeypatch):
    step, inputs = step_and_batch()
    measured = comparison.Original.measured_peak

    def measured_as_large(original, candidate, *more):
        return 10**9 if not candidate.wrappers else measured(original, candidate, *more)

    monkeypatch.setattr(comparison.Original, "measured_peak", measured_as_large)
    trials = timed_trials(step, inputs, {"accumulate": 2.0}, memory="100MB")
    assert wrapper_names(trials.step) == ["accumulate"]
    assert verdicts(trials)[1, "none"] == "too large: 953.7 MiB measured"


def test_a_step_that_is_out_of_memory_only_while_measured_is_chosen_by_its_prediction(timed_trials, monkeypatch):
    step, inputs = step_and_batch()

    def out_of_memory(*inputs, **options):
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(comparison, "measure", out_of_memory)
    trials = timed_trials(step, inputs, memory="1GB")
    assert trials.rows[0].verdict == "<- fastest; not measured"
    assert trials.rows[0].measured is None


def test_a_step_that_runs_out_of_memory_is_not_chosen(timed_trials):
    step, inputs = step_and_batch()
    oom = torch.OutOfMemoryError("on purpose")
    trials = timed_trials(step, inputs, {"value_and_grad update": oom}, memory="100MB")
    assert verdicts(trials)[1, "none"] == "ran out of memory"
    assert wrapper_names(trials.step) == ["accumulate"]
    with pytest.raises(ZeroDivisionError):
        timed_trials(step, inputs, {"value_and_grad update": ZeroDivisionError()}, memory="100MB")
    with pytest.raises(DeviceError, match="tune: nothing fits into"):
        timed_trials(step, inputs, {"loss": oom}, memory="100MB")


def test_an_empty_batch_and_empty_parameters_are_tuned(timed_trials):
    step, _ = step_and_batch()
    trials = timed_trials(step, batch(0, WIDTH), memory="1GB")
    assert [(row.microbatches, row.policy) for row in trials.rows] == [(1, "none")]
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adamw(0.1))
    trials = timed_trials(step, torch.ones(0), memory="1GB", state=step.init({"w": torch.ones(0)}))
    assert repr(trials.step) == repr(step)


def test_the_memory_of_the_device_is_the_default_limit(timed_trials, monkeypatch):
    step, inputs = step_and_batch()
    record, state = ft.backends.get("cpu"), step.init()
    at_rest = sum(leaf.nbytes for leaf in tree.leaves((state.params, state.opt_state, inputs)))

    def set_free_memory(free):
        changed = dataclasses.replace(record, free=lambda: free)
        monkeypatch.setitem(ft.backends.registry._records, "cpu", changed)

    set_free_memory(10**9)
    assert timed_trials(step, inputs).memory == 10**9 + at_rest
    set_free_memory(predicted_peak(step, inputs) - at_rest - 1)
    assert wrapper_names(timed_trials(step, inputs).step) != []
    set_free_memory(None)
    with pytest.raises(DeviceError, match=r"tune: .* does not report its free memory; pass memory=, such as '8GB'"):
        timed_trials(step, inputs)


def test_tune_logs_hints_for_the_chosen_step(caplog, monkeypatch):
    # So that the hint does not depend on this machine.
    monkeypatch.setattr(rates, "launch_seconds", lambda device: 1.0)
    step, inputs = make(width=4), batch(8, 4)
    with caplog.at_level(logging.INFO, "ftrain"):
        ft.tune(step, step.init(), inputs, memory="1GB", rounds=1)
    assert "launches: " in caplog.text
    assert "Use ft.compiled()" in caplog.text
    assert not ft.trials(step, None, inputs, memory="1GB").hints


def test_the_trials_are_printed_and_logged(timed_trials, caplog):
    step, inputs = step_and_batch()
    trials = timed_trials(step, inputs, memory=predicted_peak(step, inputs) - 1)
    text = repr(trials)
    assert text.startswith("2,048 examples within ")
    for expected in ("microbatches  remat", "does not fit", "<- fastest; ", "x1.00", "1,000.0", "2,048.0"):
        assert expected in text
    with caplog.at_level(logging.INFO, "ftrain"):
        ft.tune(step, step.init(), inputs, memory="1GB", rounds=1)
    assert "<- fastest" in caplog.text
