import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ftrain as ft
from tests.exhaustive import exhaustive
from tests.faults.forks import quiet_forks
from tests.parallel.processes import started

ROOT = Path(__file__).parents[1]
COLUMNS = {"step", "seconds", "loss", "bpb", "grad_norm", "lr"}
TINY = "--steps 30 --batch 8 --length 32 --width 32 --lr 1e-2 --ema 0.8 --eval-batches 2 --sample 20 --seed 1"


def run(name: str, *options: str, launcher: Sequence[str] = ()) -> str:
    """Run an example as its reader would, and return what it printed; nothing may warn.

    On one thread: threads of several processes that wait for each other on the same cores take minutes for seconds.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / name), *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Runs an example in this process, which need not load torch again, and returns what it printed."""

    def call(name: str, *options: str) -> str:
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def accuracy(printed: str) -> float:
    match = re.search(r"test accuracy (\d+\.\d+)%", printed)
    assert match, printed
    return float(match[1])


@pytest.mark.parametrize(("name", "first"), [("plan.py", "trials"), ("ladder.py", "anatomy")])
def test_ctrl_c_ends_an_example_without_a_traceback(name, first, monkeypatch, tmp_path):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(ft, first, interrupted)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"ended by Ctrl-C"):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


@pytest.mark.parametrize(("name", "least"), [("digits.py", 98.5), ("pure.py", 94.0)])
def test_classifiers_reach_their_accuracy(name: str, least: float, run_here) -> None:
    assert accuracy(run_here(name)) >= least


@pytest.mark.parametrize(
    "options",
    [
        ["--layers", "2", "--accumulate", "2", "--remat", "--no-compile"],
        *exhaustive([["--layers", "1", "--accumulate", "2", "--remat"]]),
    ],
    ids=" ".join,
)
def test_train_lm_learns_and_writes_plain_files(tmp_path: Path, options: list[str]) -> None:
    printed = run("train_lm.py", *TINY.split(), "--out", str(tmp_path), *options)

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps, evaluations = [r for r in records if "loss" in r], [r for r in records if "eval_bpb" in r]
    assert [r["step"] for r in steps] == list(range(1, 31))
    assert all(set(r) == COLUMNS for r in steps)
    assert len(evaluations) == 1
    assert steps[0]["bpb"] == pytest.approx(8.0, abs=0.1)
    assert sum(r["bpb"] for r in steps[-5:]) / 5 < 6.5
    assert evaluations[0]["eval_bpb"] < 7.0

    weights = load_file(tmp_path / "model.safetensors")
    assert weights["blocks.0.attention.qkv.weight"].shape == (96, 32)
    assert f"{evaluations[0]['eval_bpb']:.3f} bits per byte" in printed
    assert "value_and_grad <- accumulate(" in printed
    assert re.search(r"<- with_amp\(auto\) \[auto: (bf16|float32) on \w+\]\n", printed)


def as_a_rank(tell, rank: int, options: list[str]) -> None:
    """Run the example in a process that has torch loaded already and the variables that torchrun sets."""
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = ["train_lm.py", *options]
    runpy.run_path(str(ROOT / "examples" / "train_lm.py"), run_name="__main__")


