"""What `import ftrain` brings with it, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import ftrain as ft

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
"""Each takes from a tenth of a second to several, and is imported where it is used."""

USED_LATER = {
    "ftrain.losses.chunked",
    "ftrain.profiling",
    "ftrain.transforms.remat.optimization_barrier",
    "ftrain.transforms.compile.graph_fixes",
}
"""Of this package: what most programs never use, and files that register operations. Together a sixth of the time."""

SHOWN = """
import sys, torch
before = {*sys.modules}
import ftrain
print(*sorted({*sys.modules} - before))
"""


def test_nothing_heavy_is_imported():
    root = Path(ft.__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", SHOWN], cwd=root, capture_output=True, text=True, check=True)
    brought = found.stdout.split()
    assert "ftrain.step" in brought
    assert not (HEAVY | USED_LATER) & {*brought}
