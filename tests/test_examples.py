"""The examples run, learn what they should, print what the README says, and end at Ctrl-C without a traceback."""

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
    """Run an example as a user does, in a process of its own, and return what it printed; no warning may be printed.

    With one thread: the threads of several ranks on the same cores would wait for each other for minutes.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / name), *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "Warning" not in process.stderr
    return process.stdout


@pytest.fixture
def run_in_this_process(monkeypatch, capsys):
    """Return a function that runs an example in this process, which has loaded torch, and returns what it printed."""

    def run_example(name: str, *options: str) -> str:
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def accuracy(printed: str) -> float:
    """Return the test accuracy in percent that an example printed."""
    match = re.search(r"test accuracy (\d+\.\d+)%", printed)
    assert match, printed
    return float(match[1])


@pytest.mark.parametrize(("name", "interrupted_function"), [("plan.py", "trials"), ("ladder.py", "anatomy")])
def test_ctrl_c_ends_an_example_without_a_traceback(name, interrupted_function, monkeypatch, tmp_path):
    def press_ctrl_c(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(ft, interrupted_function, press_ctrl_c)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"ended by Ctrl-C"):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


@pytest.mark.parametrize(("name", "least"), [("digits.py", 98.5), ("pure.py", 94.0)])
def test_classifiers_reach_their_accuracy(name: str, least: float, run_in_this_process) -> None:
    assert accuracy(run_in_this_process(name)) >= least


@pytest.mark.parametrize(
    "options",
    [
        ["--layers", "2", "--accumulate", "2", "--remat", "--no-compile"],
        *exhaustive([["--layers", "1", "--accumulate", "2", "--remat"]]),
    ],
    ids=" ".join,
)
def test_train_lm_learns_and_writes_metrics_and_weights(tmp_path: Path, options: list[str]) -> None:
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


def run_as_rank(tell, rank: int, options: list[str]) -> None:
    """Run the example in a forked process, which has loaded torch and has the environment variables of torchrun."""
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = ["train_lm.py", *options]
    runpy.run_path(str(ROOT / "examples" / "train_lm.py"), run_name="__main__")


@quiet_forks
@pytest.mark.parametrize(
    ("size", "steps", "options", "launcher"),
    [
        # Forked, which saves the time to load torch; `tests/parallel/test_torchrun.py` starts ranks as a user does.
        (2, 4, "--shard 2", "forks"),
        pytest.param(2, 4, "--shard 2", "torchrun", marks=pytest.mark.exhaustive),
        pytest.param(4, 30, "--replicate 2 --shard 2", "torchrun", marks=pytest.mark.exhaustive),
        pytest.param(4, 30, "--shard 4", "torchrun", marks=pytest.mark.exhaustive),
        pytest.param(4, 30, "--replicate 4 --level 0", "torchrun", marks=pytest.mark.exhaustive),
    ],
)
def test_train_lm_prints_the_same_losses_on_ranks(
    tmp_path: Path, size: int, steps: int, options: str, launcher: str, run_in_this_process
) -> None:
    # `--amp none`: in bfloat16, which "auto" may be, several ranks round differently from one.
    common = f"{TINY} --steps {steps} --layers 2 --accumulate 2 --no-compile --amp none"
    run_in_this_process("train_lm.py", *common.split(), "--out", str(tmp_path / "alone"))
    on_ranks = [*common.split(), *options.split(), "--out", str(tmp_path / "ranks")]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        run("train_lm.py", *on_ranks, launcher=command)
    else:
        with started(size, run_as_rank, on_ranks) as ranks:
            assert [rank.wait() for rank in ranks] == [0] * size
    records_on_ranks, records_alone = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ranks", "alone")
    )
    assert len(records_alone) == steps + 1  # and one of the evaluation at the end
    for on_ranks_record, alone_record in zip(records_on_ranks, records_alone, strict=True):
        assert on_ranks_record.keys() == alone_record.keys()
        bpb = "bpb" if "bpb" in alone_record else "eval_bpb"
        assert on_ranks_record[bpb] == pytest.approx(alone_record[bpb], rel=1e-5)
    actual, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("ranks", "alone"))
    assert actual.keys() == expected.keys()
    assert all((actual[name] - expected[name]).abs().max() < 1e-3 for name in expected)


def test_train_lm_lists_its_options(run_in_this_process, capsys) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run_in_this_process("train_lm.py", "--help")
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


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *(("train_lm", option) for option in ("--batch 0", "--length 0", "--shard 0", "--eval-batches -1")),
        ("finetune_lora", "--length 0"),
        ("ladder", "--share 0"),
        ("plan", "--sequences 0"),
    ],
)
def test_numbers_that_must_be_positive(name: str, option: str, run_in_this_process, capsys) -> None:
    with pytest.raises(SystemExit):
        run_in_this_process(f"{name}.py", *option.split())
    assert "positive number" in capsys.readouterr().err


def test_ladder_prints_the_effect_of_techniques_and_draws_it(tmp_path: Path, run_in_this_process) -> None:
    tiny = "--batch 4 --length 32 --width 32 --layers 1 --rounds 1 --share 1.2 --techniques remat() --out"
    printed = run_in_this_process("ladder.py", *shlex.split(tiny), str(tmp_path))
    for text in (
        "at the peak, predicted;",
        "tokens/s",
        "as given",
        "remat()",
        "the device waits",
        "<- fastest",
    ):
        assert text in printed
    for name in ("anatomy.png", "ladder.png"):
        assert (tmp_path / name).stat().st_size > 5000


TINY_LORA = (
    "--base-steps 12 --steps 12 --batch 4 --length 32 --width 32 --layers 2 --sample 20 --rank 2 --dora --dropout 0.1"
)


def test_finetune_lora_trains_few_parameters_and_saves_them(tmp_path: Path, run_in_this_process) -> None:
    printed = run_in_this_process("finetune_lora.py", *TINY_LORA.split(), "--out", str(tmp_path))
    share = re.search(r"trained parameters.* (\d+\.\d)%", printed)
    assert share, printed
    assert float(share[1]) < 15
    before, after, merged = (float(bpb) for bpb in re.findall(r"(\d\.\d{3})(?= bits|\n)", printed)[:3])
    assert after < before
    assert merged == pytest.approx(after, abs=1e-3)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (2, 32)
    difference = re.search(r"its logits differ by (\S+) at most", printed)
    if importlib.util.find_spec("peft") is None:
        assert "pip install peft" in printed
    else:
        assert difference, printed
        assert float(difference[1]) < 1e-4


@pytest.mark.parametrize("cell", ["| 70B | 8 |", *exhaustive(["| 7B | 8 |", "| 70B | 64 |", "| 8x22B | 1,024 |"])])
def test_plans_are_those_of_the_documentation(cell: str, run_in_this_process) -> None:
    model, gpus = (part.strip().replace(",", "") for part in cell.strip("| ").split("|"))
    printed = run_in_this_process("plan.py", "--models", model, "--gpus", gpus)
    page = (ROOT / "docs" / "parallel.md").read_text()
    actual, documented = (next(line for line in text.splitlines() if line.startswith(cell)) for text in (printed, page))
    assert ("fit" in actual) == ("fit" in documented)
    actual_sizes, documented_sizes = (
        [float(size.replace(",", "")) for size in re.findall(r"([\d,.]+) GB", line)] for line in (actual, documented)
    )
    if "fit" not in actual:  # else the line says that nothing fits, and has no sizes
        assert actual_sizes == pytest.approx(documented_sizes, rel=0.1, abs=0.1)