@quiet_forks
@pytest.mark.parametrize(
    ("size", "steps", "options", "by"),
    [
        # Forked, so that torch is loaded already; `tests/parallel/test_torchrun.py` starts ranks as a user does.
        (2, 4, "--shard 2", "forks"),
        pytest.param(2, 4, "--shard 2", "torchrun", marks=pytest.mark.exhaustive),
        pytest.param(4, 30, "--replicate 2 --shard 2", "torchrun", marks=pytest.mark.exhaustive),
        pytest.param(4, 30, "--shard 4", "torchrun", marks=pytest.mark.exhaustive),
        pytest.param(4, 30, "--replicate 4 --level 0", "torchrun", marks=pytest.mark.exhaustive),
    ],
)
def test_train_lm_prints_the_same_losses_on_ranks(
    tmp_path: Path, size: int, steps: int, options: str, by: str, run_here
) -> None:
    # Where "auto" is bfloat16, ranks round otherwise than one does.
    given = f"{TINY} --steps {steps} --layers 2 --accumulate 2 --no-compile --amp none"
    run_here("train_lm.py", *given.split(), "--out", str(tmp_path / "alone"))
    on_ranks = [*given.split(), *options.split(), "--out", str(tmp_path / "ranks")]
    if by == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        run("train_lm.py", *on_ranks, launcher=launcher)
    else:
        with started(size, as_a_rank, on_ranks) as ranks:
            assert [rank.end() for rank in ranks] == [0] * size
    records = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("ranks", "alone")]
    assert len(records[0]) == len(records[1]) == steps + 1
    for ours, theirs in zip(*(map(json.loads, lines) for lines in records), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours.get("bpb", ours.get("eval_bpb")) == pytest.approx(
            theirs.get("bpb", theirs.get("eval_bpb")), rel=1e-5
        )
    actual, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "alone"))
    assert actual.keys() == expected.keys()
    assert all((actual[name] - expected[name]).abs().max() < 1e-3 for name in expected)


def test_train_lm_lists_its_options(run_here, capsys) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run_here("train_lm.py", "--help")
    printed = capsys.readouterr().out
    for option in (
        "--steps",
        "--batch",
        "--amp",
        "--accumulate",
        "--remat",
        "--no-compile",
        "--device",
        "--shard",
        "--out",
    ):
        assert option in printed


def test_ladder_prints_what_techniques_bring_and_draws_it(tmp_path: Path, run_here) -> None:
    tiny = "--batch 4 --length 32 --width 32 --layers 1 --rounds 1 --share 1.2 --techniques remat() --out"
    printed = run_here("ladder.py", *shlex.split(tiny), str(tmp_path))
    for part in (
        "at the peak, predicted;",
        "tokens/s",
        "as given",
        "remat()",
        "the device waits",
        "<- fastest",
    ):
        assert part in printed
    for name in ("anatomy.png", "ladder.png"):
        assert (tmp_path / name).stat().st_size > 5000


TINY_LORA = (
    "--base-steps 12 --steps 12 --batch 4 --length 32 --width 32 --layers 2 --sample 20 --rank 2 --dora --dropout 0.1"
)


def test_finetune_lora_trains_few_parameters_and_saves_them(tmp_path: Path, run_here) -> None:
    printed = run_here("finetune_lora.py", *TINY_LORA.split(), "--out", str(tmp_path))
    share = re.search(r"trained parameters.* (\d+\.\d)%", printed)
    assert share, printed
    assert float(share[1]) < 15
    before, after, merged = (float(actual) for actual in re.findall(r"(\d\.\d{3})(?= bits|\n)", printed)[:3])
    assert after < before
    assert merged == pytest.approx(after, abs=1e-3)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (2, 32)
    differs = re.search(r"its logits differ by (\S+) at most", printed)
    if importlib.util.find_spec("peft") is None:
        assert "pip install peft" in printed
    else:
        assert differs, printed
        assert float(differs[1]) < 1e-4


@pytest.mark.parametrize("cell", ["| 70B | 8 |", *exhaustive(["| 7B | 8 |", "| 70B | 64 |", "| 8x22B | 1,024 |"])])
def test_plans_are_those_of_the_documentation(cell: str, run_here) -> None:
    model, gpus = (part.strip().replace(",", "") for part in cell.strip("| ").split("|"))
    printed = run_here("plan.py", "--models", model, "--gpus", gpus)
    page = (ROOT / "docs" / "parallel.md").read_text()
    actual, documented = (next(line for line in text.splitlines() if line.startswith(cell)) for text in (printed, page))
    assert ("fit" in actual) == ("fit" in documented)
    for a, b in zip(
        re.findall(r"([\d,.]+) GB", actual), re.findall(r"([\d,.]+) GB", documented), strict="fit" not in actual
    ):
        assert float(a.replace(",", "")) == pytest.approx(float(b.replace(",", "")), rel=0.1, abs=0.1)
