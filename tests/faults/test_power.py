"""Power is lost: of what was not synced, any part may be on the disk. What was acknowledged is there all the same.

The disk is a model (`tests.faults.disk.Disk`): everything that checkpoints do to it is recorded, and for each moment
every tree that it may then hold is laid out and loaded. Leaving out any one of the syncs must be noticed.
"""

import itertools
import shutil
from contextlib import nullcontext

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import load, save, verify
from ftrain.checkpoint.journal import NAME, Journal
from ftrain.errors import CheckpointError
from tests.exhaustive import choose
from tests.faults.disk import Disk, PowerCut, Recorded, frozen, laid_out, through
from tests.faults.figures import tally, times
from tests.faults.saves import (
    FROZEN,
    TEXTS,
    checkpoints,
    fast,
    is_tree,
    newest,
    records,
    require_goes_on,
    save_with_history,
    saves_with_history,
    tree,
)

__all__ = ["fast"]

MOST = times(512, 2)
PINNED = 2


def run(disk, root, **options):
    """A run in a new directory: four saves, of which the first is rotated away, and the second pinned."""
    with checkpoints(root / "runs" / "a", **options) as writing:
        for step in (1, 2, 3, 4):
            disk.say("begun", step)
            writing.save(step, tree(step), wait=True)
            disk.say("saved", step)
            if step == PINNED:
                writing.pin(step)
                disk.say("pinned", step)


def overlapping(disk, root, **options):
    """A run that goes on while each save is written; the next save tells that the one before is on the disk."""
    with checkpoints(root / "runs" / "a", async_=True) as writing:
        for step in (1, 2, 3, 4):
            disk.say("begun", step)
            writing.save(step, tree(step))
            disk.say("saved", step - 1)
        writing.wait()
        disk.say("saved", step)


def check_run(root, saved, begun, pinned):
    directory = root / "runs" / "a"
    actual = newest(directory)
    assert (actual if actual is not None else 0) in range(saved, begun + 1)
    assert not pinned or (directory / f"step-{PINNED:012d}.pinned").exists()


def alone(disk, root):
    """`save` by itself, twice, below directories that are not there."""
    for step in (1, 2):
        disk.say("begun", step)
        save(root / "new" / "models" / f"m{step}", tree(step), texts=TEXTS)
        disk.say("saved", step)


def check_alone(root, saved, begun, pinned):
    for step in (1, 2):
        path = root / "new" / "models" / f"m{step}"
        if step <= saved or path.exists():
            assert step <= begun
            assert is_tree(step, load(path))


def shared(disk, root, **options):
    """A run whose checkpoints share a file of frozen parameters, but for the last one, which has another copy."""
    with checkpoints(root / "runs" / "a", **options) as writing:
        for step in (1, 2, 3, 4):
            disk.say("begun", step)
            writing.save(step, tree(step, FROZEN if step < 4 else ft.tree.map(torch.clone, FROZEN)), wait=True)
            disk.say("saved", step)


def refused(disk, root):
    """A save whose name cannot be synced, nor taken back, and which therefore fails; tried again, it is there."""
    with checkpoints(root / "runs" / "a") as writing:
        renamed = []

        def broken(name, args):
            if name == "rename":
                renamed.append(args)
            return len(renamed) > 1 if name == "rename" else name == "fsync" and bool(renamed)

        disk.say("begun", 1)
        disk.broken = broken
        with pytest.raises(CheckpointError, match="Input/output error"):
            writing.save(1, tree(1))
        disk.broken = lambda name, args: False
        assert writing.steps() == [1]
        writing.save(1, tree(1))
        disk.say("saved", 1)


def replaced(disk, root):
    """The last checkpoint is replaced by one of other metrics."""
    with checkpoints(root / "runs" / "a") as writing:
        for step, loss in ((1, 1.0), (PINNED, 2.0), (PINNED, 3.0)):
            disk.say("begun", step)
            writing.save(step, tree(step), metrics={"loss": loss})
            disk.say("saved", step)
        disk.say("replaced", PINNED)


def check_replaced(root, saved, begun, replaced):
    check_run(root, saved, begun, False)
    if saved == PINNED:
        loss = verify(checkpoints(root / "runs" / "a").path(PINNED)).metrics["loss"]
        assert loss == 3.0 if replaced else loss in (2.0, 3.0)


