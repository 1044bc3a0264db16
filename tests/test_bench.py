"""The bench: its statistics, its comparison of losses, and that its cases run."""

import csv
import dataclasses
import doctest
import importlib
import math
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim import AdamW

from bench import loops, loss_check, registry, rows, stats, updates
from bench.__main__ import CPU, GPU, main
from bench.cases import c7, c9, c10, c11
from bench.memory import Peak
from bench.problems import PROBLEMS, flops
from bench.race import memory_rows, race
from bench.registry import HAND_EAGER, OURS_COMPILED, OURS_EAGER
from bench.settings import Settings
from bench.tasks import Entrant, MissingError, Task, is_missing
from bench.timing import interleaved
from tests.exhaustive import exhaustive

ROOT = Path(__file__).parents[1]
SETTINGS = Settings(rounds=1, seconds=0.0, tiny=True, compile_backend="eager")


def wrong(task: Task):
    """Make an entrant whose losses are 1% too large."""
    run = HAND_EAGER.load()(task)
    return lambda: run() * 1.01


def without_decay(task: Task):
    """Make torch's AdamW without weight decay."""
    racer = updates.torch_optimizer(task)
    optimizer = racer._run.__self__
    optimizer.param_groups[0]["weight_decay"] = 0.0
    return racer


def slower_to_learn(task: Task):
    """Make the loop by hand with a learning rate that is 5% too small."""
    return loops.loop(task, task.loss, make_optimizer=lambda params, **options: AdamW(params, lr=0.95 * task.rate))


def broken(task: Task):
    raise ValueError("does not run")


def without_its_library(task: Task):
    raise ModuleNotFoundError("No module named 'optional'", name="optional")


# Statistics


def test_pairwise_ratios_cancel_a_drift_of_the_machine():
    drift = [1.0, 2.0, 5.0]
    assert stats.paired_ratios([3 * d for d in drift], [2 * d for d in drift]) == pytest.approx([1.5] * 3)
    with pytest.raises(ValueError, match="zip"):
        stats.paired_ratios([1.0], [1.0, 2.0])


def test_the_bootstrap_interval_holds_the_median_and_narrows_with_more_rounds():
    normal = torch.distributions.Normal(2.0, 0.5)
    torch.manual_seed(0)
    main_entrants, many = normal.sample((10,)).tolist(), normal.sample((1000,)).tolist()
    assert stats.bootstrap(main_entrants) == stats.bootstrap(main_entrants)
    narrow, wide = stats.bootstrap(many), stats.bootstrap(main_entrants)
    assert narrow.low < stats.spread(many).median < narrow.high
    # The standard error of a median of n normal numbers is 1.2533 s / sqrt(n).
    assert narrow.high - narrow.low == pytest.approx(2 * 1.96 * 1.2533 * 0.5 / math.sqrt(1000), rel=0.2)
    assert narrow.high - narrow.low < wide.high - wide.low


def test_the_interval_covers_the_median_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(25, generator=generator).tolist() for _ in range(200)]
    covered = sum(low <= 0.0 <= high for low, high in map(stats.bootstrap, draws))
    assert 180 <= covered <= 200


def test_each_round_draws_an_order_of_turns_and_times_are_per_step():
    order = []

    class Fake:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def turn(self, steps):
            order.append(self.name)
            return self.seconds * steps

    racers = {name: Fake(name, 1e-6 * (1 + index)) for index, name in enumerate("abc")}
    times = interleaved(racers, rounds=300, seconds=0.0, steps=7)
    assert times == {name: pytest.approx([1.0 + index] * 300) for index, name in enumerate("abc")}
    rounds = ["".join(order[first : first + 3]) for first in range(0, 900, 3)]
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    # Last in one round and first in the next: one round in nine for each racer, 33 of 300.
    twice_in_a_row = Counter(first for first, second in pairwise(order) if first == second)
    assert all(20 <= twice_in_a_row[name] <= 50 for name in "abc")


def test_the_examples_of_the_statistics_hold():
    assert doctest.testmod(stats).failed == 0


# Comparison of losses


