"""Tuning: which steps are ruled out, which one is chosen of the rest, and the error when nothing fits."""

import dataclasses
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.backends.format_bytes import parse_bytes
from ftrain.errors import ComposeError, ConsumedError, DeviceError, OptionError, StructureError
from ftrain.profiling import comparison, rates
from ftrain.profiling.tuning import run, search
from tests.profiling.problem import assert_unchanged, batch, make, scripted, squares, with_cache

WIDTH, LENGTH = 64, 2048


def problem(*wrappers):
    return make(*wrappers, width=WIDTH, optimizer=ft.optim.sgd(0.1, momentum=0.9)), batch(LENGTH, WIDTH)


@pytest.fixture
def timed(monkeypatch):
    """Return a `ft.trials` with given times, by a part of the text of the step; without hints and measured memory."""

    def tune(step, inputs, times=None, **options):
        def by_step(name, racer):
            text = " ".join(str(racer._step).split())
            for part, result in (times or {}).items():
                if part in text:
                    return result
            return 1.0

        monkeypatch.setattr(run, "race", scripted(by_step))
        monkeypatch.setattr(run, "measured_hints", lambda *inputs, **options: [])
        for module in (run, search):
            monkeypatch.setattr(
                module, "anatomy_for", lambda function, *rest: with_cache(ft.anatomy)(*rest, measure=False)
            )
        return ft.trials(step, options.pop("state", None) or step.init(), inputs, **options)

    return tune


def peak(step, inputs):
    return with_cache(ft.anatomy)(step, step.init(), inputs, measure=False).peak


def wrappers(step):
    return [each.name for each in step.wrappers]


def verdicts(trials):
    return {(row.microbatches, row.policy): row.verdict for row in trials.rows}


def test_with_enough_memory_a_step_stays_as_it_is(timed):
    step, inputs = problem(ft.clip(1.0))
    trials = timed(step, inputs, {"accumulate": 2.0}, memory="1GB")
    assert wrappers(trials.step) == ["clip"]
    assert [(row.microbatches, row.policy) for row in trials.rows] == [(1, "none"), (2, "none")]
    assert trials.rows[0].measured < 1e9
    assert trials.rows[0].verdict.startswith("<- fastest;")
    assert trials.rows[1].verdict == "slower"


def test_the_fastest_step_that_fits_is_chosen(timed):
    step, inputs = problem()
    limit = peak(step, inputs) - 1
    for times, chosen in (
        ({"remat(budget=0.5": 0.5}, ["remat"]),
        ({"accumulate(2)": 0.5}, ["accumulate"]),
        ({"accumulate(4)": 0.5}, ["accumulate"]),
    ):
        trials = timed(step, inputs, times, memory=limit)
        assert wrappers(trials.step) == chosen
        assert verdicts(trials)[1, "none"] == "does not fit"
        text = " ".join(str(trials.step).split())
        assert next(iter(times)) in text


