"""The process ends before, halfway through or after a call of a save to the file system, whichever it is.

What loads then is what was there before or what was being saved, exactly, and the next save works.
"""

import os
import shutil
import signal
from contextlib import nullcontext

import pytest

from ftrain.checkpoint import load, save
from tests.faults.disk import WRITING, Calls, Killed, through
from tests.faults.figures import FULL, tally, times
from tests.faults.forks import Child, forked, quiet_forks
from tests.faults.saves import (
    TEXTS,
    checkpoints,
    fast,
    is_tree,
    newest,
    require_goes_on,
    require_whole,
    saves_with_history,
    tree,
)

__all__ = ["fast"]

MOMENTS = "before", "halfway", "after"


def prepare(directory, steps, act=None, **options):
    directory.mkdir()
    if act is saves_with_history:
        for step in steps:
            act(directory, step, **options)
    elif steps:
        with checkpoints(directory, **options) as writing:
            for step in steps:
                writing.save(step, tree(step), wait=True)
    return directory


def damage(directory, step):
    (checkpoints(directory).path(step) / "MANIFEST.json").write_bytes(b"{}")


def saves(directory, step, **options):
    with checkpoints(directory, **options) as writing:
        writing.save(step, tree(step), wait=True)


def saves_two(directory, step, **options):
    """Of which the first is being written while the process goes on."""
    with checkpoints(directory, **options) as writing:
        for number in (step, step + 1):
            writing.save(number, tree(number))


def pins(directory, step, **options):
    with checkpoints(directory, **options) as writing:
        writing.pin(step)


def replaces(directory, step, **options):
    with checkpoints(directory, **options) as writing:
        # So that it is the same run.
        writing.latest()
        writing.save(step, tree(step), metrics={"loss": 0.5}, wait=True)


# What is there, what is done, and the steps that may be the newest one afterwards.
STORIES = {
    "first": ((), saves, 1, {None, 1}, {}),
    "rotation": ((1, 2), saves, 3, {2, 3}, {}),
    "rotation_async": ((1, 2), saves_two, 3, {2, 3, 4}, {"async_": True}),
    "rotation_of_the_only_one": ((1,), saves, 2, {1, 2}, {"keep": 1}),
    "again": ((1, 2), saves, 2, {2}, {}),
    "replaced": ((1, 2), replaces, 2, {2}, {}),
    "replaced_the_only_one": ((1,), replaces, 1, {1}, {"keep": 1}),
    "pin": ((1, 2), pins, 2, {2}, {}),
    "history": ((1, 2), saves_with_history, 3, {2, 3}, {}),
    "first_history": ((), saves_with_history, 1, {None, 1}, {}),
}
stories = pytest.mark.parametrize("story", STORIES)


def counted(tell, directory, act, step, options):
    with through(Calls()) as proxy:
        act(directory, step, **options)
    tell(proxy.made)


def crash(tell, directory, act, step, options, at, moment):
    with through(Killed(at, moment)):
        act(directory, step, **options)


STRIDE = times(1, 32)
"""One of so many points is tried, and the last; another one in each story."""


def points(made, offset=0):
    """Each call and each moment of it; a quick run leaves out those behind which the disk is as before them."""
    every = [
        (at, moment)
        for at, name in enumerate(made)
        for moment in MOMENTS
        if (moment != "halfway" or name == "write")
        and (FULL or (name in WRITING - {"open", "close"} and moment != "after"))
    ]
    return [point for number, point in enumerate(every, 1) if (number + offset) % STRIDE == 0 or number == len(every)]


@quiet_forks
@stories
def test_a_process_ends_at_a_call(story, fast):
    before, act, step, allowed, options = STORIES[story]
    template = prepare(fast / "template", before, act, **options)
    made = forked(counted, shutil.copytree(template, fast / "counted"), act, step, options)
    last = None
    with tally(f"crash at a call, {story}") as tries:
        tries.note = f"{len(made)} calls"
        for at, moment in points(made, list(STORIES).index(story)):
            directory = shutil.copytree(template, fast / f"{at}-{moment}")
            with tries.one((at, moment)):
                child = Child(crash, directory, act, step, options, at, moment)
                assert child.end() == -signal.SIGKILL
                last = newest(directory)
                assert last in allowed
                require_whole(directory)
                require_goes_on(directory, 10, **options)
            shutil.rmtree(directory)
        assert last == max(allowed - {None})
        assert tries.runs > (30 if max(allowed - {None}) not in before else 5) // STRIDE


@quiet_forks
def test_a_process_ends_where_a_damaged_one_makes_way(fast):
    template = prepare(fast / "template", (1, 2))
    damage(template, 2)
    made = forked(counted, shutil.copytree(template, fast / "counted"), saves, 2, {})
    with tally("crash at a call, damaged") as tries:
        tries.note = f"{len(made)} calls"
        for at, moment in points(made):
            directory = shutil.copytree(template, fast / f"{at}-{moment}")
            with tries.one((at, moment)):
                assert Child(crash, directory, saves, 2, {}, at, moment).end() == -signal.SIGKILL
                # Until it is saved again, the one before it is found, with a warning while the damaged one is there.
                aloud = is_damaged(directory / "step-000000000002")
                with pytest.warns(UserWarning, match="damaged") if aloud else nullcontext():
                    assert newest(directory) in {1, 2}
                require_goes_on(directory, 2)
            shutil.rmtree(directory)


def is_damaged(path):
    return path.exists() and (path / "MANIFEST.json").read_bytes() == b"{}"


def alone(path, step):
    save(path, tree(step), texts=TEXTS)


@quiet_forks
def test_a_process_ends_at_a_call_of_save(fast):
    made = forked(counted, fast / "counted" / "m", alone, 1, {})
    with tally("crash at a call, save") as tries:
        tries.note = f"{len(made)} calls"
        for at, moment in points(made):
            path = fast / f"{at}-{moment}" / "m"
            with tries.one((at, moment)):
                assert Child(crash, path, alone, 1, {}, at, moment).end() == -signal.SIGKILL
                if not path.exists():
                    alone(path, 1)
                assert is_tree(1, load(path))
                assert os.listdir(path.parent) == ["m"]
        assert tries.runs > 25 // STRIDE
