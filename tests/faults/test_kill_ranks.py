"""SIGKILL of one of two ranks at random moments of a run, which torchrun starts again until it is done."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch

from ftrain import tree
from tests.faults import kill_ranks_script
from tests.faults.figures import tally, times

RANKS, KILLS_OF_A_RUN = 2, 5
DEADLINE = 300
"""Seconds that a run may take, with all of its starts."""


def launched(directory, restarts):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    options = [f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    command = [sys.executable, *launcher, *options, kill_ranks_script.__file__, str(directory)]
    with (directory / "stderr").open("w") as stderr:
        return subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr, start_new_session=True)


def progress(directory, rank):
    """Return the process of a rank and how many steps it has begun; (None, None) before the first."""
    with suppress(FileNotFoundError):
        pid, step = (directory / f"rank{rank}").read_text().split()
        return int(pid), int(step)
    return None, None


def run_until_done(directory, draw, kills):
    """Run until it is done, with a rank killed at random moments, at most `kills` times; return the number of kills."""
    directory.mkdir()
    launcher, killed, dead = launched(directory, 3 * kills), 0, set()
    victim, after, deadline = draw.randrange(RANKS), draw.randrange(5), time.monotonic() + DEADLINE
    try:
        while launcher.poll() is None:
            assert time.monotonic() < deadline, (directory / "stderr").read_text()[-4000:]
            time.sleep(0.005)
            pid, step = progress(directory, victim)
            if killed < kills and pid not in (None, *dead) and step >= after:
                time.sleep(draw.random() * 0.05)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                # torchrun ends the other ranks too.
                dead |= {progress(directory, rank)[0] for rank in range(RANKS)}
                victim, after = draw.randrange(RANKS), draw.randrange(5)
        assert launcher.returncode == 0, (directory / "stderr").read_text()[-4000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    return killed


def outcome(directory):
    state, records = torch.load(directory / "end.pt", weights_only=False)
    return [leaf.tolist() for leaf in tree.leaves(state)], records, (directory / "log.jsonl").read_text().count("\n")


@pytest.mark.exhaustive  # It starts torch a dozen times, which takes most of a minute.
def test_ranks_are_killed_and_the_run_ends_with_the_bits_of_another(tmp_path):
    draw, kills, runs = random.Random(0), 0, 0
    assert run_until_done(tmp_path / "whole", draw, 0) == 0
    whole = outcome(tmp_path / "whole")
    assert [record["step"] for record in whole[1]] == list(range(1, kill_ranks_script.STEPS + 1))
    with tally("SIGKILL of one of two ranks in a run, restarted by torchrun") as tries:
        while kills < times(50, 1) and not tries.failures:
            runs += 1
            with tries.attempt(f"run {runs}"):
                kills += run_until_done(tmp_path / str(runs), draw, min(KILLS_OF_A_RUN, times(50, 1) - kills))
                assert outcome(tmp_path / str(runs)) == whole
        # The figure counts kills, not runs.
        tries.runs, tries.note = kills, f"{runs} runs"