def test_the_chosen_step_is_within_the_limit_as_predicted_and_as_measured(timed):
    step, inputs = problem()
    whole = peak(step, inputs)
    state = step.init()
    before = tree.clone((state, inputs))
    for share in (0.9, 0.5):
        limit = int(share * whole)
        trials = timed(step, inputs, memory=limit, state=state)
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
    tuned = ft.tune(step, state, inputs, memory=int(0.7 * peak(step, inputs)), rounds=1)
    assert wrappers(tuned) != wrappers(step)
    expected, actual = (each(state, inputs)[0].params for each in (step, tuned))
    for a, b in zip(tree.leaves(expected), tree.leaves(actual), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_accumulation_and_rematerialisation_of_the_step_may_change(timed):
    step, inputs = problem(ft.remat(), ft.accumulate(2), ft.clip(1.0))
    assert wrappers(timed(step, inputs, {"accumulate": 2.0}, memory="1GB").step) == ["clip"]
    # The step as given is a candidate too.
    trials = timed(
        step,
        inputs,
        {"remat(blocks=2) grad value_and_grad <- accumulate(2)": 0.5},
        memory=int(1.01 * peak(step, inputs)),
    )
    assert repr(trials.step) == repr(step)


def test_clipped_microbatches_do_not_change(timed):
    """Clipping other microbatches would be another update."""
    step, inputs = problem(ft.clip(1.0), ft.accumulate(4))
    trials = timed(step, inputs, memory=peak(step, inputs) - 1)
    assert wrappers(trials.step) == ["remat", "clip", "accumulate"]
    assert {each.text for each in trials.step.wrappers} >= {"accumulate(4)", "clip(norm<=1)"}


def test_the_number_of_microbatches_divides_the_batch(timed):
    step, _ = problem()
    assert [row.microbatches for row in timed(step, batch(6, WIDTH), memory="1GB").rows] == [1, 2]
    assert [row.microbatches for row in timed(step, batch(7, WIDTH), memory="1GB").rows] == [1, 7]
    assert [row.microbatches for row in timed(step, batch(1, WIDTH), memory="1GB").rows] == [1]


def summed_squares(model, batch):
    return squares(model, batch) * batch["x"].numel()


def weighted_mean(model, batch):
    """Return a weighted mean as a plain number, which does not hold the total weight."""
    return ((model(batch["x"]) - batch["y"]).square().mean(1) * batch["w"]).sum() / batch["w"].sum()


def contrastive(model, batch):
    """Return a loss that compares each example with all others of the batch."""
    logits = F.normalize(model(batch["x"]), dim=1) @ F.normalize(batch["y"], dim=1).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def weighted_mean_with_weight(model, batch):
    """Return `weighted_mean` with the total weight, so that it can be computed in microbatches."""
    return ft.Mean(weighted_mean(model, batch) * batch["w"].sum(), batch["w"].sum())


MICROBATCHES = {squares: 2, weighted_mean_with_weight: 2, summed_squares: 1, weighted_mean: 1, contrastive: 1}
"""Loss -> the largest number of microbatches that the test expects among the trials."""


@pytest.mark.parametrize(
    ("wrappers", "criterion", "microbatches"),
    [
        # With autocast, `make test` takes one loss that may be split and one that may not.
        pytest.param(
            wrappers,
            criterion,
            microbatches,
            id=f"{name}-{criterion.__name__}-{microbatches}",
            marks=pytest.mark.exhaustive if wrappers and criterion not in (squares, weighted_mean) else [],
        )
        for name, wrappers in (("", ()), ("bf16", (ft.with_amp("bf16"),)))
        for criterion, microbatches in MICROBATCHES.items()
    ],
)
def test_a_loss_that_microbatches_would_change_is_not_split(timed, criterion, microbatches, wrappers):
    step = make(*wrappers, width=WIDTH, optimizer=ft.optim.sgd(1e-3), criterion=criterion, drop=0.1)
    inputs = {**batch(64, WIDTH), "w": torch.arange(64.0)}
    trials = timed(step, inputs, memory="1GB")
    assert max(row.microbatches for row in trials.rows if row.predicted) == microbatches
    refused = [row for row in trials.rows if "does not apply" in row.verdict]
    assert len(refused) == (microbatches == 1)
    if refused:
        assert "the loss of the batch is" in refused[0].verdict
        assert "return a Mean(total, weight)" in repr(trials)


def test_the_microbatches_of_a_loss_that_is_no_mean_do_not_change(timed, monkeypatch):
    monkeypatch.setattr(search, "memory_report", lambda *step: [])
    step = make(ft.accumulate(4), width=WIDTH, optimizer=ft.optim.sgd(1e-3), criterion=summed_squares)
    inputs = batch(64, WIDTH)
    trials = timed(step, inputs, memory="1GB")
    assert {row.microbatches for row in trials.rows if row.predicted} == {4}
    with pytest.raises(DeviceError, match="The number of microbatches does not change: the loss of the batch is"):
        timed(step, inputs, memory=int(1.01 * sum(leaf.nbytes for leaf in tree.leaves((step.init(), inputs)))))


def test_a_loss_that_cannot_be_evaluated_is_taken_to_be_a_mean(timed):
    def criterion(model, batch):
        if not model.training:
            raise ValueError("for training alone")
        return squares(model, batch)

    step = make(width=WIDTH, criterion=criterion)
    assert [row.microbatches for row in timed(step, batch(6, WIDTH), memory="1GB").rows] == [1, 2]


@pytest.mark.parametrize("choice", [search.NO_REMAT, search.FULL])
def test_the_memory_of_many_microbatches_follows_from_two(choice):
    step, inputs = problem(ft.clip(1.0))
    trial = search.Search(step, None, inputs, "1GB")._predict(8, choice)
    expected = ft.anatomy(trial.step, None, inputs)
    assert trial.predicted == pytest.approx(expected.peak, rel=1e-3)
    assert trial.flops == pytest.approx(sum(expected.flops.values()), rel=1e-2)


def test_a_model_without_blocks_is_only_split_into_microbatches(timed):
    loss = ft.from_module(torch.nn.Linear(WIDTH, WIDTH), lambda model, b: (model(b["x"]) - b["y"]).square().mean())
    step, inputs = ft.train_step(loss, ft.optim.sgd(0.1)), batch(LENGTH, WIDTH)
    trials = timed(step, inputs, memory=int(0.9 * peak(step, inputs)))
    assert verdicts(trials)[1, "full"].startswith("does not apply: remat: Linear has no repeated children")
    # One row says so, not a row for each policy.
    assert {row.policy for row in trials.rows} == {"none", "full"}
    assert wrappers(trials.step) == ["accumulate"]


def test_a_model_larger_than_the_memory_of_the_machine():
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


def test_a_step_that_measures_above_the_limit_is_not_chosen(timed, monkeypatch):
    step, inputs = problem()
    measured = comparison.Original.measured_peak

    def measured_as_large(original, candidate, *more):
        return 10**9 if not candidate.wrappers else measured(original, candidate, *more)

    monkeypatch.setattr(comparison.Original, "measured_peak", measured_as_large)
    trials = timed(step, inputs, {"accumulate": 2.0}, memory="100MB")
    assert wrappers(trials.step) == ["accumulate"]
    assert verdicts(trials)[1, "none"] == "too large: 953.7 MiB measured"


def test_a_step_that_is_out_of_memory_only_while_measured_is_chosen_by_its_prediction(timed, monkeypatch):
    step, inputs = problem()

    def out_of_memory(*inputs, **options):
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(comparison, "measure", out_of_memory)
    trials = timed(step, inputs, memory="1GB")
    assert trials.rows[0].verdict == "<- fastest; not measured"
    assert trials.rows[0].measured is None


def test_an_empty_batch_and_empty_parameters_are_tuned(timed):
    step, _ = problem()
    trials = timed(step, batch(0, WIDTH), memory="1GB")
    assert [(row.microbatches, row.policy) for row in trials.rows] == [(1, "none")]
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adamw(0.1))
    trials = timed(step, torch.ones(0), memory="1GB", state=step.init({"w": torch.ones(0)}))
    assert repr(trials.step) == repr(step)


