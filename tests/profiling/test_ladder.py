"""The ladder: its rows, its stacks, and rows for techniques that fail."""

import dataclasses
import json

import pytest
import torch

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, ConsumedError, DataError, FtrainError, OptionError, StructureError, TraceError
from ftrain.profiling.comparison import Original
from ftrain.profiling.hints import Remedy
from ftrain.profiling.ladder import TECHNIQUES, Case, run
from ftrain.profiling.ladder.record import ALONE, FASTER, SMALLER, Ladder, Row
from ftrain.profiling.timing import Interval
from tests.laws.registry import EVERY
from tests.profiling.problem import assert_unchanged, batch, make, scripted, squares, with_cache

NAMES = ["accumulate(2)", "remat()", 'with_amp("tf32")', 'adamw(state_dtype="bf16")']
PLAIN = [each.name for each in TECHNIQUES if each.name != "compiled()"]


@pytest.fixture
def timed(monkeypatch):
    """Return a `ft.ladder` with given times, without hints, and with predicted memory unless `measured`."""

    def ladder(step, inputs, times=None, *, measured=False, **options):
        monkeypatch.setattr(run, "race", scripted(times or {}))
        monkeypatch.setattr(run, "anatomy_for", lambda name, *rest: with_cache(ft.anatomy)(*rest, measure=False))
        if not measured:
            monkeypatch.setattr(Original, "measured_peak", lambda self, variant, batch, at_rest: None)
        monkeypatch.setattr(run, "run_rules", lambda facts: [])
        options = {"rounds": 3, **options}
        return ft.ladder(step, options.pop("state", None) or step.init(), inputs, **options)

    return ladder


def row_names(ladder, group):
    return [row.name for row in ladder.rows if row.group == group]


def test_every_technique_is_a_row_and_the_inputs_do_not_change():
    step, inputs = make(width=64), batch(256, width=64)
    state = step.init()
    before = tree.clone((state, inputs))
    ladder = ft.ladder(step, state, inputs, techniques=PLAIN, rounds=1, stacked=False)
    assert_unchanged(state, inputs, before)
    assert row_names(ladder, ALONE) == ["as given", *PLAIN]
    ran = {row.name for row in ladder.rows if row.seconds}
    # A CPU is the host itself, and has no TF32 and no cache.
    assert set(PLAIN) - ran == {
        'with_amp("tf32")',
        'offload("activations")',
        'offload("opt_state")',
        "empty_cache(every=1)",
    }
    assert "has no TF32" in ladder['with_amp("tf32")'].note
    base = ladder["as given"]
    assert base.speed.median == 1
    for name in ran:
        row = ladder[name]
        assert row.seconds.low <= row.seconds.median <= row.seconds.high
        assert abs(row.measured / row.predicted - 1) < 0.2, row
    assert (ladder["batch x2"].examples, ladder["batch /2"].examples) == (512, 128)
    assert ladder["batch x2"].peak > base.peak > ladder["batch /2"].peak
    for name in ("accumulate(2)", "remat()", "adafactor"):
        assert ladder[name].peak < base.peak
    assert base.bytes_per_parameter == pytest.approx(16, rel=0.01)
    for name, expected in {'adamw(state_dtype="bf16")': 12, "adamw_8bit": 10.1, "adafactor": 8.2}.items():
        assert ladder[name].bytes_per_parameter == pytest.approx(expected, rel=0.02)


NOT_TRIED = {
    ft.matmul_precision: 'its fastest is with_amp("tf32")',
    ft.clip: "changes what is learned",
    ft.sam: "changes what is learned, and takes two gradients",
    ft.skip_spikes: "changes what is learned",
    ft.skip_nonfinite: "changes what is learned",
    ft.ema: "adds weights to evaluate with",
    ft.swa: "adds weights to evaluate with",
    ft.lora: "trains other parameters",
    ft.sharded: "needs several ranks",
    ft.sync_batch_norm: "needs several ranks",
}
"""Wrappers that the ladder does not try, and why."""


