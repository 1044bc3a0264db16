"""A power loss: of unsynced changes any part may be on the disk, but each save that has returned is there.

The disk is a model (`tests.faults.power_loss.Disk`). All changes that checkpoints make are recorded. For each moment
every possible content of the disk is written to a directory and loaded. A test also leaves out each sync, and must then
fail.
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
from tests.faults.disk import through
from tests.faults.figures import tally, times
from tests.faults.power_loss import Disk, PowerCut, Recorded, frozen, laid_out
from tests.faults.saves import (
    FROZEN,
    TEXTS,
    checkpoints,
    is_tree,
    newest,
    records,
    require_goes_on,
    save_with_history,
    saves_with_history,
    tree,
)

MAX_STATES = times(512, 2)
"""How many of the possible disks are drawn at a moment at which there are more."""
PINNED = 2


def run(disk, root, **options):
    """Save four steps in a new directory; rotation removes the first, and the second is pinned."""
    with checkpoints(root / "runs" / "a", **options) as writer:
        for step in (1, 2, 3, 4):
            disk.note("begun", step)
            writer.save(step, tree(step), wait=True)
            disk.note("saved", step)
            if step == PINNED:
                writer.pin(step)
                disk.note("pinned", step)


def run_in_background(disk, root, **options):
    """Save four steps in the background; each save waits for the one before, which is then on the disk."""
    with checkpoints(root / "runs" / "a", async_=True) as writer:
        for step in (1, 2, 3, 4):
            disk.note("begun", step)
            writer.save(step, tree(step))
            disk.note("saved", step - 1)
        writer.wait()
        disk.note("saved", step)


def check_run(root, saved, begun, pinned):
    directory = root / "runs" / "a"
    actual = newest(directory)
    assert (actual if actual is not None else 0) in range(saved, begun + 1)
    assert not pinned or (directory / f"step-{PINNED:012d}.pinned").exists()


def save_without_a_run(disk, root):
    """Call `save` twice, without a run, in directories that do not exist."""
    for step in (1, 2):
        disk.note("begun", step)
        save(root / "new" / "models" / f"m{step}", tree(step), texts=TEXTS)
        disk.note("saved", step)


def check_save_without_a_run(root, saved, begun, pinned):
    for step in (1, 2):
        path = root / "new" / "models" / f"m{step}"
        if step <= saved or path.exists():
            assert step <= begun
            assert is_tree(step, load(path))


def run_with_frozen(disk, root, **options):
    """Save four steps of a run that share a file of frozen parameters, except the last, which has a copy of them."""
    with checkpoints(root / "runs" / "a", **options) as writer:
        for step in (1, 2, 3, 4):
            disk.note("begun", step)
            writer.save(step, tree(step, FROZEN if step < 4 else ft.tree.map(torch.clone, FROZEN)), wait=True)
            disk.note("saved", step)


def save_after_a_failure(disk, root):
    """Save a step whose new name cannot be synced, nor be renamed back, so the save fails; then save it again."""
    with checkpoints(root / "runs" / "a") as writer:
        renames = []

        def broken(name, args):
            """Whether a call fails: after the first rename all syncs and renames do."""
            if name == "rename":
                renames.append(args)
                return len(renames) > 1
            return name == "fsync" and bool(renames)

        disk.note("begun", 1)
        disk.broken = broken
        with pytest.raises(CheckpointError, match="Input/output error"):
            writer.save(1, tree(1))
        disk.broken = lambda name, args: False
        assert writer.steps() == [1]
        writer.save(1, tree(1))
        disk.note("saved", 1)


def replace_a_checkpoint(disk, root):
    """Save two steps, and replace the last checkpoint by one with other metrics."""
    with checkpoints(root / "runs" / "a") as writer:
        for step, loss in ((1, 1.0), (PINNED, 2.0), (PINNED, 3.0)):
            disk.note("begun", step)
            writer.save(step, tree(step), metrics={"loss": loss})
            disk.note("saved", step)
        disk.note("replaced", PINNED)


def check_replaced(root, saved, begun, replaced):
    check_run(root, saved, begun, False)
    if saved == PINNED:
        loss = verify(checkpoints(root / "runs" / "a").path(PINNED)).metrics["loss"]
        assert loss == 3.0 if replaced else loss in (2.0, 3.0)


def run_with_history(disk, root):
    """Save twice with a history, then only append records, as if killed, and resume in another context."""
    directory = root / "runs" / "a"
    with checkpoints(directory) as writer:
        journal = Journal(directory)
        for step in (1, 2):
            disk.note("begun", step)
            save_with_history(writer, journal, step)
            disk.note("saved", step)
        _, append = journal.prepare_append(
            [*records(2), {"step": 7, "loss": 1.0, "of": "what never was in a checkpoint"}]
        )
        append()
    disk.note("begun", 3)
    saves_with_history(directory, 3)
    disk.note("saved", 3)


STORIES = {
    "run": (run, check_run, {}),
    "async": (run_in_background, check_run, {}),
    "keep_1": (run, check_run, {"keep": 1}),
    "save": (save_without_a_run, check_save_without_a_run, {}),
    "refused": (save_after_a_failure, check_run, {}),
    "replaced": (replace_a_checkpoint, check_replaced, {}),
    "frozen": (run_with_frozen, check_run, {}),
    "history": (run_with_history, check_run, {}),
}
stories = pytest.mark.parametrize(
    "story", choose(list(STORIES), ["run", "async", "save", "replaced", "frozen", "history"])
)


def recorded(root, story, **disk_options):
    """Return the recorded disk after a story."""
    act, _, options = STORIES[story]
    with through(Recorded(root, **disk_options)) as disk:
        act(disk, root, **options)
    return disk


def moments(log):
    """Yield the lengths of a log at which the power may fail: before each sync, after each event, and at the end.

    Any content that is possible at another moment is also possible at the next of these.
    """
    for at, line in enumerate(log):
        if line[0] == "sync":
            yield at
        elif line[0] == "event" and line[1] != "begun":
            yield at + 1
    yield len(log)


def known(log):
    """Return the last step that was saved, the last that was begun, and whether it was pinned or replaced."""
    events = [line[1:] for line in log if line[0] == "event"]
    steps = {name: max((step for event, step in events if event == name), default=0) for name in ("saved", "begun")}
    return steps["saved"], steps["begun"], bool({("pinned", PINNED), ("replaced", PINNED)} & {*events})


def uncounted(label):
    """Return a context in place of `Tally.attempt` that does not catch errors."""
    return nullcontext()


def check_states(log, check, scratch, *, after=None, attempt=uncounted, stride=1):
    """Check each possible content of the disk once, at every moment, or at every `stride`-th."""
    seen = set()
    for at in [*moments(log)][::stride]:
        acknowledged = known(log[:at])
        for state in Disk(log[:at]).states(MAX_STATES, seed=at):
            if (key := (frozen(state), acknowledged)) in seen:
                continue
            seen.add(key)
            root = scratch / str(len(seen))
            with attempt((at, acknowledged)):
                laid_out(state, root)
                check(root, *acknowledged)
                if after is not None and len(seen) % 20 == 1:
                    after(root, acknowledged[1])
            shutil.rmtree(root)


def goes_on(root, begun):
    require_goes_on(root / "runs" / "a", begun + 1)


@stories
def test_a_save_that_has_returned_is_on_the_disk_after_a_power_loss(story, ram_path):
    (ram_path / "disk").mkdir()
    (ram_path / "scratch").mkdir()
    disk, check = recorded(ram_path / "disk", story), STORIES[story][1]
    with tally(f"power loss, {story}") as tries:
        tries.note = "disks that there may be after power was lost"
        after = None if check is check_save_without_a_run else goes_on
        check_states(disk.log, check, ram_path / "scratch", after=after, attempt=tries.attempt, stride=times(1, 3))
        assert tries.runs > 10


# For each sync: a story that makes it, the function of `files` and its caller, and the name of the synced path.
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
    _, code, path = SYNCS[name]
    return site[0] == code and path in (None, site[1])


@pytest.mark.parametrize("name", choose(list(SYNCS), [name for name in SYNCS if name != "renamed_before_a_kill"]))
def test_leaving_out_a_sync_is_noticed(name, ram_path):
    (ram_path / "disk").mkdir()
    (ram_path / "scratch").mkdir()
    story, dropped = SYNCS[name][0], lambda site: is_site(name, site)
    if story == "kill":
        with LOST:
            check_kills(ram_path, 2, dropped=dropped)
        return
    disk = recorded(ram_path / "disk", story, dropped=dropped)
    assert any(map(dropped, disk.sites))
    with LOST:
        check_states(disk.log, STORIES[story][1], ram_path / "scratch")


def test_every_sync_of_a_save_is_among_those_that_are_left_out(ram_path):
    sites = set()
    for number, story in enumerate(STORIES):
        (ram_path / str(number)).mkdir()
        sites.update(recorded(ram_path / str(number), story).sites)
    assert {site for site in sites if not any(is_site(name, site) for name in SYNCS)} == set()


def killed(root, at, first, **options):
    """Kill a run before change number `at` of the disk in a save; another run loads the newest step, and saves it.

    A step that the other run has loaded must be on the disk, although the killed run may not have synced it. Returns
    the disk, or None if the save makes fewer changes.
    """
    disk = Recorded(root, **options)
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
        with checkpoints(root / "runs" / "a") as writer:
            if loaded := writer.latest():
                disk.note("saved", loaded.step)
        saved(disk, root, first)
    return disk


def saved(disk, root, step):
    with checkpoints(root / "runs" / "a") as writer:
        disk.note("begun", step)
        writer.save(step, tree(step))
        disk.note("saved", step)


@pytest.mark.parametrize("first", [pytest.param(1, marks=pytest.mark.exhaustive), 2], ids=["first_save", "second_save"])
def test_a_save_is_on_the_disk_after_a_power_loss_also_where_another_process_was_killed_before(first, ram_path):
    with tally(f"power loss after a kill, save {first}") as tries:
        moments = check_kills(ram_path, first, attempt=tries.attempt)
        tries.note = f"{moments} moments of the kill"
        assert moments > 20


def check_kills(directory, first, attempt=uncounted, **options):
    """Check the possible disks after a kill at each moment of a save; return the number of moments."""
    for at in itertools.count(step=times(1, 5)):
        root, scratch = directory / f"disk{at}", directory / f"scratch{at}"
        root.mkdir()
        scratch.mkdir()
        disk = killed(root, at, first, **options)
        if disk is None:
            return at
        check_acknowledged(disk.log, scratch, first, attempt)
    return None


def check_acknowledged(log, scratch, step, attempt):
    """Check each possible disk once, right after the other process has loaded or saved a step."""
    seen = set()
    for at in [at for at, line in enumerate(log, 1) if line == ("event", "saved", step)]:
        acknowledged = known(log[:at])
        for state in Disk(log[:at]).states(MAX_STATES, seed=at):
            if (key := (frozen(state), acknowledged)) not in seen:
                seen.add(key)
                laid_out(state, scratch / str(len(seen)))
                with attempt((at, acknowledged)):
                    check_run(scratch / str(len(seen)), *acknowledged)