def test_a_step_that_runs_out_of_memory_is_not_chosen(timed):
    step, inputs = problem()
    oom = torch.OutOfMemoryError("on purpose")
    trials = timed(step, inputs, {"value_and_grad update": oom}, memory="100MB")
    assert verdicts(trials)[1, "none"] == "ran out of memory"
    assert wrappers(trials.step) == ["accumulate"]
    with pytest.raises(ZeroDivisionError):
        timed(step, inputs, {"value_and_grad update": ZeroDivisionError()}, memory="100MB")
    with pytest.raises(DeviceError, match="tune: nothing fits into"):
        timed(step, inputs, {"loss": oom}, memory="100MB")


def test_the_memory_of_the_device_is_the_default_limit(timed, monkeypatch):
    step, inputs = problem()
    record, state = ft.backends.get("cpu"), step.init()
    at_rest = sum(leaf.nbytes for leaf in tree.leaves((state.params, state.opt_state, inputs)))

    def set_free_memory(free):
        changed = dataclasses.replace(record, free=lambda: free)
        monkeypatch.setitem(ft.backends.registry._records, "cpu", changed)

    set_free_memory(10**9)
    assert timed(step, inputs).memory == 10**9 + at_rest
    set_free_memory(peak(step, inputs) - at_rest - 1)
    assert wrappers(timed(step, inputs).step) != []
    set_free_memory(None)
    with pytest.raises(DeviceError, match=r"tune: .* does not report its free memory; pass memory=, such as '8GB'"):
        timed(step, inputs)