def test_every_wrapper_is_a_technique_unless_there_is_a_reason(monkeypatch):
    with_cache_of_memory = dataclasses.replace(ft.backends.get("cpu"), empty_cache=lambda: None)
    monkeypatch.setitem(ft.backends.registry._records, "cpu", with_cache_of_memory)
    case, added, remedies = Case(make(), batch()), set(), []
    for technique in TECHNIQUES:
        applied = technique.apply(case)
        added |= {wrapper.name for wrapper in applied.step.wrappers}
        if technique.remedy:
            remedies.append(technique.remedy)
    assert set(NOT_TRIED) <= {entry.factory for entry in EVERY}
    expected = {entry.make().name for entry in EVERY if entry.factory not in NOT_TRIED}
    assert added == expected
    assert sorted(remedies, key=lambda remedy: remedy.value) == list(Remedy)


def test_hints_know_the_speeds_that_the_ladder_measured(timed, monkeypatch):
    calls = []
    monkeypatch.setattr(run, "facts_of", lambda *args, **measured: calls.append(measured))
    custom = ft.Technique("own", "mine", lambda case: case, remedy=Remedy.COMPILE)
    timed(
        make(),
        batch(),
        {"batch x2": 0.5, 'with_amp("bf16")': 2.0, "mine": 4.0},
        techniques=["batch x2", 'with_amp("bf16")', custom, "remat()"],
    )
    (measured,) = calls
    tried = {remedy: speed.median for remedy, speed in measured["tried"].items()}
    assert tried == {Remedy.LARGER_BATCH: 4.0, Remedy.BFLOAT16: 0.5, Remedy.COMPILE: 0.25}


def test_a_compiled_technique_is_timed_and_measured():
    step, inputs = make(), batch(4)
    ladder = ft.ladder(
        step,
        step.init(),
        inputs,
        techniques=[
            ft.Technique(
                "torch.compile", "eagerly", lambda case: Case(ft.compiled(backend="eager")(case.step), case.batch)
            )
        ],
        rounds=1,
    )
    assert ladder["eagerly"].seconds
    assert ladder["eagerly"].measured > 0


def test_speeds_compare_examples_per_second_within_each_round(timed):
    times = {"as given": [1.0, 2.0, 4.0], "batch x2": [1.0, 2.0, 2.0], "remat()": [2.0, 4.0, 8.0]}
    ladder = timed(
        make(), batch(), times, techniques=["batch x2", "remat()"], throughput={"numbers": lambda b: b["x"].numel()}
    )
    assert ladder["batch x2"].speed == (2.0, 2.0, 4.0)
    assert ladder["remat()"].speed == (0.5, 0.5, 0.5)
    assert ladder["batch x2"].rate == 128 / 2.0
    assert ladder["batch x2"].rates == {"numbers": 128 * 16 / 2.0}
    assert "numbers/s" in repr(ladder)


def test_a_throughput_that_counts_no_number_is_refused_before_anything_is_measured(timed):
    ladder = timed(
        make(), batch(), {}, techniques=[], throughput={"ones": lambda batch: (batch["x"] == batch["x"]).sum()}
    )
    assert json.loads(json.dumps(ladder.as_dict()))["rows"][0]["rates"] == {"ones": 64 * 16}
    with pytest.raises(OptionError, match=r"^ladder: throughput\['tokens'\] returned None; needs a number"):
        ft.ladder(make(), make().init(), batch(), throughput={"tokens": lambda batch: None})


def test_the_fastest_technique_of_each_method_is_stacked_if_its_interval_is_above_1(timed):
    times = {
        'with_amp("bf16")': 0.8,
        'with_amp("fp16")': 0.7,
        "batch x2": 0.5,
        "donated()": 0.9,
        # The interval of its speed contains 1.
        "adafactor": [0.5, 0.5, 1.1],
    }
    names = ["batch size", "mixed precision", "optimizer choice", "donation"]
    ladder = timed(make(), batch(), times, techniques=names)
    assert row_names(ladder, FASTER) == ['with_amp("fp16")', "+ donated()"]


