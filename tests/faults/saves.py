"""Small trees, one for each step, and what must be found of them after a fault."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import Checkpoints, verify
from ftrain.checkpoint.journal import Journal, check, parse_mark, read
from tests.faults.problem import make, params

# The file system of /dev/shm loses power with the machine, as does every model here; it is the fastest.
FAST = Path("/dev/shm")
TEXTS = {"params/config.json": '{"layers": 1}', "notes/of/run.txt": "ten characters or more, so that half is not all"}
STATE = make().init(params())
FROZEN = {"base": torch.arange(5.0)}


def tree(step, frozen=None):
    """What is saved as the checkpoint of a step: in two files of tensors, and in the manifest; in three if frozen."""
    generator = torch.Generator().manual_seed(step)
    state = ft.tree.map(lambda leaf: leaf if leaf.dtype == torch.int64 else leaf * step, STATE)
    state = replace(state, frozen=frozen)
    return {
        "state": state,
        "run": {"number": torch.tensor(step), "noise": torch.rand(5, generator=generator), "at": step},
    }


def bits(value):
    """All of a tree, to compare."""
    leaves = [
        (str(leaf.dtype), tuple(leaf.shape), leaf.numpy().tobytes()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in ft.tree.leaves(value)
    ]
    return ft.tree.leaf_names(value), leaves


EXPECTED = {}


def is_tree(step, actual):
    """Whether a tree is that of a step, to the bit."""
    frozen = FROZEN if actual["state"].frozen else None
    key = step, frozen is None
    if key not in EXPECTED:
        EXPECTED[key] = bits(tree(step, frozen))
    return bits(actual) == EXPECTED[key]


def checkpoints(directory, **options):
    return Checkpoints(directory, **{"every": 1, "keep": 2, "texts": TEXTS, "async_": False, **options})


def newest(directory):
    """The step of the newest checkpoint that loads, None where there is none; it must be exact, and nothing damaged."""
    actual = checkpoints(directory).latest(accept=require_history)
    if actual is None:
        return None
    mark = parse_mark(actual.parts.pop("history", None))
    assert mark is None or list(read(directory, mark)) == records(actual.step), f"the history of step {actual.step}"
    assert is_tree(actual.step, actual.parts), f"step {actual.step} is not what was saved"
    return actual.step


def records(step):
    """The history of a run until a step."""
    return [{"step": number, "loss": number / 7, "of": [number, None]} for number in range(1, 3 * step + 1)]


def require_history(actual):
    if mark := parse_mark(actual.parts.get("history")):
        check(actual.path.parent, mark)


def save_with_history(writing, journal, step):
    """Save a step as `fit` does, with a mark in the file of records."""
    mark, append = journal.prepare_append(records(step))
    writing.save(step, {**tree(step), "history": mark._asdict()}, first=append, wait=True)


def saves_with_history(directory, step, **options):
    """Go on from the newest step, and save another one."""
    with checkpoints(directory, **options) as writing:
        journal, actual = Journal(directory), writing.latest(accept=require_history)
        journal.continue_after(parse_mark(actual.parts["history"]) if actual else None)
        save_with_history(writing, journal, step)


def temporary(directory):
    """What a save that did not end has left."""
    return sorted(path.name for path in directory.glob(".*.tmp"))


def require_goes_on(directory, step, **options):
    """Nothing has to be cleaned up by hand: the next save works, and leaves nothing but whole checkpoints."""
    with checkpoints(directory, **options) as writing:
        writing.save(step, tree(step), wait=True)
    assert newest(directory) == step
    assert not temporary(directory)
    require_whole(directory)


def require_whole(directory):
    """Everything that has the name of a checkpoint is one."""
    kept = checkpoints(directory)
    for step in kept.steps():
        verify(kept.path(step))


@pytest.fixture
def fast(tmp_path):
    """A new directory where syncing costs nothing, if there is one."""
    if not FAST.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=FAST, prefix="ftrain-faults-") as name:
        yield Path(name)