def test_losses_must_agree_within_the_tolerance_of_the_precision():
    losses = {"a": [2.0, 1.0], "b": [2.0001, 1.0]}
    assert loss_check.require_same_losses(losses, "fp32") == pytest.approx(5e-5)
    with pytest.raises(loss_check.LossMismatchError, match=r"c computes 2\.1, 1 where a computes 2, 1"):
        loss_check.require_same_losses({**losses, "c": [2.1, 1.0]}, "bf16")
    for losses_of_b in ([2.0], [2.0, math.nan]):
        with pytest.raises(loss_check.LossMismatchError):
            loss_check.require_same_losses({"a": [2.0, 1.0], "b": losses_of_b}, "fp32")
    with pytest.raises(loss_check.LossMismatchError):
        loss_check.require_same_losses({"a": [], "b": []}, "fp32")


def test_losses_that_hardly_change_must_agree_more_closely():
    losses = {"a": [11.0, 10.995, 10.99], "b": [11.0, 10.995, 10.99]}
    assert loss_check.require_same_losses(losses, "bf16") == 0.0
    with pytest.raises(loss_check.LossMismatchError, match="b computes 11, 11, 11 "):
        loss_check.require_same_losses({**losses, "b": [11.0] * 3}, "bf16")
    # An evaluation does not train: its loss changes only by rounding, which says nothing about the tolerance.
    assert loss_check.require_same_losses({"a": [11.0, 11.000001], "b": [11.0001, 11.0001]}, "fp32") < 1e-4


def race_rows(*entrants, problem="mlp"):
    """Race entrants for one step a turn, and return the rows."""
    return race("C1 test", SETTINGS.task(problem), entrants, SETTINGS, steps=1)


def test_entrants_whose_losses_differ_are_not_timed():
    result = race_rows(HAND_EAGER, OURS_EAGER, Entrant("wrong", "hand eager", f"{__name__}:wrong"))
    failed = [row for row in result if row.metric == rows.FAILED]
    assert [row.variant for row in failed] == ["all"]
    assert "wrong computes" in failed[0].note
    assert not [row for row in result if row.metric == rows.TIME]


@pytest.mark.parametrize("problem", ["null", "leaves 10"])
def test_an_entrant_with_another_rate_is_found_out_where_a_step_hardly_changes_the_loss(problem):
    result = race_rows(HAND_EAGER, Entrant("slower", "hand eager", f"{__name__}:slower_to_learn"), problem=problem)
    assert [row.variant for row in result if row.metric == rows.FAILED] == ["all"]


def test_an_entrant_that_is_missing_or_broken_is_a_row_without_a_number():
    names = ("broken", "without_its_library")
    result = race_rows(HAND_EAGER, *(Entrant(name, "trainer", f"{__name__}:{name}") for name in names))
    unmeasured = {row.variant: row for row in result if row.variant in names}
    assert {name: (row.metric, row.note) for name, row in unmeasured.items()} == {
        "broken": (rows.FAILED, "ValueError: does not run"),
        "without_its_library": (rows.MISSING, "No module named 'optional'"),
    }
    assert all(math.isnan(row.median) for row in unmeasured.values())


def test_ranks_have_no_row_of_the_gpu_memory_of_this_process():
    ready = SimpleNamespace(losses=lambda steps: [1.0] * steps, turn=lambda steps: 1e-6 * steps, close=lambda: None)
    on_gpu = dataclasses.replace(SETTINGS, device="cuda")
    result = race("G6 test", SETTINGS.task("mlp"), [HAND_EAGER], on_gpu, steps=1, make=lambda *_: ready)
    metrics = {row.metric for row in result if row.variant == HAND_EAGER.name}
    assert rows.TIME in metrics
    assert rows.MEMORY not in metrics


def test_the_losses_of_several_races_are_compared():
    known: dict[str, list[float]] = {}
    task = SETTINGS.task("null")
    alone = race("C1 test", task, [HAND_EAGER], SETTINGS, steps=1, known=known)
    assert not [row for row in alone if row.variant == "all"]  # Nothing was compared, so no difference is reported.
    other = Entrant("wrong", "hand eager", f"{__name__}:wrong")
    result = race("C1 test", task, [other], SETTINGS, steps=1, known=known)
    assert [(row.variant, row.metric) for row in result] == [("all", rows.FAILED)]


