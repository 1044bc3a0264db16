"""The disk refuses, is full, takes but a part, or a file may not grow: a named error, and nothing that was is lost.

Each call of a checkpoint to the system is made to fail once; and a small file system and a limit on the size of files
are filled for real, byte by byte.
"""

import ast
import ctypes
import errno
import os
import re
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from ftrain.checkpoint import files, load, save
from ftrain.checkpoint.journal import Journal
from ftrain.errors import CheckpointError
from tests.exhaustive import choose
from tests.faults.disk import ANSWERING, CALLS, ERRORS, Calls, Failing, descriptors, through
from tests.faults.figures import FULL, tally, times
from tests.faults.forks import forked, quiet_forks
from tests.faults.saves import checkpoints, fast, newest, require_goes_on, save_with_history, temporary, tree

__all__ = ["fast"]

KEEP = 2
MODES = {"sync": False, "async": True}
WHEN = "before", "after"
modes = pytest.mark.parametrize("mode", MODES)


def test_all_calls_to_the_system_are_between():
    """A call that is not known here would never fail in a test."""
    package = {path: ast.parse(path.read_text(encoding="utf-8")) for path in Path(files.__file__).parent.glob("*.py")}
    own = package.pop(Path(files.__file__))
    named = {ast.unparse(node) for node in ast.walk(own) if isinstance(node, ast.Attribute)}
    named = {name for name in named if re.fullmatch(r"os\.(path\.)?[a-z_]+", name)}
    assert named == {f"os.{name}" for name in CALLS | ANSWERING}
    for path, parsed in package.items():
        if path.stem in COMMAND:
            continue
        called = [node.func for node in ast.walk(parsed) if isinstance(node, ast.Call)]
        direct = {ast.unparse(function) for function in called} & {"open", "io.open", "os.open"}
        of = [function for function in called if isinstance(function, ast.Attribute)]
        direct |= {function.attr for function in of if ast.unparse(function.value) != "files"} & OF_PATHS
        assert not direct, path


COMMAND = {"__main__"}
OF_PATHS = {
    "open",
    "mkdir",
    "rmdir",
    "unlink",
    "touch",
    "iterdir",
    "glob",
    "rglob",
    "stat",
    "lstat",
    "exists",
    "is_dir",
}
OF_PATHS |= {"is_file", "resolve", "read_text", "read_bytes", "write_text", "write_bytes", "symlink_to", "rmtree"}


class Refused:
    """What became of a run that saves on a disk that fails: the errors, and the last step that was acknowledged."""

    def __init__(self):
        self.errors, self.saved = [], 0

    def tried(self, act):
        try:
            act()
        except CheckpointError as error:
            self.errors.append(error)
            return False
        return True


def run(directory, proxy, mode, told):
    """Open the directory of a run, save steps 3 and 4 and pin the last, all on a disk that fails."""

    def act():
        with checkpoints(directory, keep=KEEP, async_=MODES[mode]) as writing:
            journal = Journal(directory)
            for step in (3, 4):
                if told.tried(lambda step=step: save_with_history(writing, journal, step)):
                    told.saved = step
                elif "could not be written" in str(told.errors[-1]) and not proxy.lasting:
                    assert step not in writing.steps()
            told.tried(lambda: writing.pin(told.saved) if told.saved else None)

    with through(proxy):
        # Once more, if it could not even be opened.
        told.tried(act) or told.saved or told.tried(act)


def prepared(directory):
    """The directory of a run that has saved steps 1 and 2."""
    with checkpoints(directory, keep=KEEP) as writing:
        for step in (1, 2):
            writing.save(step, tree(step))
    return directory


def calls(directory, mode):
    """The calls that a run makes when nothing fails."""
    proxy = Calls()
    run(prepared(directory), proxy, mode, Refused())
    return proxy.made