def test_the_technique_of_least_memory_of_each_method_is_stacked(timed):
    names = ["batch size", "gradient accumulation", "gradient checkpointing", "optimizer choice"]
    ladder = timed(make(width=32), batch(128, width=32), techniques=names)
    assert row_names(ladder, SMALLER) == ["accumulate(2)", "+ remat()", "+ adafactor"]
    peaks = [row.peak for row in ladder.rows if row.group == SMALLER]
    assert ladder["as given"].peak > peaks[0] >= peaks[1] >= peaks[2]
    few = ["accumulate(2)", "remat()"]
    assert row_names(timed(make(), batch(), techniques=few, stacked=False), SMALLER) == []
    # A single technique is no stack.
    assert row_names(timed(make(), batch(), techniques=["remat()"]), SMALLER) == []


def test_a_technique_that_the_step_has_is_noted_and_a_similar_one_replaces_it(timed):
    step = make(ft.remat(), ft.accumulate(2), ft.with_amp("bf16"))
    names = ["accumulate(2)", "remat()", 'remat("dots")', 'with_amp("bf16")', 'with_amp("fp16")']
    ladder = timed(step, batch(), techniques=names, stacked=False)
    for name in ("remat()", 'with_amp("bf16")'):
        assert ladder[name].note == "the step has it already"
    assert ladder["accumulate(2)"].note == "accumulate(4) in place of accumulate(2)"
    assert ladder['remat("dots")'].note == "remat(dots, blocks=2) in place of remat(blocks=2)"
    assert ladder['with_amp("fp16")'].note == "with_amp(fp16) in place of with_amp(bf16)"
    assert "accumulate(2) is accumulate(4) in place of accumulate(2)" in repr(ladder)
    assert ladder["accumulate(2)"].seconds


def test_accumulation_goes_inside_clipping():
    """Outside, every microbatch would be clipped, which is another update."""
    (technique,) = (each for each in TECHNIQUES if each.name == "accumulate(2)")
    applied = technique.apply(Case(make(ft.clip(1.0)), batch()))
    assert [each.name for each in applied.step.wrappers] == ["accumulate", "clip"]
    for pieces in (1, 2):
        with pytest.raises(
            ComposeError, match=rf"clip\(norm<=1\) applies to each microbatch of accumulate\({pieces}\)"
        ):
            technique.apply(Case(make(ft.clip(1.0), ft.accumulate(pieces)), batch()))


def test_only_adam_and_adamw_are_replaced_by_other_optimizers(timed):
    ladder = timed(make(optimizer=ft.optim.sgd(0.1)), batch(), techniques=["optimizer choice"])
    assert "replaces adam or adamw; the step has sgd(" in ladder["adafactor"].note


@pytest.mark.parametrize(
    ("inputs", "note"),
    [
        ({"x": torch.zeros(3, 16), "y": torch.zeros(3, 16)}, "3 examples cannot be halved"),
        ({"x": torch.zeros(4, 16), "y": torch.zeros(1, 16)}, "do not say how many examples"),
    ],
)
def test_a_batch_that_cannot_be_halved_is_noted(timed, inputs, note):
    ladder = timed(make(), inputs, techniques=["batch /2"])
    assert note in ladder["batch /2"].note
    assert ladder["batch /2"].seconds is None


def test_lists_with_a_value_for_each_example_are_doubled_and_halved_too(timed):
    def checked(model, batch):
        assert len(batch["weights"]) == len(batch["names"]) == len(batch["x"])
        return squares(model, batch)

    inputs = {**batch(8), "weights": [1.0] * 8, "names": ("a",) * 8}
    ladder = timed(make(criterion=checked), inputs, techniques=["batch size"], measured=True)
    assert [row.measured is not None for row in ladder.rows] == [True] * 3


def broken(case):
    raise ComposeError("does not go\nat all")


def test_a_technique_that_fails_is_a_row(timed):
    def failing_loss(params, batch, *, rng, buffers):
        raise ZeroDivisionError("in the middle")

    def wrap(loss):
        return loss.__class__(failing_loss, "failing_loss", module=loss.module)

    def fail_in_the_loss(case):
        wrapper = ft.Wrapper("failing", loss=ft.OnLoss(wrap))
        return Case(wrapper(case.step), case.batch)

    custom = [ft.Technique("own", "broken", broken), ft.Technique("own", "failing", fail_in_the_loss), "remat()"]
    ladder = timed(make(), batch(), techniques=custom)
    assert ladder["broken"].note.startswith("does not go")
    assert ladder["failing"].note == "fails: ZeroDivisionError: in the middle"
    assert ladder["remat()"].seconds
    assert "does not go at all" in repr(ladder)


