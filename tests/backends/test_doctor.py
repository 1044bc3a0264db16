"""`python -m ftrain doctor`: what it prints is what the records say, and what does not work is said and no more."""

import dataclasses
import re
import runpy
import sys

import pytest
import torch

import ftrain as ft
from ftrain.__main__ import main
from ftrain.backends import registry
from ftrain.profiling import doctor, rates


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rates, "SMALLEST_EDGE", 32)
    monkeypatch.setattr(rates, "LARGEST_EDGE", 32)
    monkeypatch.setattr(doctor, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(registry, "_records", dict(registry._records))
    monkeypatch.delenv(registry.DEFAULT_VARIABLE, raising=False)


def told(capsys, *devices):
    assert main(["doctor", *devices]) == 0
    return capsys.readouterr().out


def facts(text, device="cpu"):
    """The block of a device, by label."""
    block = text.split(f"\n\n{device}\n")[1].split("\n\n")[0]
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in block.splitlines())


def test_it_says_what_the_record_says(capsys):
    said, cpu = facts(told(capsys, "cpu")), ft.backends.get("cpu")
    assert said["device"] == cpu.describe()
    assert re.fullmatch(r"bfloat16 \((native|emulated)\), float16 \((native|emulated)\)", said["autocast"])
    assert (said["TF32"], said["float64"], said["graphs"], said["fused updates"]) == ("no", "yes", "no", "yes")
    assert (said["compiler"], said["collectives"], said["pinned memory"]) == ("inductor", "gloo", "no")
    assert re.fullmatch(r"[\d,.]+ [KMG]iB in use, [\d,.]+ [KMG]iB at the peak", said["memory"])
    assert re.fullmatch(r"float32 [\d,]+ GFLOP/s, bfloat16 [\d,]+ GFLOP/s, float16 [\d,]+ GFLOP/s", said["matmul"])
    assert re.fullmatch(r"[\d,.]+ GB/s", said["copy"])
    assert list(said) == list(doctor._FACTS)


def test_attention_has_the_kernels_that_run(capsys):
    """The math one runs everywhere; cuDNN's only where there is one."""
    kernels = facts(told(capsys, "cpu"))["attention"]
    assert re.fullmatch(r"(\w+, )*\w+ \(in bfloat16\)", kernels)
    actual = set(kernels.split(" (")[0].split(", "))
    assert {"math", "flash"} <= actual
    assert not {"cudnn", "error"} & actual


def test_every_platform_has_a_line_and_versions_come_first(capsys):
    lines = told(capsys).splitlines()
    assert lines[0].startswith("ftrain ")
    assert f"torch {torch.__version__}" in lines[1]
    starts = [line.split()[0] for line in lines[3:] if line][: len(ft.backends.names())]
    assert starts == ft.backends.names()
    assert next(line for line in lines if line.endswith("<- default")).split()[0] == ft.backends.default().name
    assert "npu    Huawei Ascend: torch_npu is not installed" in lines
    assert "hpu    Intel Gaudi: habana_frameworks.torch is not installed" in lines
    assert any(re.fullmatch("mps    (Apple GPU: none on this machine|Apple .* GPU.*)", line) for line in lines)


def test_a_package_that_is_installed_is_not_imported_for_the_table(capsys, tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "npu    Huawei Ascend: torch_npu is installed; python -m ftrain doctor npu" in told(capsys)
    assert "torch_npu" not in sys.modules
    assert main(["doctor", "npu"]) == 1
    assert "does not load (SystemError: imported)" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "said"), [("banana", "registered are cpu"), ("npu", "needs torch_npu, which is")])
def test_a_device_that_is_not_here(device, said, capsys):
    assert main(["doctor", device]) == 1
    out = capsys.readouterr().out
    assert said in out
    assert "\n\ncpu" not in out


def test_what_fails_is_said_and_the_rest_goes_on(capsys):
    def broken():
        raise RuntimeError("the driver says no\nand more")

    ft.backends.register(dataclasses.replace(ft.backends.get("cpu"), memory=broken, synchronize=broken))
    said = facts(told(capsys, "cpu"))
    assert said["memory"] == said["copy"] == said["matmul"] == "fails: RuntimeError: the driver says no"
    assert said["compiler"] == "inductor"


def test_the_choice_of_the_environment_is_shown(capsys, monkeypatch):
    monkeypatch.setenv(registry.DEFAULT_VARIABLE, "cpu")
    assert "\nFTRAIN_BACKEND=cpu\n" in told(capsys)
    monkeypatch.setenv(registry.DEFAULT_VARIABLE, "npu")
    assert main(["doctor"]) == 1
    assert "FTRAIN_BACKEND=npu: backends.get: 'npu'" in capsys.readouterr().out


def test_a_rate_counts_what_is_done(monkeypatch):
    """A matmul of two 32 x 32 matrices is 65,536 operations, and a copy reads and writes."""
    cpu = ft.backends.get("cpu")
    monkeypatch.setattr(rates, "fastest", lambda work, device: work() is None or 1e-6)
    assert doctor._matmul(cpu, torch.float32) == "66 GFLOP/s"
    assert doctor._copies(cpu) == "8.2 GB/s"


def test_it_runs_as_a_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ftrain", "doctor", "cpu"])
    monkeypatch.delitem(sys.modules, "ftrain.__main__")
    with pytest.raises(SystemExit) as left:
        runpy.run_module("ftrain", run_name="__main__")
    assert left.value.code == 0
    assert "collectives    gloo" in capsys.readouterr().out


def test_a_torch_without_torch_distributed_has_no_collectives(capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_FACTS", {"collectives": doctor._FACTS["collectives"]})
    assert facts(told(capsys, "cpu")) == {"collectives": "none: torch was built without torch.distributed"}
