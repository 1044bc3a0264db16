"""How often each fault is tried, and the file that holds what came of it.

`FTRAIN_FAULTS=full` tries as often as the file is meant to say, and writes it; otherwise a few tries are enough.
"""

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bench.rows import machine, measured, read, with_origin, write

FULL = os.environ.get("FTRAIN_FAULTS") == "full"
QUESTION = "faults"
FILE = Path(__file__).parents[2] / "bench" / "results" / "faults.csv"


def times(full, quick):
    """How often to try a fault."""
    return full if FULL else quick


def record(variant, *, note="", file=None, unit="count", **figures):
    """Write figures of a fault, such as ``runs=100, failures=0, silent=0``, when all of the tries were made.

    Rows of the same variant and metric are replaced, all others stay.
    """
    if not FULL and file is None:
        return
    file = file or FILE
    made = [
        measured(QUESTION, variant, name.replace("_", " "), unit, [float(value)], note=note)
        for name, value in figures.items()
    ]
    # Several processes may share the tests among them.
    with locked(file.parent):
        before = [row for row in read(file.parent) if row.question == QUESTION]
        rows = {(row.variant, row.metric): row for row in [*before, *with_origin(made, machine(torch.device("cpu")))]}
        write([rows[key] for key in sorted(rows)], file)


@contextmanager
def locked(folder):
    """Context in which no other process is, that asks for it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Tally:
    """The tries of a fault: how many there were, and what went wrong in which."""

    def __init__(self):
        self.runs, self.failures, self.note = 0, [], ""
        self.figures = {}
        """Counts of the row beside those of runs and failures."""

    @contextmanager
    def one(self, what):
        """Context of a try: what it raises is counted as a failure, and the next one is made all the same."""
        self.runs += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error!s:.500}")


@contextmanager
def tally(variant, **how):
    """Context of the tries of a fault, whose row is written however it ends; it fails when any of them did."""
    tries = Tally()
    try:
        yield tries
    except (Exception, pytest.fail.Exception) as error:
        tries.failures.append(f"after {tries.runs}: {type(error).__name__}: {error!s:.500}")
        raise
    finally:
        figures = {"runs": tries.runs, **tries.figures, "failures": len(tries.failures)}
        record(variant, note=tries.note, **figures, **how)
    assert not tries.failures, "\n".join(map(str, tries.failures[:5]))
