"""`python -m ftrain doctor` prints what the records say; a part that fails is named, and the others are printed."""

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


def output_of(capsys, *devices):
    assert main(["doctor", *devices]) == 0
    return capsys.readouterr().out


def facts_of(text, device="cpu"):
    """Return the facts of a device as label -> text."""
    block = text.split(f"\n\n{device}\n")[1].split("\n\n")[0]
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in block.splitlines())


def test_it_prints_the_fields_of_the_record(capsys):
    facts, cpu = facts_of(output_of(capsys, "cpu")), ft.backends.get("cpu")
    assert facts["device"] == cpu.describe()
    assert re.fullmatch(r"bfloat16 \((native|emulated)\), float16 \((native|emulated)\)", facts["autocast"])
    assert (facts["TF32"], facts["float64"], facts["graphs"], facts["fused updates"]) == (
        "no",
        "yes",
        "no",
        "yes",
    )
    assert (facts["compiler"], facts["collectives"], facts["pinned memory"]) == (
        "inductor",
        "gloo",
        "no",
    )
    assert re.fullmatch(r"[\d,.]+ [KMG]iB in use, [\d,.]+ [KMG]iB at the peak", facts["memory"])
    assert re.fullmatch(r"float32 [\d,]+ GFLOP/s, bfloat16 [\d,]+ GFLOP/s, float16 [\d,]+ GFLOP/s", facts["matmul"])
    assert re.fullmatch(r"[\d,.]+ GB/s", facts["copy"])
    assert list(facts) == list(doctor._FACTS)


def test_attention_has_the_kernels_that_run(capsys):
    """The math kernel runs everywhere; cuDNN's only on a GPU with cuDNN."""
    kernels = facts_of(output_of(capsys, "cpu"))["attention"]
    assert re.fullmatch(r"(\w+, )*\w+ \(in bfloat16\)", kernels)
    actual = set(kernels.split(" (")[0].split(", "))
    assert {"math", "flash"} <= actual
    assert not {"cudnn", "error"} & actual


def test_every_platform_has_a_line_and_versions_come_first(capsys):
    lines = output_of(capsys).splitlines()
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
    assert "npu    Huawei Ascend: torch_npu is installed; python -m ftrain doctor npu" in output_of(capsys)
    assert "torch_npu" not in sys.modules
    assert main(["doctor", "npu"]) == 1
    assert "does not load (SystemError: imported)" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "text"), [("banana", "registered are cpu"), ("npu", "needs torch_npu, which is")])
def test_a_device_that_this_machine_lacks(device, text, capsys):
    assert main(["doctor", device]) == 1
    out = capsys.readouterr().out
    assert text in out
    assert "\n\ncpu" not in out


def test_a_part_that_fails_is_named_and_the_others_are_printed(capsys):
    def broken():
        raise RuntimeError("the driver says no\nand more")

    ft.backends.register(dataclasses.replace(ft.backends.get("cpu"), memory=broken, synchronize=broken))
    facts = facts_of(output_of(capsys, "cpu"))
    assert facts["memory"] == facts["copy"] == facts["matmul"] == "fails: RuntimeError: the driver says no"
    assert facts["compiler"] == "inductor"


def test_the_variable_that_names_the_default_device_is_shown(capsys, monkeypatch):
    monkeypatch.setenv(registry.DEFAULT_VARIABLE, "cpu")
    assert "\nFTRAIN_BACKEND=cpu\n" in output_of(capsys)
    monkeypatch.setenv(registry.DEFAULT_VARIABLE, "npu")
    assert main(["doctor"]) == 1
    assert "FTRAIN_BACKEND=npu: backends.get: 'npu'" in capsys.readouterr().out


def test_a_rate_counts_operations_and_bytes(monkeypatch):
    """A matmul of two 32 x 32 matrices is 65,536 operations, and a copy reads and writes."""
    cpu = ft.backends.get("cpu")
    monkeypatch.setattr(rates, "fastest", lambda work, device: work() is None or 1e-6)
    assert doctor._matmul(cpu, torch.float32) == "66 GFLOP/s"
    assert doctor._copies(cpu) == "8.2 GB/s"


def test_it_runs_as_a_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ftrain", "doctor", "cpu"])
    monkeypatch.delitem(sys.modules, "ftrain.__main__")
    with pytest.raises(SystemExit) as exited:
        runpy.run_module("ftrain", run_name="__main__")
    assert exited.value.code == 0
    assert "collectives    gloo" in capsys.readouterr().out


def test_a_torch_without_torch_distributed_has_no_collectives(capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_FACTS", {"collectives": doctor._FACTS["collectives"]})
    assert facts_of(output_of(capsys, "cpu")) == {"collectives": "none: torch was built without torch.distributed"}
