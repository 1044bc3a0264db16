"""Tuning: what is ruled out, what is taken of the rest, and what is said when nothing is left."""

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
from tests.profiling.problem import assert_untouched, batch, kept, make, remembered, scripted, squares

WIDTH, LENGTH = 64, 2048


def problem(*wrappers):
    return make(*wrappers, width=WIDTH, optimizer=ft.optim.sgd(0.1, momentum=0.9)), batch(LENGTH, WIDTH)


@pytest.fixture
def timed(monkeypatch):
    """Let a step be tuned in times that are told, by pieces and policy; what makes it slow is not asked."""

    def tune(step, inputs, times=None, **options):
        def by_step(name, racer):
            text = " ".join(str(racer._step).split())
            return next((took for mark, took in (times or {}).items() if mark in text), 1.0)

        monkeypatch.setattr(run, "race", scripted(by_step))
        monkeypatch.setattr(run, "measured_hints", lambda *inputs, **options: [])
        for each in (run, search):
            monkeypatch.setattr(
                each, "anatomy_for", lambda function, *rest: remembered(ft.anatomy)(*rest, measure=False)
            )
        return ft.trials(step, options.pop("state", None) or step.init(), inputs, **options)

    return tune


def peak(step, inputs):
    return remembered(ft.anatomy)(step, step.init(), inputs, measure=False).peak


def wrappers(step):
    return [each.name for each in step.wrappers]


def verdicts(actual):
    return {(row.microbatches, row.policy): row.verdict for row in actual.rows}


def test_with_enough_memory_a_step_stays_as_it_is(timed):
    step, inputs = problem(ft.clip(1.0))
    trials = timed(step, inputs, {"accumulate": 2.0}, memory="1GB")
    assert wrappers(trials.step) == ["clip"]
    assert [(row.microbatches, row.policy) for row in trials.rows] == [(1, "none"), (2, "none")]
    assert trials.rows[0].measured < 1e9
    assert trials.rows[0].verdict.startswith("<- fastest;")
    assert trials.rows[1].verdict == "slower"


def test_the_fastest_of_those_that_fit_is_taken(timed):
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


def test_what_is_chosen_is_within_the_limit_as_predicted_and_as_measured(timed):
    step, inputs = problem()
    whole = peak(step, inputs)
    state = step.init()
    before = kept(state, inputs)
    for share in (0.9, 0.5):
        limit = int(share * whole)
        trials = timed(step, inputs, memory=limit, state=state)
        (row,) = (row for row in trials.rows if row.verdict.startswith("<-"))
        assert row.step is trials.step
        assert max(row.predicted, row.measured) <= limit
        assert all(row.predicted > limit for row in trials.rows if row.verdict == "does not fit")
    assert_untouched(state, inputs, before)