def test_a_model_without_repeated_blocks_has_a_ladder(timed):
    loss = ft.from_module(torch.nn.Linear(16, 16), squares)
    ladder = timed(ft.train_step(loss, ft.optim.adamw(1e-3)), batch(), techniques=["remat()", "batch x2"])
    assert "Linear has no repeated children" in ladder["remat()"].note
    assert ladder["batch x2"].seconds


def test_a_technique_that_runs_out_of_memory_is_a_row(timed):
    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything")
    ladder = timed(make(), batch(), {"remat()": oom}, techniques=["remat()", "donated()"])
    assert ladder["remat()"].note == "does not fit: out of memory"
    assert ladder["remat()"].predicted > 0
    assert ladder["donated()"].seconds


def test_a_step_that_does_not_fit_itself_has_a_ladder(timed):
    oom = torch.OutOfMemoryError("on purpose")
    names = ["accumulate(2)", "remat()"]
    ladder = timed(make(width=64), batch(256, width=64), {"as given": oom}, techniques=names)
    assert ladder["as given"].note == "does not fit: out of memory"
    assert ladder["remat()"].speed is None
    assert ladder["remat()"].seconds.median == 1
    assert row_names(ladder, SMALLER) == ["accumulate(2)", "+ remat()"]
    assert "does not fit" in repr(ladder)


def test_a_step_that_cannot_be_predicted_is_timed_and_measured(timed):
    def reading_a_value(model, batch):
        loss = squares(model, batch)
        return loss * 2 if bool(loss.detach() > 1e9) else loss

    step = make(criterion=reading_a_value)
    names = ["remat()", "donated()"]
    ladder = timed(step, batch(), techniques=names, measured=True, stacked=False)
    predictable = timed(make(), batch(), techniques=names, measured=True, stacked=False)
    for name in ("as given", "remat()", "donated()"):
        assert ladder[name].seconds
        assert (ladder[name].predicted, ladder[name].note) == (None, "")
        assert ladder[name].measured == pytest.approx(predictable[name].measured, rel=0.05)
    with pytest.raises(TraceError, match="runs the step on fake tensors"):
        ft.hints(step, step.init(), batch())


def test_an_offloaded_state_takes_no_memory_of_the_device(timed, tmp_path):
    """To files, because the host memory is the memory of the device here."""

    def offload(case):
        step = ft.compose(case.step, ft.donated(), ft.offload("opt_state", directory=tmp_path, min_bytes=1))
        return Case(step, case.batch)

    to_files = ft.Technique("offload", "files", offload)
    ladder = timed(make(width=64), batch(width=64), techniques=[to_files, "donated()"], stacked=False, measured=True)
    opt_state = make(width=64).init().opt_state
    moments = sum(leaf.nbytes for leaf in tree.leaves(opt_state) if leaf.ndim)
    for peak in ("predicted", "measured"):
        saved = getattr(ladder["donated()"], peak) - getattr(ladder["files"], peak)
        assert saved == pytest.approx(moments, rel=0.1), peak


def test_a_technique_that_is_predicted_not_to_fit_never_runs(timed, monkeypatch):
    record = ft.backends.get("cpu")
    step, inputs = make(), batch()
    limit = ft.anatomy(step, step.init(), inputs, measure=False).peak + 1
    monkeypatch.setitem(ft.backends.registry._records, "cpu", dataclasses.replace(record, free=lambda: limit))

    def times(name, racer):
        assert name != "batch x2"
        return 1.0

    ladder = timed(step, inputs, times, techniques=["batch size"])
    assert ladder["batch x2"].note.startswith("does not fit: ")
    assert ladder["batch /2"].seconds


