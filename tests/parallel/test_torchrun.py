"""Ranks that are processes, which gloo connects: started by torchrun, and alone."""

import os
import subprocess
import sys

import pytest
import torch

from tests.parallel import compression_script, script


def results(directory, size, script=script):
    output = directory / f"{size}.pt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
    command = [sys.executable, *launcher, script.__file__, str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(output)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_same_script_computes_the_same_alone_and_under_torchrun(size, tmp_path):
    alone, together = results(tmp_path, 1), results(tmp_path, size)
    assert alone.keys() == together.keys() == set(script.STEPS)
    reference, history = alone["level 0"]
    for params, metrics in (*alone.values(), *together.values()):
        torch.testing.assert_close(params, reference, rtol=1e-12, atol=1e-12)
        for step, expected in zip(metrics, history, strict=True):
            assert step == pytest.approx(expected, rel=1e-12)


def test_compressed_gradients_are_the_same_in_eager_and_compiled_steps(tmp_path):
    states = results(tmp_path, 2, compression_script)
    assert states.keys() == set(compression_script.METHODS)
    for eager, compiled in states.values():
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)