class WithBatchSizedBuffer(nn.Module):
    """A buffer has the length of the batch, so the model runs on no smaller one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("held", torch.zeros(8, 4))

    def forward(self, x):
        return torch.tanh(self.inner(x) + self.held).square().mean()


def test_a_batch_that_cannot_be_split_stays_whole():
    step = ft.train_step(
        ft.from_module(WithBatchSizedBuffer(), lambda model, batch: model(batch["x"])), ft.optim.adamw(1e-3)
    )
    trials = ft.trials(step, step.init(), {"x": torch.randn(8, 4)}, memory="1MB", rounds=1)
    assert trials.step is not None
    assert [row.microbatches for row in trials.rows if row.seconds] == [1]
    assert "the loss fails for half of the batch: The size of tensor" in str(trials)
    predicted = ft.trials(step, None, {"x": torch.randn(8, 4)}, memory="1MB")
    assert {row.microbatches for row in predicted.rows if row.predicted} == {1, 8}  # One example is broadcast to eight.


def test_tune_logs_hints_for_the_chosen_step(caplog, monkeypatch):
    monkeypatch.setattr(
        rates, "launch_seconds", lambda device: 1.0
    )  # So that the hint does not depend on this machine.
    step, inputs = make(width=4), batch(8, 4)
    with caplog.at_level(logging.INFO, "ftrain"):
        ft.tune(step, step.init(), inputs, memory="1GB", rounds=1)
    assert "launches: " in caplog.text
    assert "Use ft.compiled()" in caplog.text
    assert not ft.trials(step, None, inputs, memory="1GB").hints


def test_the_error_when_nothing_fits_explains_the_memory():
    """The state alone is larger than the limit."""
    step, inputs = make(width=WIDTH), batch(4, WIDTH)
    with pytest.raises(DeviceError) as caught:
        ft.tune(step, step.init(), inputs, memory="300 KiB")
    text = str(caught.value)
    assert text.startswith("tune: nothing fits into 300.0 KiB; with ")
    for expected in (
        "remat=",
        "at the peak, predicted",
        "parameters",
        "optimizer state",
        "What would need less",
        "ft.optim.adamw_8bit",
        "ft.optim.adafactor",
        "trainable=",
    ):
        assert expected in text


def test_the_error_when_nothing_fits_is_about_a_step_with_the_microbatches_that_must_not_change(monkeypatch):
    explained = []
    monkeypatch.setattr(search, "memory_report", lambda step, state, batch: explained.append(step) or ["a report"])
    step, inputs = make(ft.clip(1.0), ft.accumulate(4)), batch(8)
    with pytest.raises(DeviceError, match=r"tune: nothing fits into[\s\S]*a report"):
        ft.tune(step, step.init(), inputs, memory="10KiB")
    assert [{"clip", "accumulate"} <= {*wrappers(each)} for each in explained] == [True]


@pytest.mark.parametrize("memory", ["8", "8 apples", "GB", "-1GB", 0, -5, 1.5, True, ["1GB"]])
def test_an_invalid_amount_of_memory_is_refused(memory):
    step, inputs = problem()
    with pytest.raises(OptionError, match=r"tune: memory is .*; needs bytes, as a number or as in '8GB' or '512MiB'"):
        ft.tune(step, step.init(), inputs, memory=memory)


def test_amounts_of_memory():
    amounts = {
        "8GB": 8 * 10**9,
        "8GiB": 8 * 2**30,
        "1.5 mb": 1_500_000,
        "2TiB": 2**41,
        "10kB": 10_000,
        "7B": 7,
        12: 12,
    }
    assert parse_bytes("tune", 8e9) == 8 * 10**9
    assert {amount: parse_bytes("tune", amount) for amount in amounts} == amounts


def test_tune_refuses_other_steps_other_states_no_rounds_and_spent_states():
    step, inputs = problem()
    with pytest.raises(ComposeError, match="tune: the step is function; needs a Step"):
        ft.tune(lambda state, batch: (state, {}), step.init(), inputs)
    with pytest.raises(StructureError):
        ft.tune(step, make(width=WIDTH, optimizer=ft.optim.sgd(0.1)).init(), inputs)
    with pytest.raises(OptionError, match="tune: rounds is 0"):
        ft.tune(step, step.init(), inputs, memory="1GB", rounds=0)
    spent = step.init()
    ft.donated()(step)(spent, inputs)
    with pytest.raises(ConsumedError):
        ft.tune(step, spent, inputs, memory="1GB")


def test_the_trials_are_printed_and_logged(timed, caplog):
    step, inputs = problem()
    trials = timed(step, inputs, memory=peak(step, inputs) - 1)
    text = repr(trials)
    assert text.startswith("2,048 examples within ")
    for expected in ("microbatches  remat", "does not fit", "<- fastest; ", "x1.00", "1,000.0", "2,048.0"):
        assert expected in text
    with caplog.at_level(logging.INFO, "ftrain"):
        ft.tune(step, step.init(), inputs, memory="1GB", rounds=1)
    assert "<- fastest" in caplog.text