def test_the_update_is_the_same(monkeypatch):
    monkeypatch.setattr(run, "measured_hints", lambda *inputs, **options: [])
    monkeypatch.setattr(run, "MAX_TIMED", 2)
    step, inputs = make(ft.clip(0.1), width=WIDTH, optimizer=ft.optim.sgd(0.1, momentum=0.9)), batch(512, WIDTH)
    state = step.init()
    tuned = ft.tune(step, state, inputs, memory=int(0.7 * peak(step, inputs)), rounds=1)
    assert wrappers(tuned) != wrappers(step)
    expected, actual = (each(state, inputs)[0].params for each in (step, tuned))
    for a, b in zip(tree.leaves(expected), tree.leaves(actual), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_accumulation_and_rematerialisation_that_are_there_are_chosen_anew(timed):
    step, inputs = problem(ft.remat(), ft.accumulate(2), ft.clip(1.0))
    assert wrappers(timed(step, inputs, {"accumulate": 2.0}, memory="1GB").step) == ["clip"]
    # As it is given it is a candidate, whatever it computes.
    trials = timed(
        step,
        inputs,
        {"remat(blocks=2) grad value_and_grad <- accumulate(2)": 0.5},
        memory=int(1.01 * peak(step, inputs)),
    )
    assert repr(trials.step) == repr(step)


def test_pieces_that_are_clipped_stay_as_they_are(timed):
    """Others would be another update."""
    step, inputs = problem(ft.clip(1.0), ft.accumulate(4))
    trials = timed(step, inputs, memory=peak(step, inputs) - 1)
    assert wrappers(trials.step) == ["remat", "clip", "accumulate"]
    assert {each.text for each in trials.step.wrappers} >= {"accumulate(4)", "clip(norm<=1)"}


def test_only_whole_pieces(timed):
    step, _ = problem()
    assert [row.microbatches for row in timed(step, batch(6, WIDTH), memory="1GB").rows] == [1, 2]
    assert [row.microbatches for row in timed(step, batch(7, WIDTH), memory="1GB").rows] == [1, 7]
    assert [row.microbatches for row in timed(step, batch(1, WIDTH), memory="1GB").rows] == [1]


def summed(model, batch):
    return squares(model, batch) * batch["x"].numel()


def of_what_counts(model, batch):
    """A mean over the examples that count: a plain number, which does not say how many these are."""
    return ((model(batch["x"]) - batch["y"]).square().mean(1) * batch["w"]).sum() / batch["w"].sum()


def comparing(model, batch):
    actual = F.normalize(model(batch["x"]), dim=1) @ F.normalize(batch["y"], dim=1).T
    return F.cross_entropy(actual, torch.arange(len(actual)))


def weighed(model, batch):
    """The same as one that says so."""
    return ft.Mean(of_what_counts(model, batch) * batch["w"].sum(), batch["w"].sum())


PIECES = {squares: 2, weighed: 2, summed: 1, of_what_counts: 1, comparing: 1}
"""Loss -> into how many pieces its batch may be split."""


@pytest.mark.parametrize(
    ("wrappers", "criterion", "pieces"),
    [
        # Within autocast one loss of each kind.
        pytest.param(
            wrappers,
            criterion,
            pieces,
            id=f"{name}-{criterion.__name__}-{pieces}",
            marks=pytest.mark.exhaustive if wrappers and criterion not in (squares, of_what_counts) else [],
        )
        for name, wrappers in (("", ()), ("bf16", (ft.with_amp("bf16"),)))
        for criterion, pieces in PIECES.items()
    ],
)
def test_a_loss_that_pieces_would_change_stays_whole(timed, criterion, pieces, wrappers):
    step = make(*wrappers, width=WIDTH, optimizer=ft.optim.sgd(1e-3), criterion=criterion, drop=0.1)
    inputs = {**batch(64, WIDTH), "w": torch.arange(64.0)}
    trials = timed(step, inputs, memory="1GB")
    assert max(row.microbatches for row in trials.rows if row.predicted) == pieces
    refused = [row for row in trials.rows if "does not apply" in row.verdict]
    assert len(refused) == (pieces == 1)
    if refused:
        assert "the loss of the batch is" in refused[0].verdict
        assert "return a Mean(total, weight)" in repr(trials)


def test_a_loss_that_is_no_mean_stays_in_the_pieces_it_is_given_in(timed, monkeypatch):
    monkeypatch.setattr(search, "memory_report", lambda *step: [])
    step = make(ft.accumulate(4), width=WIDTH, optimizer=ft.optim.sgd(1e-3), criterion=summed)
    inputs = batch(64, WIDTH)
    trials = timed(step, inputs, memory="1GB")
    assert {row.microbatches for row in trials.rows if row.predicted} == {4}
    with pytest.raises(DeviceError, match="The number of microbatches does not change: the loss of the batch is"):
        timed(step, inputs, memory=int(1.01 * sum(leaf.nbytes for leaf in tree.leaves((step.init(), inputs)))))


def test_a_loss_that_cannot_be_evaluated_is_taken_by_its_law(timed):
    def criterion(model, batch):
        if not model.training:
            raise ValueError("for training alone")
        return squares(model, batch)

    step = make(width=WIDTH, criterion=criterion)
    assert [row.microbatches for row in timed(step, batch(6, WIDTH), memory="1GB").rows] == [1, 2]


@pytest.mark.parametrize("choice", [search.NO_REMAT, search.FULL])
def test_two_of_many_pieces_show_how_large_all_are(choice):
    step, inputs = problem(ft.clip(1.0))
    actual = search.Search(step, None, inputs, "1GB")._predict(8, choice)
    expected = ft.anatomy(actual.step, None, inputs)
    assert actual.predicted == pytest.approx(expected.peak, rel=1e-3)
    assert actual.flops == pytest.approx(sum(expected.flops.values()), rel=1e-2)


def test_a_model_without_blocks_is_cut_alone(timed):
    loss = ft.from_module(torch.nn.Linear(WIDTH, WIDTH), lambda model, b: (model(b["x"]) - b["y"]).square().mean())
    step, inputs = ft.train_step(loss, ft.optim.sgd(0.1)), batch(LENGTH, WIDTH)
    trials = timed(step, inputs, memory=int(0.9 * peak(step, inputs)))
    assert verdicts(trials)[1, "full"].startswith("does not apply: remat: Linear has no repeated children")
    # Which is said once, and not for each policy.
    assert {row.policy for row in trials.rows} == {"none", "full"}
    assert wrappers(trials.step) == ["accumulate"]


def test_a_model_that_no_machine_holds():
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


def test_what_is_measured_above_the_limit_is_not_taken(timed, monkeypatch):
    step, inputs = problem()
    measured = comparison.Original.measured_peak

    def pretending(original, candidate, *more):
        return 10**9 if not candidate.wrappers else measured(original, candidate, *more)

    monkeypatch.setattr(comparison.Original, "measured_peak", pretending)
    trials = timed(step, inputs, {"accumulate": 2.0}, memory="100MB")
    assert wrappers(trials.step) == ["accumulate"]
    assert verdicts(trials)[1, "none"] == "too large: 953.7 MiB measured"


def test_what_runs_alone_and_not_beside_another_state_is_taken_as_it_was_predicted(timed, monkeypatch):
    step, inputs = problem()

    def short(*inputs, **options):
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(comparison, "measure", short)
    trials = timed(step, inputs, memory="1GB")
    assert trials.rows[0].verdict == "<- fastest; not measured"
    assert trials.rows[0].measured is None


def test_no_example_and_no_parameter_is_no_fault(timed):
    step, _ = problem()
    trials = timed(step, batch(0, WIDTH), memory="1GB")
    assert [(row.microbatches, row.policy) for row in trials.rows] == [(1, "none")]
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adamw(0.1))
    trials = timed(step, torch.ones(0), memory="1GB", state=step.init({"w": torch.ones(0)}))
    assert repr(trials.step) == repr(step)


