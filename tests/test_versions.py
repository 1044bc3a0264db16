"""Which versions of torch are accepted, and that private names of torch are looked up at import."""

import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import inductor_prims
from torch._subclasses import fake_tensor
from torch.utils import checkpoint
from torch.utils.data import dataloader

from ftrain import _torch
from ftrain._torch import operations
from ftrain._torch.compile import inductor_random
from ftrain.errors import VersionError

ROOT = Path(_torch.__file__).parents[2]
OLDEST, NEWEST = (".".join(map(str, version)) for version in _torch.TESTED)


def import_with_torch(version, monkeypatch):
    """Run `ftrain/_torch/__init__.py` as if torch had another version."""
    monkeypatch.setattr(torch, "__version__", version)
    return runpy.run_path(_torch.__file__)


@pytest.mark.parametrize("version", ["1.13.1+cu117", "2.10.0"])
def test_an_older_torch_is_refused(version, monkeypatch):
    with pytest.raises(VersionError, match=rf"torch is {version.replace('+', '.')}; needs {OLDEST} or newer") as error:
        import_with_torch(version, monkeypatch)
    assert isinstance(error.value, ImportError)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "2.15.0a0+git1234567"])
def test_tested_versions_are_accepted_without_a_warning(version, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_with_torch(version, monkeypatch)


@pytest.mark.parametrize("version", ["2.16.0", "2.101.0.dev20300101", "3.0.0"])
def test_a_newer_torch_is_a_warning(version, monkeypatch):
    with pytest.warns(UserWarning, match=rf"torch is {version}; ftrain is tested with {OLDEST} to {NEWEST}") as caught:
        import_with_torch(version, monkeypatch)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)


def look_up_private_names():
    for file in ("__init__.py", "workers.py"):
        runpy.run_path(str(ROOT / "ftrain/_torch" / file))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (checkpoint, "_recomputation_hook"),
        (torch._C._autograd, "_top_saved_tensors_default_hooks"),
        (dataloader, "_MultiProcessingDataLoaderIter"),
        (fake_tensor, "FakeTensor"),
        (torch._C, "_current_graph_task_id"),
        (torch.autograd.graph, "_engine_run_backward"),
        (torch._C, "_SetExcludeDispatchKeyGuard"),
        (torch._C._functorch, "is_batchedtensor"),
        (torch._C, "_get_dispatch_mode"),
        (dataloader._MultiProcessingDataLoaderIter, "_shutdown_workers"),
        (dataloader._MultiProcessingDataLoaderIter, "_try_get_data"),
        (dataloader.DataLoader, "_get_iterator"),
    ],
)
def test_a_private_name_that_is_gone_is_an_error_at_import(owner, name, monkeypatch):
    monkeypatch.delattr(owner, name)
    with pytest.raises(VersionError, match=rf"changed something private.*{name}.*; use torch {OLDEST} to {NEWEST}"):
        look_up_private_names()


def test_a_private_name_of_inductor_that_is_gone_is_an_error_where_it_is_used(monkeypatch):
    monkeypatch.delattr(inductor_prims, "random")
    with pytest.raises(VersionError, match=r"changed something private.*random"):
        inductor_random([2], torch.tensor(0), "rand")


def test_run_backward_returns_or_adds_gradients():
    used, unused = torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(1, requires_grad=True)
    grads = _torch.run_backward((used**2).sum(), torch.tensor(0.5), [used, unused])
    assert grads[0].tolist() == [1.0, 2.0]
    assert grads[1] is None
    used.grad = torch.ones(2)
    assert _torch.run_backward((used**2).sum(), torch.tensor(0.5), [used], add=True) == ()
    assert used.grad.tolist() == [2.0, 3.0]


def test_views_share_their_version_and_their_storage():
    tensor, other = torch.zeros(4), torch.zeros(4)
    view = tensor[1:]
    view.add_(1)
    assert _torch.version_of(tensor) == _torch.version_of(view) == 1
    assert _torch.storage_id(tensor) == _torch.storage_id(view) != _torch.storage_id(other)


def test_fake_tensors_have_a_storage():
    with _torch.FakeTensorMode():
        tensor, other = torch.zeros(4), torch.zeros(4)
        assert _torch.is_fake(tensor)
        assert _torch.storage_id(tensor) == _torch.storage_id(tensor.view(2, 2)) != _torch.storage_id(other)
    assert not _torch.is_fake(torch.zeros(4))


def test_an_unknown_operation_of_aten_is_left_out():
    assert operations.aten_operations("mm", "no_such_operation") == {torch.ops.aten.mm.default}


def test_the_tensors_of_submodules_are_left_out():
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert not _torch.parameters_of(module)
    assert _torch.parameters_of(module[0])["weight"] is module[0].weight
    assert _torch.buffers_of(module[0])["running_mean"] is module[0].running_mean


def test_a_hook_of_another_name_is_an_error_at_import(monkeypatch):
    """ftrain recognises a recomputation by the name of its hook. If it did not, dropout would draw other masks."""

    def init(self, target_frame_ref, gid):
        def hook_of_another_name(x):
            return x

    monkeypatch.setattr(checkpoint._recomputation_hook, "__init__", init)
    with pytest.raises(VersionError, match=r"changed something private.*pack_hook"):
        runpy.run_path(_torch.__file__)


def test_the_versions_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"torch>={OLDEST}" in project["project"]["dependencies"]
    pinned = re.search(r"^torch==(\d+)\.(\d+)\.", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert _torch.TESTED[0] <= tuple(map(int, pinned.groups())) <= _torch.TESTED[1]
    assert f"torch {OLDEST} to {NEWEST}" in (ROOT / "README.md").read_text(encoding="utf-8")
    command = ["make", "--no-print-directory", "--always-make", "-n", "test-oldest"]
    commands = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"torch=={OLDEST}.0" in commands


OLD_TORCH = """
import torch
from torch.utils import _python_dispatch

torch.__version__ = "2.10.0"
# A name that most modules of ftrain need at import, and that an old torch may not have.
del _python_dispatch._disable_current_modes
import ftrain
"""


def test_the_version_is_checked_before_any_other_import():
    command = [sys.executable, "-c", OLD_TORCH]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert process.stderr.splitlines()[-1].startswith("ftrain.errors.VersionError: ftrain: torch is 2.10.0; needs")
