"""Ranks that are processes, which gloo connects: started by torchrun, and alone."""

import os
import subprocess
import sys

import pytest
import torch

import ftrain as ft
from tests.parallel import compression_script, fit_script, models, script
from tests.parallel.ranks import run


def launched(size, file, *arguments):
    """Return the finished process of a script on some ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
    command = [sys.executable, *launcher, file, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def results(directory, size, script=script):
    output = directory / f"{size}.pt"
    done = launched(size, script.__file__, output)
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


def test_a_signal_to_one_rank_ends_all_after_the_same_step_and_the_run_resumes(tmp_path):
    done = launched(2, fit_script.__file__, tmp_path, "SIGTERM", 1)
    ends = [torch.load(tmp_path / f"SIGTERM{rank}.pt", weights_only=False) for rank in (0, 1)]
    # The second rank was told while it read batch 4, and said so after it; the first one knows after batch 5.
    assert ends == [("Interrupted: 143 ", 5)] * 2
    assert done.stderr.count("fit: ended by SIGTERM, saved in") == 1
    done = launched(2, fit_script.__file__, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    state, losses = torch.load(tmp_path / "end0.pt", weights_only=False)

    def alone(_):
        return models.train(models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh())), models.batches(8))

    ((reference, history),) = run(1, alone)
    torch.testing.assert_close(state.params, reference.params, rtol=1e-12, atol=1e-12)
    assert losses == pytest.approx([record["loss"] for record in history], rel=1e-12)


def test_an_error_in_the_data_of_one_rank_ends_the_others_which_name_it(tmp_path):
    assert launched(2, fit_script.__file__, tmp_path, "error", 1).returncode
    ends = [torch.load(tmp_path / f"error{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert ends[1] == ("OSError: disk gone ", 3)
    assert ends[0][0].startswith("RankError: ")
    assert "rank 1 failed in step 3: OSError: disk gone" in ends[0][0]
    assert ends[0][1] == 3