def test_a_format_that_loads_other_tensors_is_found_out(monkeypatch, tmp_path):
    torch_save = c7.FORMATS["torch.save"]
    zeros = torch_save._replace(load=lambda path, like: {name: torch.zeros_like(leaf) for name, leaf in like.items()})
    monkeypatch.setitem(c7.FORMATS, "torch.save", zeros)
    monkeypatch.chdir(tmp_path)
    result = c7.run(dataclasses.replace(SETTINGS, smoke=True))
    found = [(row.variant, row.metric) for row in result if row.question in (c7.SAVE, c7.LOAD)]
    assert found == [("torch.save", rows.FAILED)]


def test_a_loader_that_reads_a_sample_twice_is_found_out():
    batch = {"tokens": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([[2, 3], [4, 5]])}
    assert not torch.equal(c10._samples([batch]), c10._samples([batch, batch]))


def test_ratios_of_memory_are_in_the_order_of_the_entrants():
    entrants = [Entrant(name, "hand eager", "") for name in "abcdefgh"]
    result = memory_rows("C2 test", SETTINGS.task("null"), entrants, SETTINGS, lambda *_: Peak(2.0, 1.0))
    assert [row.variant for row in result if row.metric == f"{rows.MEMORY}, ratio to a"] == [*"bcdefgh"]


def test_only_optional_libraries_can_be_missing():
    assert is_missing(MissingError("no GPU"))
    assert is_missing(ModuleNotFoundError("", name="jax.numpy"))
    assert not is_missing(ModuleNotFoundError("", name="ftrain.gone"))
    assert not is_missing(ImportError("cannot import name", name="jax"))


@pytest.mark.parametrize(("name", "other"), [("adamw", registry.TORCH), ("lion", registry.OPTIMIZERS["lion_pytorch"])])
def test_a_correct_update_is_timed(name, other):
    if other.required_libraries:
        pytest.importorskip(other.required_libraries[0])
    task = SETTINGS.task("update 148").with_options(optimizer=name)
    result = race("C8 test", task, [registry.OURS_UPDATE, other], SETTINGS, steps=1)
    assert {row.variant for row in result if row.metric == rows.TIME} == {"ftrain update, eager", other.name}
    assert not [row for row in result if row.metric == rows.FAILED]


def test_an_update_without_weight_decay_is_found_out_and_not_timed():
    entrants = [registry.OURS_UPDATE, Entrant("without_decay", "torch", f"{__name__}:without_decay")]
    result = race("C8 test", SETTINGS.task("update 148"), entrants, SETTINGS, steps=1)
    assert not [row for row in result if row.metric == rows.TIME]
    assert [row.variant for row in result if row.metric == rows.FAILED] == ["all"]


def test_the_state_of_an_optimizer_has_the_size_of_its_moments():
    task = SETTINGS.task("update 148")
    count = sum(leaf.numel() for leaf in task.model().parameters())
    sizes = {name: updates.state_bytes(task.with_options(optimizer=name)) for name in ("sgd", "sgd, momentum", "adamw")}
    # AdamW has two moments of 4 bytes, and one counter of 4 bytes for all parameters.
    assert sizes == {"sgd": 0.0, "sgd, momentum": 4.0, "adamw": pytest.approx(8 + 4 / count)}


@pytest.mark.parametrize("problem", ["null", "gpt2 b1", *exhaustive(["leaves 10", "mlp", "gpt384", "bert", "llama"])])
def test_a_step_of_every_model_agrees_with_the_loop_by_hand(problem):
    result = race_rows(HAND_EAGER, OURS_EAGER, problem=problem)
    times = [row.variant for row in result if row.metric == rows.TIME]
    assert times == ["loop, eager", "ftrain, eager"]
    assert [r.metric for r in result if r.metric.startswith(rows.RATIO)] == ["ratio to loop, eager"]


