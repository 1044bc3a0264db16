"""How often each fault is injected, and the file with the results.

With `FTRAIN_FAULTS=full` each fault is injected many times, and the results are written to the file; otherwise a few
times, and nothing is written.
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
    """Return how often to inject a fault: `full` times with ``FTRAIN_FAULTS=full``, else `quick` times."""
    return full if FULL else quick


def record(variant, *, note="", file=None, unit="count", **figures):
    """Write the figures of a fault, such as ``runs=100, failures=0``, to the file of results.

    Rows of the same variant and metric are replaced; all others stay. Only with ``FTRAIN_FAULTS=full``, or to `file`.
    """
    if not FULL and file is None:
        return
    file = file or FILE
    new_rows = [
        measured(QUESTION, variant, name.replace("_", " "), unit, [float(value)], note=note)
        for name, value in figures.items()
    ]
    # The tests may run in several processes, which write to the same file.
    with locked(file.parent):
        before = [row for row in read(file.parent) if row.question == QUESTION]
        rows = {
            (row.variant, row.metric): row for row in [*before, *with_origin(new_rows, machine(torch.device("cpu")))]
        }
        write([rows[key] for key in sorted(rows)], file)


@contextmanager
def locked(folder):
    """Context in which this process holds the lock of a folder; others wait."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Tally:
    """Counts how often a fault was injected, and collects the failures."""

    def __init__(self):
        self.runs, self.failures, self.note = 0, [], ""
        self.figures = {}
        """Further counts to record, besides runs and failures."""

    @contextmanager
    def attempt(self, label):
        """Context of one injection: an error in it is recorded as a failure, and not raised."""
        self.runs += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            self.failures.append(f"{label}: {type(error).__name__}: {error!s:.500}")


@contextmanager
def tally(variant, **options):
    """Context of a `Tally`, whose figures are recorded at the end; fails if any attempt failed."""
    tries = Tally()
    try:
        yield tries
    except (Exception, pytest.fail.Exception) as error:
        tries.failures.append(f"after {tries.runs}: {type(error).__name__}: {error!s:.500}")
        raise
    finally:
        figures = {"runs": tries.runs, **tries.figures, "failures": len(tries.failures)}
        record(variant, note=tries.note, **figures, **options)
    assert not tries.failures, "\n".join(map(str, tries.failures[:5]))
