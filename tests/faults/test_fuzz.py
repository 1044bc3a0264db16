"""Malformed manifests and headers: refused with a CheckpointError, quickly and in little memory."""

import itertools
import os
import random
import resource
import time

import pytest

from ftrain.checkpoint import load, save, verify
from ftrain.checkpoint.__main__ import inspection
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.reading import load_checkpoint
from ftrain.errors import CheckpointError, StructureError
from tests.faults.figures import tally, times
from tests.faults.forks import forked, quiet_forks
from tests.faults.malformed import MANIFEST, PARTS, ChangedCheckpoint, change_header, change_manifest, change_text

SECONDS, MEMORY = 1.0, 64 * 2**20
SHARDS = 4
"""Child processes of a test, each with its own seed: the peak of memory of one does not hide that of another."""


def load_parts(path):
    """Load as a run does that resumes from `PARTS` at step 3."""
    return load_checkpoint(path, 3, {"state": PARTS["state"]}, Ranks("load"), on_host=False, accept=None)


CHANGES = {"manifest": change_manifest, "text": change_text, "header": change_header}
ROUTES = {
    "load": (load, CheckpointError),
    "load like": (lambda path: load(path, like=PARTS), (CheckpointError, StructureError)),
    "load partial": (lambda path: load(path, like=PARTS, partial=True), (CheckpointError, StructureError)),
    "load parts": (load_parts, (CheckpointError, StructureError)),
    "verify": (verify, CheckpointError),
    "inspect": (lambda path: list(inspection(path)), CheckpointError),
}


def peak_bytes():
    """Return the largest memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzzed(send, change, path, seed, tries):
    """Change and read a checkpoint many times; send how many were accepted, and the wrong results."""
    checkpoint, draw = ChangedCheckpoint(path), random.Random(seed)
    # `inspect` reads only the manifest, so it does not see a changed header.
    routes = itertools.cycle(
        [(name, route) for name, route in ROUTES.items() if (change, name) != ("header", "inspect")]
    )
    for read, _ in ROUTES.values():
        read(path)
    accepted, problems, slowest, memory = 0, [], 0.0, 0
    for number, (name, (read, errors)) in zip(range(tries), routes, strict=False):
        changed = CHANGES[change](checkpoint, draw)
        untouched = all((path / file).read_bytes() == checkpoint.original[file] for file in changed)
        # Measured without the change itself: the text of a deep tree has megabytes of spaces.
        start, before = time.process_time(), peak_bytes()
        try:
            read(path)
            accepted += not untouched
        except errors as error:
            # A good file must load, and a lack of memory is a wrong reason to refuse a file.
            if untouched or isinstance(error.__cause__, MemoryError) or "allocate" in str(error):
                problems.append((number, name, repr(error)[:300]))
        except BaseException as error:
            problems.append((number, name, repr(error)[:300]))
        seconds = time.process_time() - start
        memory += peak_bytes() - before
        slowest = max(slowest, seconds)
        if seconds > SECONDS:
            problems.append((number, name, f"{seconds:.1f} s"))
        checkpoint.restore(changed)
    if memory > MEMORY:
        problems.append((tries, change, f"{memory / 2**20:.0f} MB"))
    send({"accepted": accepted, "wrong": problems, "slowest": slowest, "memory": memory})


@quiet_forks
@pytest.mark.parametrize("change", CHANGES)
def test_only_errors_of_checkpoints_come_of_malformed_files(change, tmp_path):
    count = times({"manifest": 70_000, "text": 15_000, "header": 15_000}[change], 100) // SHARDS
    results = []
    with tally(f"fuzz: {change}") as tries:
        for shard in range(SHARDS):
            path = tmp_path / f"step-{shard}"
            save(path, PARTS, step=3)
            tries.runs += count
            results.append(forked(fuzzed, change, path, f"{change} {shard}", count))
            tries.failures += results[-1]["wrong"]
        accepted = sum(result["accepted"] for result in results)
        slowest, memory = (
            max(result["slowest"] for result in results),
            max(result["memory"] for result in results) / 2**20,
        )
        tries.note = f"{accepted} were good after all; the slowest took {slowest:.2f} s, all of them {memory:.0f} MB"
        # A changed header is never accepted; a changed manifest with a right digest may be a valid one.
        assert (accepted > 0) == (change != "header")


def test_a_manifest_that_is_too_large_is_not_read(tmp_path):
    save(tmp_path / "a", PARTS)
    os.truncate(tmp_path / "a" / MANIFEST, 2**36)
    before = peak_bytes()
    with pytest.raises(CheckpointError, match=r"MANIFEST.json.*more than|more than.*MANIFEST.json"):
        load(tmp_path / "a")
    assert peak_bytes() - before < MEMORY
