"""A state that changes in place while it is written in the background: the file has its values at the call of save."""

import random

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import files, load
from tests.faults.figures import tally, times
from tests.faults.problem import batch, make, squares
from tests.faults.specimens import everything, have_same_bits

LENGTH = 2048


def problem():
    step = make(squares, ft.ema(0.9))
    return step, step.init({"w": torch.linspace(-1, 1, 3), "b": torch.zeros(())}, seed=1)


def train(step, state, count):
    for _ in range(count):
        state, _ = step.donating(state, batch())
    return state


def scribble(tree, draw):
    """Change every tensor in place."""
    for leaf in ft.tree.leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf.copy_(torch.full_like(leaf, draw.randrange(2)))


@pytest.mark.parametrize("case", ["donated steps", "everything in place", "while files are written"])
def test_a_save_in_the_background_has_the_state_of_its_call(case, tmp_path, monkeypatch):
    count, draw = times({"donated steps": 600}.get(case, 200), 6), random.Random(case)
    step, state = problem()
    extra = {"large": torch.zeros(LENGTH, LENGTH // 8), **everything()}
    if case == "while files are written":
        # The state changes before each write.
        write_of_files = files.write

        def write(descriptor, data):
            scribble(extra, draw)
            write_of_files(descriptor, data)

        monkeypatch.setattr(files, "write", write)

    def require_copy(number):
        assert have_same_bits(load(checkpoints.path(number)), last_copy)

    with ft.Checkpoints(tmp_path, every=1, keep=2) as checkpoints, tally(f"async: {case}") as tries:
        last_copy = None
        for number in range(1, count + 1):
            state = train(step, state, draw.randint(1, 3))
            parts = {"state": state} if case == "donated steps" else {"state": state, "more": extra}
            if case == "while files are written":
                # Else the writer would change it between the copy of this test and that of the call.
                checkpoints.wait()
            copy = ft.tree.clone(parts)
            checkpoints.save(number, parts)
            # The save before is done now, and that state is gone.
            if last_copy is not None:
                with tries.attempt(number - 1):
                    require_copy(number - 1)
            last_copy = copy
            state = train(step, state, draw.randint(0, 5))
            if case != "donated steps":
                scribble(extra, draw)
        checkpoints.wait()
        with tries.attempt(count):
            require_copy(count)


def test_a_donated_state_cannot_be_saved(tmp_path):
    step, state = problem()
    step.donating(state, batch())
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        with pytest.raises(ft.errors.ConsumedError):
            checkpoints.save(1, {"state": state})
        assert checkpoints.steps() == []