def with_history(disk, root):
    """Two saves with a history, one that ends when its records are there, and another run that goes on."""
    directory = root / "runs" / "a"
    with checkpoints(directory) as writing:
        journal = Journal(directory)
        for step in (1, 2):
            disk.say("begun", step)
            save_with_history(writing, journal, step)
            disk.say("saved", step)
        _, append = journal.prepare_append(
            [*records(2), {"step": 7, "loss": 1.0, "of": "what never was in a checkpoint"}]
        )
        append()
    disk.say("begun", 3)
    saves_with_history(directory, 3)
    disk.say("saved", 3)


STORIES = {
    "run": (run, check_run, {}),
    "async": (overlapping, check_run, {}),
    "keep_1": (run, check_run, {"keep": 1}),
    "save": (alone, check_alone, {}),
    "refused": (refused, check_run, {}),
    "replaced": (replaced, check_replaced, {}),
    "frozen": (shared, check_run, {}),
    "history": (with_history, check_run, {}),
}
stories = pytest.mark.parametrize(
    "story", choose(list(STORIES), ["run", "async", "save", "replaced", "frozen", "history"])
)


def recorded(root, story, **how):
    act, _, options = STORIES[story]
    with through(Recorded(root, **how)) as disk:
        act(disk, root, **options)
    return disk


def moments(log):
    """How much of a log there is when the power fails: up to each sync, and each acknowledgement.

    Whatever may be on the disk at another moment may be there at the next of these, too.
    """
    for at, line in enumerate(log):
        if line[0] == "sync":
            yield at
        elif line[0] == "said" and line[1] != "begun":
            yield at + 1
    yield len(log)


def known(log):
    """What was acknowledged, what was begun, and whether the pin was set or the last one replaced."""
    said = [line[1:] for line in log if line[0] == "said"]
    steps = {name: max((step for what, step in said if what == name), default=0) for name in ("saved", "begun")}
    return steps["saved"], steps["begun"], bool({("pinned", PINNED), ("replaced", PINNED)} & {*said})


def uncounted(what):
    """Where what goes wrong is raised at once."""
    return nullcontext()


def outcomes(log, check, scratch, *, after=None, one=uncounted, stride=1):
    """Lay out every disk that there may be, at every moment, or one of `stride`, once, and check it."""
    seen = set()
    for at in [*moments(log)][::stride]:
        facts = known(log[:at])
        for state in Disk(log[:at]).states(MOST, seed=at):
            if (key := (frozen(state), facts)) in seen:
                continue
            seen.add(key)
            root = scratch / str(len(seen))
            with one((at, facts)):
                laid_out(state, root)
                check(root, *facts)
                if after is not None and len(seen) % 20 == 1:
                    after(root, facts[1])
            shutil.rmtree(root)


def goes_on(root, begun):
    require_goes_on(root / "runs" / "a", begun + 1)


@stories
def test_what_was_acknowledged_is_there_after_power_is_lost(story, fast):
    (fast / "disk").mkdir()
    (fast / "scratch").mkdir()
    disk, check = recorded(fast / "disk", story), STORIES[story][1]
    with tally(f"power loss, {story}") as tries:
        tries.note = "disks that there may be after power was lost"
        after = None if check is check_alone else goes_on
        outcomes(disk.log, check, fast / "scratch", after=after, one=tries.one, stride=times(1, 3))
        assert tries.runs > 10


