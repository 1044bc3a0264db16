"""The ladder: its techniques, and the stacks of those that are faster or take less memory."""

import dataclasses

import pytest
import torch

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError
from ftrain.profiling.hints import Remedy
from ftrain.profiling.ladder import TECHNIQUES, Case, run
from ftrain.profiling.ladder.record import ALONE, FASTER, SMALLER
from tests.laws.registry import EVERY
from tests.profiling.problem import assert_unchanged, batch, make, squares

EAGER = [technique.name for technique in TECHNIQUES if technique.name != "compiled()"]


def row_names(ladder, group):
    return [row.name for row in ladder.rows if row.group == group]


def test_every_technique_is_a_row_and_the_inputs_do_not_change():
    step, inputs = make(width=64), batch(256, width=64)
    state = step.init()
    before = tree.clone((state, inputs))
    ladder = ft.ladder(step, state, inputs, techniques=EAGER, rounds=1, stacked=False)
    assert_unchanged(state, inputs, before)
    assert row_names(ladder, ALONE) == ["as given", *EAGER]
    ran = {row.name for row in ladder.rows if row.seconds}
    # A CPU is the host itself, and has no TF32 and no cache.
    assert set(EAGER) - ran == {
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
    case = Case(make(), batch())
    tried = {wrapper.name for technique in TECHNIQUES for wrapper in technique.apply(case).step.wrappers}
    assert tried == {entry.make().name for entry in EVERY if entry.factory not in NOT_TRIED}
    assert set(NOT_TRIED) <= {entry.factory for entry in EVERY}


def test_each_remedy_of_hints_is_one_technique():
    remedies = [technique.remedy for technique in TECHNIQUES if technique.remedy]
    assert sorted(remedies, key=lambda remedy: remedy.value) == list(Remedy)


def test_a_compiled_technique_is_timed_and_measured():
    def compile_step(case):
        return Case(ft.compiled(backend="eager")(case.step), case.batch)

    step, technique = make(), ft.Technique("torch.compile", "eagerly", compile_step)
    ladder = ft.ladder(step, step.init(), batch(4), techniques=[technique], rounds=1)
    assert ladder["eagerly"].seconds
    assert ladder["eagerly"].measured > 0


def test_the_fastest_technique_of_each_method_is_stacked_if_its_interval_is_above_1(timed_ladder):
    times = {
        'with_amp("bf16")': 0.8,
        'with_amp("fp16")': 0.7,
        "batch x2": 0.5,
        "donated()": 0.9,
        # The interval of its speed contains 1.
        "adafactor": [0.5, 0.5, 1.1],
    }
    names = ["batch size", "mixed precision", "optimizer choice", "donation"]
    ladder = timed_ladder(make(), batch(), times, techniques=names)
    assert row_names(ladder, FASTER) == ['with_amp("fp16")', "+ donated()"]


def test_the_technique_of_least_memory_of_each_method_is_stacked(timed_ladder):
    names = ["batch size", "gradient accumulation", "gradient checkpointing", "optimizer choice"]
    ladder = timed_ladder(make(width=32), batch(128, width=32), techniques=names)
    assert row_names(ladder, SMALLER) == ["accumulate(2)", "+ remat()", "+ adafactor"]
    peaks = [row.peak for row in ladder.rows if row.group == SMALLER]
    assert ladder["as given"].peak > peaks[0] >= peaks[1] >= peaks[2]


def test_a_single_technique_is_no_stack_and_stacked_false_leaves_stacks_out(timed_ladder):
    two = ["accumulate(2)", "remat()"]
    assert row_names(timed_ladder(make(), batch(), techniques=two, stacked=False), SMALLER) == []
    assert row_names(timed_ladder(make(), batch(), techniques=["remat()"]), SMALLER) == []


def test_a_technique_that_the_step_has_is_noted_and_a_similar_one_replaces_it(timed_ladder):
    step = make(ft.remat(), ft.accumulate(2), ft.with_amp("bf16"))
    names = ["accumulate(2)", "remat()", 'remat("dots")', 'with_amp("bf16")', 'with_amp("fp16")']
    ladder = timed_ladder(step, batch(), techniques=names, stacked=False)
    for name in ("remat()", 'with_amp("bf16")'):
        assert ladder[name].note == "the step has it already"
    assert ladder["accumulate(2)"].note == "accumulate(4) in place of accumulate(2)"
    assert ladder['remat("dots")'].note == "remat(dots, blocks=2) in place of remat(blocks=2)"
    assert ladder['with_amp("fp16")'].note == "with_amp(fp16) in place of with_amp(bf16)"
    assert "accumulate(2) is accumulate(4) in place of accumulate(2)" in repr(ladder)
    assert ladder["accumulate(2)"].seconds


def test_accumulation_goes_inside_clipping():
    """Outside, every microbatch would be clipped, which is another update."""
    (technique,) = (technique for technique in TECHNIQUES if technique.name == "accumulate(2)")
    applied = technique.apply(Case(make(ft.clip(1.0)), batch()))
    assert [wrapper.name for wrapper in applied.step.wrappers] == ["accumulate", "clip"]
    for pieces in (1, 2):
        with pytest.raises(
            ComposeError, match=rf"clip\(norm<=1\) applies to each microbatch of accumulate\({pieces}\)"
        ):
            technique.apply(Case(make(ft.clip(1.0), ft.accumulate(pieces)), batch()))


def test_only_adam_and_adamw_are_replaced_by_other_optimizers(timed_ladder):
    ladder = timed_ladder(make(optimizer=ft.optim.sgd(0.1)), batch(), techniques=["optimizer choice"])
    assert "replaces adam or adamw; the step has sgd(" in ladder["adafactor"].note
    averaging = make(ft.ema(ft.schedules.constant(0.9)), optimizer=ft.optim.adamw(0.1))
    ladder = timed_ladder(averaging, batch(), techniques=["optimizer choice"])
    assert "the step has adamw(constant(0.1)) and ema(constant(0.9))" in ladder["adafactor"].note


def test_lists_with_a_value_for_each_example_are_doubled_and_halved_too(timed_ladder):
    def criterion(model, batch):
        assert len(batch["weights"]) == len(batch["names"]) == len(batch["x"])
        return squares(model, batch)

    inputs = {**batch(8), "weights": [1.0] * 8, "names": ("a",) * 8}
    ladder = timed_ladder(make(criterion=criterion), inputs, techniques=["batch size"], measured=True)
    assert [row.measured is not None for row in ladder.rows] == [True] * 3


def test_an_offloaded_state_takes_no_memory_of_the_device(timed_ladder, tmp_path):
    """Offloaded to files, because on a CPU the memory of the host is that of the device."""

    def offload(case):
        step = ft.compose(case.step, ft.donated(), ft.offload("opt_state", directory=tmp_path, min_bytes=1))
        return Case(step, case.batch)

    to_files = ft.Technique("offload", "files", offload)
    step, inputs = make(width=64), batch(width=64)
    ladder = timed_ladder(step, inputs, techniques=[to_files, "donated()"], stacked=False, measured=True)
    moments = sum(leaf.nbytes for leaf in tree.leaves(step.init().opt_state) if leaf.ndim)
    in_memory, in_files = ladder["donated()"], ladder["files"]
    assert in_memory.predicted - in_files.predicted == pytest.approx(moments, rel=0.1)
    assert in_memory.measured - in_files.measured == pytest.approx(moments, rel=0.1)


def test_hints_know_the_speeds_that_the_ladder_measured(timed_ladder, monkeypatch):
    calls = []
    monkeypatch.setattr(run, "facts_of", lambda *args, **measured: calls.append(measured))
    custom = ft.Technique("own", "mine", lambda case: case, remedy=Remedy.COMPILE)
    times = {"batch x2": 0.5, 'with_amp("bf16")': 2.0, "mine": 4.0}
    timed_ladder(make(), batch(), times, techniques=["batch x2", 'with_amp("bf16")', custom, "remat()"])
    (measured,) = calls
    tried = {remedy: speed.median for remedy, speed in measured["tried"].items()}
    assert tried == {Remedy.LARGER_BATCH: 4.0, Remedy.BFLOAT16: 0.5, Remedy.COMPILE: 0.25}


def test_a_step_that_does_not_fit_itself_has_a_ladder(timed_ladder):
    oom = torch.OutOfMemoryError("on purpose")
    names = ["accumulate(2)", "remat()"]
    ladder = timed_ladder(make(width=64), batch(256, width=64), {"as given": oom}, techniques=names)
    assert ladder["as given"].note == "does not fit: out of memory"
    assert ladder["remat()"].speed is None
    assert ladder["remat()"].seconds.median == 1
    assert row_names(ladder, SMALLER) == ["accumulate(2)", "+ remat()"]
    assert "does not fit" in repr(ladder)