def test_what_runs_out_of_memory_is_not_taken(timed):
    step, inputs = problem()
    oom = torch.OutOfMemoryError("on purpose")
    trials = timed(step, inputs, {"value_and_grad update": oom}, memory="100MB")
    assert verdicts(trials)[1, "none"] == "ran out of memory"
    assert wrappers(trials.step) == ["accumulate"]
    with pytest.raises(ZeroDivisionError):
        timed(step, inputs, {"value_and_grad update": ZeroDivisionError()}, memory="100MB")
    with pytest.raises(DeviceError, match="tune: nothing fits into"):
        timed(step, inputs, {"loss": oom}, memory="100MB")


def test_the_memory_of_the_device_is_the_limit_unless_told(timed, monkeypatch):
    step, inputs = problem()
    record, state = ft.backends.get("cpu"), step.init()
    at_rest = sum(leaf.nbytes for leaf in tree.leaves((state.params, state.opt_state, inputs)))

    def having(free):
        changed = dataclasses.replace(record, free=lambda: free)
        monkeypatch.setitem(ft.backends.registry._records, "cpu", changed)

    having(10**9)
    assert timed(step, inputs).memory == 10**9 + at_rest
    having(peak(step, inputs) - at_rest - 1)
    assert wrappers(timed(step, inputs).step) != []
    having(None)
    with pytest.raises(DeviceError, match=r"tune: .* does not report its free memory; pass memory=, such as '8GB'"):
        timed(step, inputs)