# Which function of `files`, called from where, for what.
SYNCS = {
    "model": ("run", "created < write_tensors", "model.safetensors"),
    "trained": ("frozen", "created < write_tensors", "model-trained.safetensors"),
    "frozen": ("frozen", "created < write_tensors", "model-frozen.safetensors"),
    "index": ("frozen", "created < _write_texts", "model.safetensors.index.json"),
    "state": ("run", "created < write_tensors", "state.safetensors"),
    "text": ("run", "created < _write_texts", "config.json"),
    "text_below": ("run", "created < _write_texts", "run.txt"),
    "manifest": ("run", "created < _write_manifest", "MANIFEST.json"),
    "directory_of_tensors": ("run", "_write_manifest < write", "params"),
    "directory_between": ("run", "_write_manifest < write", "notes"),
    "directory_of_texts": ("run", "_write_manifest < write", "of"),
    "temporary_directory": ("run", "_write_manifest < write", "temporary"),
    "rename": ("run", "_commit < new_directory", None),
    "directory_of_the_run": ("run", "make_directories < _open", None),
    "directory_of_a_save": ("save", "make_directories < _require_room", None),
    "renamed_before_a_kill": ("kill", "_open < <lambda>", None),
    "replaced": ("replaced", "finish_replacement < write_or_replace", None),
    "pin": ("run", "touch < pin", None),
    "history": ("history", "append < append", NAME),
    "name_of_the_history": ("history", "append < append", "a"),
}


LOST = pytest.raises((AssertionError, CheckpointError, UserWarning))


def is_site(name, site):
    _, where, what = SYNCS[name]
    return site[0] == where and what in (None, site[1])


@pytest.mark.parametrize("name", choose(list(SYNCS), [name for name in SYNCS if name != "renamed_before_a_kill"]))
def test_leaving_out_a_sync_is_noticed(name, fast):
    (fast / "disk").mkdir()
    (fast / "scratch").mkdir()
    story, dropped = SYNCS[name][0], lambda site: is_site(name, site)
    if story == "kill":
        with LOST:
            kills(fast, 2, dropped=dropped)
        return
    disk = recorded(fast / "disk", story, dropped=dropped)
    assert any(map(dropped, disk.sites))
    with LOST:
        outcomes(disk.log, STORIES[story][1], fast / "scratch")


def test_every_sync_is_left_out_once(fast):
    sites = set()
    for number, story in enumerate(STORIES):
        (fast / str(number)).mkdir()
        sites.update(recorded(fast / str(number), story).sites)
    assert {site for site in sites if not any(is_site(name, site) for name in SYNCS)} == set()


def killed(root, at, first, **how):
    """A run that is killed before a change of the disk, in its first save or its second; another finds it, or saves it.

    What the other one is told must be on the disk, which the killed one may have had no time to see to. Returns None
    when there is no such change.
    """
    disk = Recorded(root, **how)
    with through(disk):
        for step in range(1, first):
            saved(disk, root, step)
        disk.dies = disk.changes + at
        try:
            saved(disk, root, first)
        except PowerCut:
            disk.revive()
        else:
            return None
        with checkpoints(root / "runs" / "a") as writing:
            if actual := writing.latest():
                disk.say("saved", actual.step)
        saved(disk, root, first)
    return disk


def saved(disk, root, step):
    with checkpoints(root / "runs" / "a") as writing:
        disk.say("begun", step)
        writing.save(step, tree(step))
        disk.say("saved", step)


@pytest.mark.parametrize("first", [pytest.param(1, marks=pytest.mark.exhaustive), 2], ids=["first_save", "second_save"])
def test_power_is_lost_after_a_process_was_killed_and_another_went_on(first, fast):
    with tally(f"power loss after a kill, save {first}") as tries:
        moments = kills(fast, first, one=tries.one)
        tries.note = f"{moments} moments of the kill"
        assert moments > 20


def kills(directory, first, one=uncounted, **how):
    """Check the disks that there may be after a kill at moments of a save; return how many moments there are."""
    for at in itertools.count(step=times(1, 5)):
        root, scratch = directory / f"disk{at}", directory / f"scratch{at}"
        root.mkdir()
        scratch.mkdir()
        disk = killed(root, at, first, **how)
        if disk is None:
            return at
        told(disk.log, scratch, first, one)
    return None


def told(log, scratch, step, one):
    """Check the disks that there may be right after the other process was told of a step, each once."""
    seen = set()
    for at in [at for at, line in enumerate(log, 1) if line == ("said", "saved", step)]:
        facts = known(log[:at])
        for state in Disk(log[:at]).states(MOST, seed=at):
            if (key := (frozen(state), facts)) not in seen:
                seen.add(key)
                laid_out(state, scratch / str(len(seen)))
                with one((at, facts)):
                    check_run(scratch / str(len(seen)), *facts)