def check(directory, told, mode):
    actual = newest(directory)
    assert actual is not None
    assert actual >= max(told.saved, 2)
    # It may be there although nobody could tell for sure that it would stay.
    assert actual == max(told.saved, 2) or told.errors
    require_goes_on(directory, 5, keep=KEEP, async_=MODES[mode])
    assert not files._held


def fails(tries, fast, mode, error, numbers, **how):
    """Let calls fail, each in a run of its own; return how many did, and in how many runs there was an error."""
    failed = named = 0
    template = prepared(fast / "template")
    for number in numbers:
        with tries.one(number):
            directory = shutil.copytree(template, fast / f"{mode}-{number}")
            before, told = descriptors(), Refused()
            proxy = Failing(number, error, **how)
            run(directory, proxy, mode, told)
            failed, named = failed + bool(proxy.failed), named + bool(told.errors)
            assert descriptors() == before
            if not how.get("lasting"):
                # An older one that could not be removed is, by the next save.
                assert not temporary(directory) or "cannot be removed" in str(told.errors)
            check(directory, told, mode)
    tries.note = f"a call failed in {failed} of them, {named} times with a CheckpointError"
    return failed, named


FEW = 64


def chosen(made, *which):
    """All calls; or of every `FEW` one, another one in each test."""
    if FULL:
        return range(len(made))
    offset = 0
    for one, among in which:
        offset = offset * len(among) + list(among).index(one)
    return range(offset % FEW, len(made), FEW)


@modes
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("error", choose(list(ERRORS), ["EIO", "EINTR"]))
def test_a_call_fails(mode, when, error, fast):
    made = calls(fast / "all", mode)
    numbers = chosen(made, (mode, MODES), (when, WHEN), (error, ERRORS))
    with tally(f"{error} {when} a call, {mode}") as tries:
        failed, named = fails(tries, fast, mode, ERRORS[error], numbers, after=when == "after")
        assert failed > 0.9 * len(numbers)
        assert named > 0.5 * failed


@modes
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_calls_fail_from_one_on_until_the_process_ends(mode, error, fast):
    made = calls(fast / "all", mode)
    numbers = chosen(made, (mode, MODES), (error, ERRORS))
    with tally(f"{error} from a call on, {mode}") as tries:
        failed, named = fails(tries, fast, mode, ERRORS[error], numbers, lasting=True)
        assert named > 0.5 * failed


@modes
def test_a_write_takes_but_a_part(mode, fast):
    made = calls(fast / "all", mode)
    writes = [number for number, name in enumerate(made) if name == "write"][:: times(1, 9)]
    with tally(f"short write, {mode}") as tries:
        assert fails(tries, fast, mode, "short", writes) == (len(writes), 0)


def test_a_write_takes_nothing(fast):
    class Nothing(Failing):
        def call(self, number, name, function, args):
            return 0 if number == self.at else function(*args)

    made = calls(fast / "all", "sync")
    number = [number for number, name in enumerate(made) if name == "write"][1]
    told = Refused()
    run(prepared(fast / "run"), Nothing(number, None), "sync", told)
    assert "nothing was written" in str(told.errors[0])
    check(fast / "run", told, "sync")


# For real


