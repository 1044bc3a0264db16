"""Ranks that are processes, which gloo connects: started by torchrun, and alone."""

import os
import subprocess
import sys

import pytest
import torch

from tests.parallel import script


def results(directory, *launcher):
    output = directory / "results.pt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])}
    command = [sys.executable, *launcher, script.__file__, str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(output)


def test_the_same_script_on_one_two_and_four_ranks_computes_the_same(tmp_path):
    one = results(tmp_path)
    reference, history = one["level 0"]
    found = [one]
    for size in (2, 4):
        found.append(results(tmp_path, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"))
    for each in found:
        assert each.keys() == one.keys()
        for params, metrics in each.values():
            torch.testing.assert_close(params, reference, rtol=1e-12, atol=1e-12)
            for step, expected in zip(metrics, history, strict=True):
                assert step == pytest.approx(expected, rel=1e-12)