def test_flops_are_six_for_each_weight_and_token_and_those_of_attention():
    problem = PROBLEMS["gpt2 b4"]
    with torch.device("meta"):
        model = problem.model(problem.full)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    weights = 12 * 12 * 768**2 + 50257 * 768
    assert flops(model, problem.full) == 4 * 1024 * (6 * weights + 6 * 12 * 768 * 1024)


# The cases

RACES = [name for name in (*CPU, *GPU) if name not in ("C7", "C10", "G0", "G6")]
"""The cases that call `race` themselves."""


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", RACES)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # Of ZeroRedundancyOptimizer.
def test_each_case_asks_its_questions_of_entrants_that_exist(name, full, monkeypatch):
    case, asked = importlib.import_module({**CPU, **GPU}[name]), []

    def record(question, task, entrants, *_, **options):
        asked.extend(entrants)
        return []

    for function in ("race", "memory_rows"):
        monkeypatch.setattr(case, function, record, raising=False)
    monkeypatch.setattr(case, "compile_rows", lambda *_: [], raising=False)
    case.run(dataclasses.replace(SETTINGS, full=full))
    assert asked
    assert all(callable(entrant.load()) for entrant in asked)


def smoke_options(folder, *cases):
    return ["--smoke", "--no-peers", "--out", str(folder), "--case", *cases]


def run_bench(folder, *cases):
    """Run the bench as a user does, in a process with one thread, and return its rows as dicts."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bench", *smoke_options(folder, *cases)]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return read(folder)


def read(folder):
    """Return the lines of all CSV files of a folder as dicts."""
    result = []
    for file in sorted(folder.glob("*.csv")):
        with file.open(encoding="utf-8") as lines:
            result += list(csv.DictReader(lines))
    return result


def test_a_smoke_run_writes_rows_and_a_report(tmp_path):
    assert main(smoke_options(tmp_path, "C1")) == 0
    result = read(tmp_path)
    timed = {row["variant"] for row in result if row["metric"] == rows.TIME}
    assert {HAND_EAGER.name, OURS_EAGER.name, OURS_COMPILED.name} <= timed
    assert not [row for row in result if row["metric"] == rows.FAILED]
    assert "## C1 MLP" in (tmp_path / "REPORT.md").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_a_smoke_run_of_ranks_races_all_that_is_installed(tmp_path):
    result = run_bench(tmp_path, "C11")
    timed = {row["variant"] for row in result if row["metric"] == rows.TIME}
    missing = {row["variant"] for row in result if row["metric"] == rows.MISSING}
    entrants = {*c11.PEERS, *map(c11.ours, (0, 1, 3)), c11.COMPILED}
    assert {entrant.name for entrant in entrants if not entrant.required_libraries} <= timed
    assert {entrant.name for entrant in entrants} <= timed | missing
    assert not [row for row in result if row["metric"] == rows.FAILED]


@pytest.mark.exhaustive
def test_a_smoke_run_of_most_cases_writes_rows_and_a_report(tmp_path):
    result = run_bench(tmp_path, "C1", "C4", "C5", "C6", "C8", "C9", "C10", "C12", "C13", "C14")
    timed = {row["variant"] for row in result if row["metric"] == rows.TIME}
    assert {HAND_EAGER.name, OURS_EAGER.name, OURS_COMPILED.name, "fit, compiled", "all, compiled()"} <= timed
    assert {hand.name for name, (_, hand, _) in c9.PAIRS.items() if name in c9.SMOKE_QUESTIONS} <= timed
    assert {c9.SAM[2].name, c9.SAM[3].name, c9.ONE_PASS.name} <= timed
    assert {registry.TORCH.name, registry.TORCH_COMPILED.name, registry.OURS_UPDATE_COMPILED.name} <= timed
    assert not [row for row in result if row["metric"] == rows.FAILED]
    assert all(row["device"].endswith("tiny") and row["torch"] and row["commit"] for row in result)
    assert {row["variant"] for row in result if row["metric"] == rows.MEMORY} >= {"remat()"} or sys.platform != "linux"
    assert "## C1 MLP" in (tmp_path / "REPORT.md").read_text(encoding="utf-8")
