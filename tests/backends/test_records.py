"""Records that name a vendor's package, and records that are not complete."""

import dataclasses
import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

import ftrain as ft
from ftrain.backends import mlu, registry
from ftrain.errors import DeviceError, OptionError
from tests.backends import standins

ROOT = Path(__file__).parents[2]


# Packages of vendors


@pytest.mark.parametrize(("name", "package"), standins.PACKAGES.items())
def test_a_package_that_is_not_installed_says_how_to_get_it(name, package):
    with pytest.raises(DeviceError, match=rf"'{name}' \(.+\) needs {package}, which is not installed; install it: .+"):
        ft.backends.get(name)
    with pytest.raises(DeviceError, match="which is not installed"):
        ft.train_step(lambda p, b: p["w"].sum(), ft.optim.sgd(0.1)).init({"w": torch.ones(1)}, device=f"{name}:1")


@pytest.mark.parametrize(
    ("content", "error"),
    [("import libascend_hal_missing", "No module named 'libascend_hal_missing'"), ("1 / 0", "ZeroDivisionError")],
)
def test_the_error_of_a_package_that_does_not_load_is_shown(content, error, tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(DeviceError, match=rf"needs torch_npu, which does not load \(.*{error}"):
        ft.backends.get("npu")


def test_the_device_of_an_imported_package_is_the_default(monkeypatch):
    monkeypatch.delenv(registry.DEFAULT_VARIABLE, raising=False)
    before = ft.backends.default().name
    module = standins.install("mlu", monkeypatch)
    if before == "cpu":
        assert ft.backends.default() is mlu.BACKEND
    module.is_present = False
    assert ft.backends.default().name == before


def test_the_name_cuda_is_of_amd_or_of_nvidia_depending_on_the_build_of_torch():
    rocm, cuda = (importlib.import_module(f"ftrain.backends.{name}").BACKEND for name in ("rocm", "cuda"))
    assert rocm.name == cuda.name == "cuda"
    assert ft.backends.of("cuda") is (rocm if torch.version.hip else cuda)
    assert (rocm.platform, cuda.platform) == ("AMD GPU", "NVIDIA GPU")


# Records that are not complete


def test_a_record_without_its_device_or_a_package_that_adds_it():
    record = dataclasses.replace(ft.backends.get("cpu"), name="npux")
    with pytest.raises(OptionError, match=r"no device type 'npux'.*or name it in the record as its `package`"):
        ft.backends.register(record)


def test_a_record_of_a_device_that_a_package_adds(monkeypatch):
    monkeypatch.setattr(registry, "_records", dict(registry._records))
    record = dataclasses.replace(ft.backends.get("cpu"), name="npux", package="torch_npux", platform="Nobody")
    ft.backends.register(record)
    with pytest.raises(DeviceError, match=r"'npux' \(Nobody\) needs torch_npux, which is not installed$"):
        ft.backends.get("npux")
    monkeypatch.setitem(sys.modules, "torch_npux", types.ModuleType("torch_npux"))
    assert ft.backends.get("npux") is record