class Remembering(nn.Module):
    """A state of the size of the batch, which cannot be cut."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("held", torch.zeros(8, 4))

    def forward(self, x):
        return torch.tanh(self.inner(x) + self.held).square().mean()


def test_a_batch_that_cannot_be_cut_stays_whole():
    step = ft.train_step(ft.from_module(Remembering(), lambda model, batch: model(batch["x"])), ft.optim.adamw(1e-3))
    trials = ft.trials(step, step.init(), {"x": torch.randn(8, 4)}, memory="1MB", rounds=1)
    assert trials.step is not None
    assert [row.microbatches for row in trials.rows if row.seconds] == [1]
    assert "the loss fails for half of the batch: The size of tensor" in str(trials)
    unseen = ft.trials(step, None, {"x": torch.randn(8, 4)}, memory="1MB")
    assert {row.microbatches for row in unseen.rows if row.predicted} == {1, 8}  # Of one example, torch makes eight.


def test_it_says_what_costs_the_chosen_step_its_speed(caplog, monkeypatch):
    monkeypatch.setattr(rates, "launch_seconds", lambda device: 1.0)  # However long it takes on this machine.
    step, inputs = make(width=4), batch(8, 4)
    with caplog.at_level(logging.INFO, "ftrain"):
        ft.tune(step, step.init(), inputs, memory="1GB", rounds=1)
    assert "launches: " in caplog.text
    assert "Use ft.compiled()" in caplog.text
    assert not ft.trials(step, None, inputs, memory="1GB").hints


def test_nothing_fits():
    """The state alone takes more."""
    step, inputs = make(width=WIDTH), batch(4, WIDTH)
    with pytest.raises(DeviceError) as caught:
        ft.tune(step, step.init(), inputs, memory="300 KiB")
    text = str(caught.value)
    assert text.startswith("tune: nothing fits into 300.0 KiB; with ")
    for line in (
        "remat=",
        "at the peak, predicted",
        "parameters",
        "optimizer state",
        "What would need less",
        "ft.optim.adamw_8bit",
        "ft.optim.adafactor",
        "trainable=",
    ):
        assert line in text


def test_nothing_fits_in_the_microbatches_that_must_not_change(monkeypatch):
    explained = []
    monkeypatch.setattr(search, "memory_report", lambda step, state, batch: explained.append(step) or ["a report"])
    step, inputs = make(ft.clip(1.0), ft.accumulate(4)), batch(8)
    with pytest.raises(DeviceError, match=r"tune: nothing fits into[\s\S]*a report"):
        ft.tune(step, step.init(), inputs, memory="10KiB")
    assert [{"clip", "accumulate"} <= {*wrappers(each)} for each in explained] == [True]


@pytest.mark.parametrize("memory", ["8", "8 apples", "GB", "-1GB", 0, -5, 1.5, True, ["1GB"]])
def test_no_amount_of_memory(memory):
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
    assert {each: parse_bytes("tune", each) for each in amounts} == amounts


def test_what_tune_refuses():
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


def test_what_was_tried_is_shown_and_logged(timed, caplog):
    step, inputs = problem()
    trials = timed(step, inputs, memory=peak(step, inputs) - 1)
    text = repr(trials)
    assert text.startswith("2,048 examples within ")
    for part in ("microbatches  remat", "does not fit", "<- fastest; ", "x1.00", "1,000.0", "2,048.0"):
        assert part in text
    with caplog.at_level(logging.INFO, "ftrain"):
        ft.tune(step, step.init(), inputs, memory="1GB", rounds=1)
    assert "<- fastest" in caplog.text