def mounted(directory, options):
    """Mount a small file system in memory, which this process alone sees; False where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mounts = 0x10000000, 0x00020000
    if libc.unshare(new_mounts) and libc.unshare(new_user | new_mounts):
        return False
    private = 1 << 18 | 1 << 14
    libc.mount(b"none", b"/", None, private, None)
    return not libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, options.encode())


class Roomy(Calls):
    """Says that there is room, so that the disk itself has to say that there is none."""

    def call(self, number, name, function, args):
        if name == "statvfs":
            return os.statvfs_result((4096, 4096, 2**40, 2**40, 2**40, 2**40, 2**40, 2**40, 0, 255))
        return function(*args)


def tried(directory, limited):
    """Run in a directory of its own while something real limits it; whether there was an error, and what is wrong."""
    try:
        prepared(directory)
        told = Refused()
        with limited():
            run(directory, Roomy(), "sync", told)
        assert not temporary(directory) or "cannot be removed" in str(told.errors)
        check(directory, told, "sync")
        files.remove(directory)
    except Exception as error:
        return [True, f"{type(error).__name__}: {error}"]
    return [bool(told.errors), ""]


def judged(tries, actual):
    """Count what `tried` has returned of each; return where there was an error."""
    for number, (_, wrong) in enumerate(actual):
        with tries.one(number):
            assert not wrong, wrong
    errors = [error for error, _ in actual]
    tries.note = f"{sum(errors)} with a CheckpointError"
    # Of the least there is, and of enough.
    assert errors[0]
    assert not errors[-1]
    return errors


PAGE = 4096
PAGES, NODES = 256, 400


@contextmanager
def little_room(root, pages):
    """Context in which a file system has so many pages left."""
    ballast = root / "ballast"
    space = os.statvfs(root)
    ballast.write_bytes(bytes(PAGE * (space.f_bavail * space.f_frsize // PAGE - pages)))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def few_nodes(root, count):
    """Context in which a file system takes so many files and directories more."""
    ballast = root / "ballast"
    ballast.mkdir()
    for number in range(os.statvfs(root).f_favail - count):
        (ballast / str(number)).touch()
    try:
        yield
    finally:
        files.remove(ballast)


FULL_OF = {"bytes": little_room, "files": few_nodes}


def on_a_small_disk(tell, root, what):
    if not mounted(root, f"size={PAGES * PAGE},nr_inodes={NODES}"):
        tell(None)
        return
    made = [tried(root / str(left), lambda left=left: FULL_OF[what](root, left)) for left in range(0, 16, times(1, 5))]
    tell(made)


@quiet_forks
@pytest.mark.parametrize("what", FULL_OF)
def test_a_file_system_is_full_where_mounting_is_permitted(what, tmp_path):
    actual = forked(on_a_small_disk, tmp_path, what)
    if actual is not None:
        with tally(f"tmpfs full of {what}") as tries:
            judged(tries, actual)


@contextmanager
def small_files(most):
    """Context in which no file may be longer, of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


LONGEST = 12_000


def with_small_files(tell, root):
    tell([tried(root / str(most), lambda most=most: small_files(most)) for most in range(0, LONGEST, times(8, 2000))])


@quiet_forks
def test_files_may_not_grow(fast):
    with tally("a limit on the size of files") as tries:
        errors = judged(tries, forked(with_small_files, fast))
        assert sum(errors) > len(errors) // 3


def test_a_file_system_that_cannot_sync_directories(tmp_path, monkeypatch):
    """As some that machines share answer. An error of the disk itself stays one."""
    real = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    for number in sorted(files.UNSYNCABLE):
        save(tmp_path / str(number), tree(0))
    number = errno.EIO
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path / "broken", tree(0))


@pytest.mark.parametrize("has_it", [True, False])
def test_what_is_synced_is_on_the_disk_of_a_mac(has_it, tmp_path, monkeypatch):
    asked, synced, real = [], [], os.fsync

    def fcntl(descriptor, request):
        asked.append(request)
        if not has_it:
            raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(files, "FULL_SYNC", 51)
    monkeypatch.setattr(files.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: synced.append(descriptor) or real(descriptor))
    save(tmp_path / "state", tree(0))
    assert set(asked) == {51}
    assert len(synced) == (0 if has_it else len(asked))


def test_a_system_without_the_calls_is_named(tmp_path, monkeypatch):
    save(tmp_path / "state", tree(0))
    monkeypatch.setattr(files, "SYSTEM_HAS_CALLS", False)
    for use in (
        lambda: save(tmp_path / "other", tree(0)),
        lambda: load(tmp_path / "state"),
        lambda: checkpoints(tmp_path / "run").__enter__(),
    ):
        with pytest.raises(CheckpointError, match="need file calls of Linux or macOS; on Windows use WSL 2"):
            use()
