"""Small trees, one for each step, and checks of a directory of checkpoints after a fault."""

from dataclasses import replace

import torch

import ftrain as ft
from ftrain.checkpoint import Checkpoints, verify
from ftrain.checkpoint.journal import Journal, check, parse_mark, read
from tests.faults.problem import make, params

TEXTS = {"params/config.json": '{"layers": 1}', "notes/of/run.txt": "ten characters or more, so that half is not all"}
STATE = make().init(params())
FROZEN = {"base": torch.arange(5.0)}


def tree(step, frozen=None):
    """Return the tree that is saved as the checkpoint of a step, in two files of tensors; three with frozen ones."""
    generator = torch.Generator().manual_seed(step)
    state = ft.tree.map(lambda leaf: leaf if leaf.dtype == torch.int64 else leaf * step, STATE)
    state = replace(state, frozen=frozen)
    return {
        "state": state,
        "run": {"number": torch.tensor(step), "noise": torch.rand(5, generator=generator), "at": step},
    }


def bits(value):
    """Return the names and the bits of all leaves of a tree, to compare with ``==``."""
    leaves = [
        (str(leaf.dtype), tuple(leaf.shape), leaf.numpy().tobytes()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in ft.tree.leaves(value)
    ]
    return ft.tree.leaf_names(value), leaves


EXPECTED = {}


def is_tree(step, actual):
    """Whether a loaded tree is that of a step, to the bit."""
    frozen = FROZEN if actual["state"].frozen else None
    key = step, frozen is None
    if key not in EXPECTED:
        EXPECTED[key] = bits(tree(step, frozen))
    return bits(actual) == EXPECTED[key]


def checkpoints(directory, **options):
    return Checkpoints(directory, **{"every": 1, "keep": 2, "texts": TEXTS, "async_": False, **options})


def newest(directory):
    """Return the step of the newest checkpoint, None if there is none; asserts that it has the bits that were saved."""
    actual = checkpoints(directory).latest(accept=require_history)
    if actual is None:
        return None
    mark = parse_mark(actual.parts.pop("history", None))
    assert mark is None or list(read(directory, mark)) == records(actual.step), f"the history of step {actual.step}"
    assert is_tree(actual.step, actual.parts), f"step {actual.step} is not what was saved"
    return actual.step


def records(step):
    """Return the history of a run until a step."""
    return [{"step": number, "loss": number / 7, "of": [number, None]} for number in range(1, 3 * step + 1)]


def require_history(actual):
    """Raise a CheckpointError if the history that belongs to a loaded checkpoint is damaged."""
    if mark := parse_mark(actual.parts.get("history")):
        check(actual.path.parent, mark)


def save_with_history(writer, journal, step):
    """Save a step as `fit` does: its records go to the history, and the mark to the checkpoint."""
    mark, append = journal.prepare_append(records(step))
    writer.save(step, {**tree(step), "history": mark._asdict()}, first=append, wait=True)


def saves_with_history(directory, step, **options):
    """Resume from the newest step, and save another one with its history."""
    with checkpoints(directory, **options) as writer:
        journal, actual = Journal(directory), writer.latest(accept=require_history)
        journal.continue_after(parse_mark(actual.parts["history"]) if actual else None)
        save_with_history(writer, journal, step)


def temporary(directory):
    """Return the names of temporary directories that saves have left."""
    return sorted(path.name for path in directory.glob(".*.tmp"))


def require_goes_on(directory, step, **options):
    """Assert that the next save works without cleaning up, and leaves only intact checkpoints."""
    with checkpoints(directory, **options) as writer:
        writer.save(step, tree(step), wait=True)
    assert newest(directory) == step
    assert not temporary(directory)
    require_whole(directory)


def require_whole(directory):
    """Assert that everything with the name of a checkpoint is an intact one."""
    kept = checkpoints(directory)
    for step in kept.steps():
        verify(kept.path(step))
