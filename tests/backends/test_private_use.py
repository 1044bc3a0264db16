"""Training on a PrivateUse1 device, which torch does not have and ftrain does not name; it is in host memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ftrain as ft
from ftrain.errors import OptionError

ROOT = Path(__file__).parents[2]
PACKAGE = (
    '"""A vendor\'s package, as far as torch can tell."""\n\nfrom tests.backends import toy\n\ntoy.register({name!r})\n'
)


def errors_on_toy(*names, path=ROOT):
    """Run the checks of `on_toy.py` in a process of their own, and return their errors by name; "" for a good one."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.backends.on_toy", *names]
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


needs_route = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no way to register a device from Python",
)


@needs_route
def test_a_registered_device_trains_as_the_cpu_does_and_offloads_to_its_host():
    """All checks in one process: to start it and to register the device takes longer than most of them."""
    errors = errors_on_toy()
    assert len(errors) == 33
    assert {name: error for name, error in errors.items() if error} == {}


@needs_route
def test_a_vendors_package_is_imported_by_name_and_trains_by_its_record(tmp_path):
    """The package is a stand-in, and the record that of the vendor."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(PACKAGE.format(name="npu"))
    errors = errors_on_toy("npu", path=tmp_path)
    assert len(errors) == 7
    assert {name: error for name, error in errors.items() if error} == {}


class Bare:
    """A module with only the functions that a step needs."""

    def is_available(self):
        return True

    def manual_seed(self, seed):
        pass

    def get_rng_state(self):
        return torch.zeros(1)

    def set_rng_state(self, state):
        pass


@pytest.fixture
def bare(monkeypatch):
    module = Bare()
    monkeypatch.setattr(torch, "get_device_module", lambda name: module)
    return module


def test_functions_that_a_module_lacks_have_conservative_defaults(bare):
    record = ft.backends.private_use("privateuseone")
    assert record.describe() == "privateuseone"
    assert record.autocast_dtypes() == ()
    assert record.memory() == ft.backends.Memory(0, 0)
    assert record.empty_cache is record.recorder is None
    assert record.caches_memory is False
    assert record.tf32() is None
    assert not record.fused_optimizers
    assert not record.pinned_memory
    assert record.synchronize is torch.accelerator.synchronize


def test_fields_that_are_passed_replace_the_defaults(bare):
    record = ft.backends.private_use("privateuseone", distributed="xyz", float64=False, describe=lambda: "Abacus 3")
    assert (record.distributed, record.float64, record.describe()) == ("xyz", False, "Abacus 3")


@pytest.mark.parametrize("function", ["is_available", "manual_seed", "get_rng_state", "set_rng_state"])
def test_a_module_without_a_function_that_a_step_needs_is_an_error(bare, function, monkeypatch):
    monkeypatch.delattr(Bare, function)
    with pytest.raises(OptionError, match=rf"private_use: torch.privateuseone lacks {function}"):
        ft.backends.private_use("privateuseone")


def test_a_device_that_has_no_module():
    with pytest.raises(OptionError, match=r"no module torch.abacus; import the package"):
        ft.backends.private_use("abacus")
    with pytest.raises(OptionError, match=r"no module torch.privateuseone.*torch._register_device_module"):
        ft.backends.private_use("privateuseone")
