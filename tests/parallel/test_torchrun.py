"""Ranks that are processes, which gloo connects: started by torchrun, and one rank that is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel import script
from tests.parallel.ranks import run


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_script_computes_under_torchrun_what_one_rank_does(size, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command, output = [sys.executable, *launcher, script.__file__], tmp_path / "together.pt"
    done = subprocess.run(
        [*command, str(output)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ends = [Path(f"{output}.end-of-{rank}").read_text() for rank in range(size)]
    assert ends == ["left, with threads []"] * size
    together = torch.load(output)
    assert together.keys() == set(script.STEPS)
    ((reference, history),) = run(1, lambda rank: script.train("level 0"))
    for params, metrics in together.values():
        torch.testing.assert_close(params, reference.params, rtol=1e-12, atol=1e-12)
        for step, expected in zip(metrics, history, strict=True):
            assert step == pytest.approx(expected, rel=1e-12)