def test_errors_of_the_step_as_given_are_raised(timed):
    with pytest.raises(ZeroDivisionError):
        timed(make(), batch(), {"as given": ZeroDivisionError()}, techniques=["remat()"])
    # Also if it fails before anything is timed.
    with pytest.raises(KeyError, match="'y'"):
        timed(make(), {"x": torch.ones(4, 16)}, techniques=["remat()"])


def test_the_ladder_times_the_data(timed):
    ladder = timed(make(), batch(), techniques=[], data=[batch()] * 3)
    assert ladder.loading.alone > 0
    assert "ms/batch; the device waits" in repr(ladder)
    with pytest.raises(DataError, match="data is list_iterator"):
        timed(make(), batch(), techniques=[], data=iter([batch()] * 3))


def test_the_table_the_numbers_and_the_picture(timed, tmp_path):
    ladder = timed(make(ft.clip(1.0)), batch(), {"remat()": 2.0}, techniques=NAMES, data=[batch()] * 2)
    text = repr(ladder)
    assert [line for line in text.splitlines() if len(line) > 100] == []
    assert (
        text.splitlines()[0]
        == f"squares(Sequential), 2,144 parameters, 64 examples; {ft.backends.get('cpu').describe()}"
    )
    for expected in ("gradient checkpointing remat()", "x0.50", "ms/step", "examples/s", "KiB", "B/par", SMALLER):
        assert expected in text
    assert "Median of 3 rounds with its full range" in text
    assert "95% confidence interval" in repr(dataclasses.replace(ladder, rounds=6))
    numbers = json.loads(json.dumps(ladder.as_dict()))
    assert [row["name"] for row in numbers["rows"]] == [row.name for row in ladder.rows]
    assert numbers["rows"][0]["seconds"] == {"low": 1.0, "median": 1.0, "high": 1.0}
    for name in ("a.png", "a.svg"):
        ladder.plot(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(OptionError, match=r"plot: path is .*a\.pdf"):
        ladder.plot(tmp_path / "a.pdf")


def test_rates_of_millions_do_not_run_into_the_column_before():
    fast = Row(ALONE, "", "as given", 256, Interval(0.14e-3, 0.14e-3, 0.14e-3), rates={"examples": 1_872_912.0})
    assert "[0.14, 0.14]   1.87M" in repr(Ladder("a step", [fast], rounds=1))


def test_a_picture_without_matplotlib(timed, monkeypatch):
    ladder = timed(make(), batch(), techniques=[])
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(FtrainError, match="plot: needs matplotlib"):
        ladder.plot()


def test_an_empty_batch_and_empty_parameters_have_a_ladder(timed):
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adamw(0.1))
    ladder = timed(step, torch.ones(0), state=step.init({"w": torch.ones(0)}), techniques=["batch size", "donated()"])
    assert "0 parameters" in repr(ladder)
    assert ladder["donated()"].seconds
    assert "0 examples cannot be halved" in ladder["batch /2"].note


def test_invalid_arguments_are_refused():
    step, inputs = make(), batch()
    state = step.init()
    with pytest.raises(ComposeError, match="ladder: the step is function; needs a Step"):
        ft.ladder(lambda state, batch: (state, {}), state, inputs)
    with pytest.raises(OptionError, match="ladder: there is no technique 'magic'; choose from batch size, batch x2"):
        ft.ladder(step, state, inputs, techniques=["magic"])
    with pytest.raises(OptionError, match=r"ladder: techniques is 'remat\(\)'; needs a list"):
        ft.ladder(step, state, inputs, techniques="remat()")
    with pytest.raises(OptionError, match=r"ladder: two techniques have the same name: remat\(\), remat\(\)"):
        ft.ladder(step, state, inputs, techniques=["remat()", ft.Technique("own", "remat()", lambda case: case)])
    with pytest.raises(OptionError, match="ladder: rounds is 0"):
        ft.ladder(step, state, inputs, rounds=0)
    with pytest.raises(StructureError):
        ft.ladder(step, make(optimizer=ft.optim.sgd(0.1)).init(), inputs)
    spent = step.init()
    ft.donated()(step)(spent, inputs)
    with pytest.raises(ConsumedError):
        ft.ladder(step, spent, inputs)
