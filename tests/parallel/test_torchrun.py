"""Ranks that torchrun starts as processes, which gloo connects, train as one rank does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bits import assert_same_bits
from tests.parallel import script
from tests.parallel.ranks import run
from tests.parallel.results import assert_histories_near, assert_leaves_near


def started(output, *options, names=()):
    """Start torchrun, and return its process. Its ranks train the steps of these names (default: all) to `output`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])}
    command = [sys.executable, "-m", "torch.distributed.run", *options, script.__file__, str(output), *names]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def results(output, size, *agents):
    """Wait for the processes of torchrun, and return the results of `script.main` by name of the step."""
    try:
        for agent in agents:
            output_text, _ = agent.communicate(timeout=600)
            assert agent.returncode == 0, output_text[-4000:]
    finally:
        for agent in agents:
            agent.kill()
    ends = [Path(f"{output}.end-of-{rank}").read_text() for rank in range(size)]
    assert ends == ["left, with threads []"] * size
    return torch.load(output)


# The compiled step takes half a minute, so it is exhaustive; `test_processes` compiles smaller ones.
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["level 3"]),
        *(pytest.param(size, [*script.STEPS], marks=pytest.mark.exhaustive) for size in (2, 4)),
    ],
    ids=str,
)
def test_a_script_under_torchrun_has_the_results_of_one_rank(size, names, tmp_path):
    output = tmp_path / "together.pt"
    by_name = results(output, size, started(output, "--standalone", f"--nproc-per-node={size}", names=names))
    assert [*by_name] == names
    ((reference, reference_history),) = run(1, lambda rank: script.train("level 0"))
    for params, history in by_name.values():
        assert_leaves_near(params, reference.params)
        assert_histories_near(history, reference_history)


@pytest.mark.exhaustive  # It starts torch six times.
def test_two_agents_with_a_rank_each_train_the_bits_of_one_with_two_ranks(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=test"]
    by_one_agent, by_two_agents = tmp_path / "one.pt", tmp_path / "two.pt"
    expected = results(by_one_agent, 2, started(by_one_agent, "--standalone", "--nproc-per-node=2"))
    agents = [started(by_two_agents, *nodes, "--local-addr=127.0.0.1") for _ in range(2)]
    assert_same_bits(results(by_two_agents, 2, *agents), expected)
