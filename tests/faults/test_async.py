"""A state that changes in place while it is being written: the file has what it was at the call."""

import random

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import files, load
from tests.faults.figures import tally, times
from tests.faults.problem import batch, make, squares
from tests.faults.specimens import everything, same

LENGTH = 2048


def problem():
    step = make(squares, ft.ema(0.9))
    return step, step.init({"w": torch.linspace(-1, 1, 3), "b": torch.zeros(())}, seed=1)


def train(step, state, count):
    for _ in range(count):
        state, _ = step.donating(state, batch())
    return state


def scribble(tree, draw):
    """Change every tensor where it lies."""
    for leaf in ft.tree.leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf.copy_(torch.full_like(leaf, draw.randrange(2)))


@pytest.mark.parametrize("kind", ["donated steps", "everything in place", "while files are written"])
def test_a_file_has_the_state_of_the_call(kind, tmp_path, monkeypatch):
    count, draw = times({"donated steps": 600}.get(kind, 200), 6), random.Random(kind)
    step, state = problem()
    more = {"large": torch.zeros(LENGTH, LENGTH // 8), **everything()}
    if kind == "while files are written":
        # Each write waits for the state to have changed once more.
        real = files.write

        def write(descriptor, data):
            scribble(more, draw)
            real(descriptor, data)

        monkeypatch.setattr(files, "write", write)

    def as_kept(number):
        assert same(load(checkpoints.path(number)), kept)

    with ft.Checkpoints(tmp_path, every=1, keep=2) as checkpoints, tally(f"async: {kind}") as tries:
        kept = None
        for number in range(1, count + 1):
            state = train(step, state, draw.randint(1, 3))
            parts = {"state": state} if kind == "donated steps" else {"state": state, "more": more}
            if kind == "while files are written":
                # Else the writer would change it between the copy of this test and that of the call.
                checkpoints.wait()
            now = ft.tree.clone(parts)
            checkpoints.save(number, parts)
            # The save before is done now, and that state is gone.
            if kept is not None:
                with tries.one(number - 1):
                    as_kept(number - 1)
            kept = now
            state = train(step, state, draw.randint(0, 5))
            if kind != "donated steps":
                scribble(more, draw)
        checkpoints.wait()
        with tries.one(count):
            as_kept(count)


def test_a_state_that_was_donated_before_cannot_be_saved(tmp_path):
    step, state = problem()
    step.donating(state, batch())
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        with pytest.raises(ft.errors.ConsumedError):
            checkpoints.save(1, {"state": state})
        assert checkpoints.steps() == []
