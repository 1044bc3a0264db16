"""The process is killed before, halfway through or after any call of a save to the file system.

Afterwards the newest checkpoint is the one before or the one that was being saved, to the bit, and the next save works.
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
    is_tree,
    newest,
    require_goes_on,
    require_whole,
    saves_with_history,
    tree,
)

MOMENTS = "before", "halfway", "after"


def prepare(directory, steps, act=None, **options):
    directory.mkdir()
    if act is saves_with_history:
        for step in steps:
            act(directory, step, **options)
    elif steps:
        with checkpoints(directory, **options) as writer:
            for step in steps:
                writer.save(step, tree(step), wait=True)
    return directory


def damage(directory, step):
    (checkpoints(directory).path(step) / "MANIFEST.json").write_bytes(b"{}")


def saves(directory, step, **options):
    with checkpoints(directory, **options) as writer:
        writer.save(step, tree(step), wait=True)


def saves_two(directory, step, **options):
    """Save two steps; the first is written in the background while the process goes on."""
    with checkpoints(directory, **options) as writer:
        for number in (step, step + 1):
            writer.save(number, tree(number))


def pins(directory, step, **options):
    with checkpoints(directory, **options) as writer:
        writer.pin(step)


def replaces(directory, step, **options):
    with checkpoints(directory, **options) as writer:
        # A run that has loaded the checkpoint may replace it.
        writer.latest()
        writer.save(step, tree(step), metrics={"loss": 0.5}, wait=True)


# Steps that are saved before, the action that is killed, its step, the allowed newest steps afterwards, the options.
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


def counted(send, directory, act, step, options):
    with through(Calls()) as proxy:
        act(directory, step, **options)
    send(proxy.names)


def crash(send, directory, act, step, options, number, moment):
    with through(Killed(number, moment)):
        act(directory, step, **options)


STRIDE = times(1, 32)
"""Every `STRIDE`-th point is tried, and the last one; each story starts at another point."""


def points(calls, offset=0):
    """Return (number of a call, moment) to kill at; a quick run leaves out points that do not change the disk."""
    all_points = [
        (at, moment)
        for at, name in enumerate(calls)
        for moment in MOMENTS
        if (moment != "halfway" or name == "write")
        and (FULL or (name in WRITING - {"open", "close"} and moment != "after"))
    ]
    return [
        point
        for number, point in enumerate(all_points, 1)
        if (number + offset) % STRIDE == 0 or number == len(all_points)
    ]


@quiet_forks
@stories
def test_after_an_end_at_any_call_the_newest_checkpoint_is_whole_and_the_run_goes_on(story, ram_path):
    before, act, step, allowed, options = STORIES[story]
    template = prepare(ram_path / "template", before, act, **options)
    calls = forked(counted, shutil.copytree(template, ram_path / "counted"), act, step, options)
    last = None
    with tally(f"crash at a call, {story}") as tries:
        tries.note = f"{len(calls)} calls"
        for number, moment in points(calls, list(STORIES).index(story)):
            directory = shutil.copytree(template, ram_path / f"{number}-{moment}")
            with tries.attempt((number, moment)):
                child = Child(crash, directory, act, step, options, number, moment)
                assert child.wait() == -signal.SIGKILL
                last = newest(directory)
                assert last in allowed
                require_whole(directory)
                require_goes_on(directory, 10, **options)
            shutil.rmtree(directory)
        assert last == max(allowed - {None})
        assert tries.runs > (30 if max(allowed - {None}) not in before else 5) // STRIDE


@quiet_forks
def test_after_an_end_while_a_damaged_checkpoint_is_replaced_the_run_goes_on(ram_path):
    template = prepare(ram_path / "template", (1, 2))
    damage(template, 2)
    calls = forked(counted, shutil.copytree(template, ram_path / "counted"), saves, 2, {})
    with tally("crash at a call, damaged") as tries:
        tries.note = f"{len(calls)} calls"
        for number, moment in points(calls):
            directory = shutil.copytree(template, ram_path / f"{number}-{moment}")
            with tries.attempt((number, moment)):
                assert Child(crash, directory, saves, 2, {}, number, moment).wait() == -signal.SIGKILL
                # Until step 2 is saved again, step 1 is the newest, with a warning while the damaged one is there.
                warns = is_damaged(directory / "step-000000000002")
                with pytest.warns(UserWarning, match="damaged") if warns else nullcontext():
                    assert newest(directory) in {1, 2}
                require_goes_on(directory, 2)
            shutil.rmtree(directory)


def is_damaged(path):
    return path.exists() and (path / "MANIFEST.json").read_bytes() == b"{}"


def save_without_a_run(path, step):
    save(path, tree(step), texts=TEXTS)


@quiet_forks
def test_after_an_end_at_any_call_of_save_there_is_a_whole_checkpoint_or_none(ram_path):
    calls = forked(counted, ram_path / "counted" / "m", save_without_a_run, 1, {})
    with tally("crash at a call, save") as tries:
        tries.note = f"{len(calls)} calls"
        for number, moment in points(calls):
            path = ram_path / f"{number}-{moment}" / "m"
            with tries.attempt((number, moment)):
                assert Child(crash, path, save_without_a_run, 1, {}, number, moment).wait() == -signal.SIGKILL
                if not path.exists():
                    save_without_a_run(path, 1)
                assert is_tree(1, load(path))
                assert os.listdir(path.parent) == ["m"]
        assert tries.runs > 25 // STRIDE
