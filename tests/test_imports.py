"""Which modules `import ftrain` imports, in a new process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ftrain as ft
from tests.backends import standins

HEAVY = {
    "asyncio",
    "matplotlib",
    "rich",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torchao",
    "transformers",
}
"""Modules whose import takes a tenth of a second to several seconds; they are imported at first use."""

USED_LATER = {
    "ftrain.losses.chunked",
    "ftrain.profiling",
    "ftrain.transforms.remat.optimization_barrier",
    "ftrain.transforms.compile.graph_fixes",
}
"""Modules of this package that are imported at first use: most programs never use them, or they register operations.

Together they take a sixth of the time of the import if they are imported with the package.
"""

REPORT = """
import json, sys, time, torch
before = {*sys.modules}
import ftrain as ft
imported = {*sys.modules} - before
start = time.process_time()
ft.backends.names()
ft.backends.default()
print(json.dumps([[*imported], [*sys.modules], time.process_time() - start]))
"""

WITHOUT_DISTRIBUTED = """
import sys

# Hides these functions once torch has imported its C++ part, before torch.distributed looks for them there.
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for function in ("_c10d_init", "_rpc_init", "_dist_autograd_init"):
                delattr(sys.modules["torch._C"], function)
        if name.startswith("torch._C._distributed"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
import torch
import ftrain as ft
from ftrain.errors import DeviceError, FtrainError

assert not torch.distributed.is_available()
step = ft.train_step(lambda params, batch: (batch @ params["w"]).square().mean(), ft.optim.adamw(0.1))
step = ft.compose(step, ft.accumulate(2), ft.clip(1.0), ft.ema(0.9))
state = lambda: step.init({"w": torch.ones(3, 2)})
run = {"checkpoints": ft.Checkpoints(sys.argv[1], every=2), "progress": False}
stopped, _ = ft.fit(step, state(), [torch.ones(4, 3)] * 4, steps=3, **run)
resumed, _ = ft.fit(step, state(), [torch.ones(4, 3)] * 4, steps=4, **run)
assert int(stopped.step) == 3 and int(resumed.step) == 4
planned = lambda: ft.anatomy(step, state(), torch.ones(4, 3), mesh=(1, 2), level=1)
for refused in (ft.parallel.mesh, lambda: ft.sharded(None), planned, lambda: ft.with_amp("fp8")(step)):
    try:
        refused()
    except FtrainError as error:
        print(type(error).__name__, error)
"""


def test_a_torch_without_torch_distributed_trains_on_one_device_and_refuses_ranks(tmp_path):
    root, arguments = Path(ft.__file__).parents[1], ["-c", WITHOUT_DISTRIBUTED, str(tmp_path / "run")]
    process = subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    refusals = process.stdout.splitlines()
    expected = [f"DeviceError {name}: torch {torch.__version__} was built" for name in ("mesh", "sharded", "mesh")]
    assert [line.partition(" without torch.distributed")[0] for line in refusals[:3]] == expected
    assert len(refusals) == 4
    assert refusals[3].startswith("FtrainError with_amp(fp8): ")


@pytest.fixture(scope="module")
def import_report():
    """Return the modules that `import ftrain` imports, all modules after the choice of a device, and its seconds."""
    root = Path(ft.__file__).parents[1]
    process = subprocess.run([sys.executable, "-c", REPORT], cwd=root, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def test_nothing_heavy_is_imported(import_report):
    imported = import_report[0]
    assert "ftrain.step" in imported
    assert not (HEAVY | USED_LATER) & {*imported}


def test_the_choice_of_a_device_imports_no_package_of_a_vendor(import_report):
    _, imported, seconds = import_report
    packages = {package.split(".")[0] for package in standins.PACKAGES.values()}
    assert not packages & {name.split(".")[0] for name in imported}
    assert seconds < 1.0
