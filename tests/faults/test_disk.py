"""A disk that fails, is full, writes only a part of the data, or limits the size of files.

The error has a name and a remedy, and earlier checkpoints stay. Each call of a checkpoint to the system is made to fail
once. A small file system, and files with a limit on their size, are also filled for real.
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
from tests.faults.disk import ANSWERING, CALLS, ERRORS, Calls, Failing, open_files, through
from tests.faults.figures import FULL, tally, times
from tests.faults.forks import forked, quiet_forks
from tests.faults.saves import checkpoints, newest, require_goes_on, save_with_history, temporary, tree

KEEP = 2
MODES = {"sync": False, "async": True}
WHEN = "before", "after"
modes = pytest.mark.parametrize("mode", MODES)


def test_all_calls_to_the_system_are_in_files():
    """The tests here let only these calls fail."""
    package = {path: ast.parse(path.read_text(encoding="utf-8")) for path in Path(files.__file__).parent.glob("*.py")}
    source_of_files = package.pop(Path(files.__file__))
    names = {ast.unparse(node) for node in ast.walk(source_of_files) if isinstance(node, ast.Attribute)}
    names = {name for name in names if re.fullmatch(r"os\.(path\.)?[a-z_]+", name)}
    assert names == {f"os.{name}" for name in CALLS | ANSWERING}
    for path, source in package.items():
        # The command reads checkpoints, and saves none.
        if path.stem != "__main__":
            assert not calls_to_the_system(source), path


METHODS_OF_PATHS = {
    *("open", "mkdir", "rmdir", "unlink", "touch", "iterdir", "glob", "rglob", "stat", "lstat", "exists", "is_dir"),
    *("is_file", "resolve", "read_text", "read_bytes", "write_text", "write_bytes", "symlink_to", "rmtree"),
}


def calls_to_the_system(source):
    """Return the names of the functions called in a parsed file that open, read or change files, except of `files`."""
    functions = [node.func for node in ast.walk(source) if isinstance(node, ast.Call)]
    methods = [function for function in functions if isinstance(function, ast.Attribute)]
    names = {method.attr for method in methods if ast.unparse(method.value) != "files"} & METHODS_OF_PATHS
    return names | ({ast.unparse(function) for function in functions} & {"open", "io.open", "os.open"})


class Outcome:
    """The outcome of a run on a disk that fails: its errors, and the last step whose save returned."""

    def __init__(self):
        self.errors, self.saved = [], 0

    def attempt(self, act):
        """Call a function, and record a CheckpointError; return whether there was none."""
        try:
            act()
        except CheckpointError as error:
            self.errors.append(error)
            return False
        return True


def run(directory, proxy, mode, outcome):
    """Open the directory of a run, save steps 3 and 4 and pin the last, all on a disk that fails."""

    def save_and_pin():
        with checkpoints(directory, keep=KEEP, async_=MODES[mode]) as writer:
            journal = Journal(directory)
            for step in (3, 4):
                if outcome.attempt(lambda step=step: save_with_history(writer, journal, step)):
                    outcome.saved = step
                elif "could not be written" in str(outcome.errors[-1]) and not proxy.lasting:
                    assert step not in writer.steps()
            if outcome.saved:
                outcome.attempt(lambda: writer.pin(outcome.saved))

    with through(proxy):
        if not outcome.attempt(save_and_pin) and not outcome.saved:
            # The directory could not be opened.
            outcome.attempt(save_and_pin)


def prepared(directory):
    """Return a directory after saving steps 1 and 2."""
    with checkpoints(directory, keep=KEEP) as writer:
        for step in (1, 2):
            writer.save(step, tree(step))
    return directory


def calls(directory, mode):
    """Return the names of the calls that a run makes when nothing fails."""
    proxy = Calls()
    run(prepared(directory), proxy, mode, Outcome())
    return proxy.names


def check(directory, outcome, mode):
    """Assert that the newest checkpoint is the last one that was saved, and that the run can go on."""
    newest_step, last_saved = newest(directory), max(outcome.saved, 2)
    assert newest_step is not None
    assert newest_step >= last_saved
    # A newer one may be there although its save failed: only the sync of its name failed.
    assert newest_step == last_saved or outcome.errors
    require_goes_on(directory, 5, keep=KEEP, async_=MODES[mode])
    assert not files._held


def let_calls_fail(tries, ram_path, mode, error, numbers, **options):
    """Let calls fail, each in a run of its own; return how many did, and in how many runs there was an error."""
    num_failed = num_errors = 0
    template = prepared(ram_path / "template")
    for number in numbers:
        with tries.attempt(number):
            directory = shutil.copytree(template, ram_path / f"{mode}-{number}")
            outcome = Outcome()
            proxy = Failing(number, error, **options)
            run(directory, proxy, mode, outcome)
            num_failed, num_errors = num_failed + bool(proxy.failed), num_errors + bool(outcome.errors)
            assert open_files(ram_path) == []
            if not options.get("lasting"):
                # The next save removes an older checkpoint that could not be removed.
                assert not temporary(directory) or "cannot be removed" in str(outcome.errors)
            check(directory, outcome, mode)
    tries.note = f"a call failed in {num_failed} of them, {num_errors} times with a CheckpointError"
    return num_failed, num_errors


STRIDE = 64
"""In a quick run, one of so many calls is let fail."""


def numbers_to_fail(calls_made, *choices):
    """Return the numbers of the calls to fail: all, or every `STRIDE`-th, with another start in each test.

    `choices` are the parameters of the test, each as (value, all values).
    """
    if FULL:
        return range(len(calls_made))
    offset = 0
    for value, values in choices:
        offset = offset * len(values) + list(values).index(value)
    return range(offset % STRIDE, len(calls_made), STRIDE)


@modes
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("error", choose(list(ERRORS), ["EIO", "EINTR"]))
def test_after_a_call_that_fails_the_last_saved_checkpoint_is_whole_and_the_run_goes_on(mode, when, error, ram_path):
    calls_made = calls(ram_path / "all", mode)
    numbers = numbers_to_fail(calls_made, (mode, MODES), (when, WHEN), (error, ERRORS))
    with tally(f"{error} {when} a call, {mode}") as tries:
        failed, named = let_calls_fail(tries, ram_path, mode, ERRORS[error], numbers, after=when == "after")
        assert failed > 0.9 * len(numbers)
        assert named > 0.5 * failed


@pytest.mark.parametrize("when", WHEN)
def test_a_temporary_directory_that_cannot_be_made_or_locked_is_removed(when, ram_path):
    calls_made = calls(ram_path / "all", "sync")
    directories = [number for number, name in enumerate(calls_made) if name == "mkdir"]
    # The first directory of the second save is the temporary one: it is made, opened and looked up.
    first = directories[len(directories) // 2]
    with tally(f"EIO {when} a call for a temporary directory") as tries:
        failed, named = let_calls_fail(
            tries, ram_path, "sync", errno.EIO, range(first, first + 3), after=when == "after"
        )
        assert failed == named == 3


@modes
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_after_calls_that_fail_until_the_process_ends_the_last_saved_checkpoint_is_whole(mode, error, ram_path):
    calls_made = calls(ram_path / "all", mode)
    numbers = numbers_to_fail(calls_made, (mode, MODES), (error, ERRORS))
    with tally(f"{error} from a call on, {mode}") as tries:
        failed, named = let_calls_fail(tries, ram_path, mode, ERRORS[error], numbers, lasting=True)
        assert named > 0.5 * failed


@modes
def test_a_write_that_takes_only_a_part_is_continued(mode, ram_path):
    calls_made = calls(ram_path / "all", mode)
    writes = [number for number, name in enumerate(calls_made) if name == "write"][:: times(1, 9)]
    with tally(f"short write, {mode}") as tries:
        assert let_calls_fail(tries, ram_path, mode, "short", writes) == (len(writes), 0)


def test_a_write_that_takes_nothing_is_an_error(ram_path):
    class Nothing(Failing):
        def call(self, number, name, function, args):
            return 0 if number == self.at else function(*args)

    calls_made = calls(ram_path / "all", "sync")
    number = [number for number, name in enumerate(calls_made) if name == "write"][1]
    outcome = Outcome()
    run(prepared(ram_path / "run"), Nothing(number, None), "sync", outcome)
    assert "nothing was written" in str(outcome.errors[0])
    check(ram_path / "run", outcome, "sync")


# For real


def mounted(directory, options):
    """Mount a small file system in memory, which only this process sees; return False where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_mounts = 0x10000000, 0x00020000
    if libc.unshare(new_mounts) and libc.unshare(new_user | new_mounts):
        return False
    private = 1 << 18 | 1 << 14
    libc.mount(b"none", b"/", None, private, None)
    return not libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, options.encode())


class Roomy(Calls):
    """Reports much free space, so that the check before a save passes and a write fails."""

    def call(self, number, name, function, args):
        if name == "statvfs":
            return os.statvfs_result((4096, 4096, 2**40, 2**40, 2**40, 2**40, 2**40, 2**40, 0, 255))
        return function(*args)


def run_limited(directory, limited):
    """Run while a real limit applies; return whether there was a CheckpointError, and a text of what is wrong."""
    try:
        prepared(directory)
        outcome = Outcome()
        with limited():
            run(directory, Roomy(), "sync", outcome)
        assert not temporary(directory) or "cannot be removed" in str(outcome.errors)
        check(directory, outcome, "sync")
        files.remove(directory)
    except Exception as error:
        return [True, f"{type(error).__name__}: {error}"]
    return [bool(outcome.errors), ""]


def record_results(tries, results):
    """Record the results of `run_limited`, and return for each whether there was an error."""
    for number, (_, problem) in enumerate(results):
        with tries.attempt(number):
            assert not problem, problem
    errors = [error for error, _ in results]
    tries.note = f"{sum(errors)} with a CheckpointError"
    # The smallest limit is too little, and the largest is enough.
    assert errors[0]
    assert not errors[-1]
    return errors


PAGE = 4096
PAGES, NODES = 256, 400


@contextmanager
def little_room(root, pages):
    """Context in which a file system has only `pages` free pages."""
    ballast = root / "ballast"
    space = os.statvfs(root)
    ballast.write_bytes(bytes(PAGE * (space.f_bavail * space.f_frsize // PAGE - pages)))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def few_nodes(root, count):
    """Context in which a file system has room for only `count` more files and directories."""
    ballast = root / "ballast"
    ballast.mkdir()
    for number in range(os.statvfs(root).f_favail - count):
        (ballast / str(number)).touch()
    try:
        yield
    finally:
        files.remove(ballast)


LIMITS = {"bytes": little_room, "files": few_nodes}


def on_a_small_disk(send, root, full_of):
    if not mounted(root, f"size={PAGES * PAGE},nr_inodes={NODES}"):
        send(None)
        return
    limit = LIMITS[full_of]
    results = [run_limited(root / str(left), lambda left=left: limit(root, left)) for left in range(0, 16, times(1, 5))]
    send(results)


@quiet_forks
@pytest.mark.parametrize("full_of", LIMITS)
def test_a_full_file_system_leaves_the_last_saved_checkpoint_whole_where_mounting_is_permitted(full_of, tmp_path):
    results = forked(on_a_small_disk, tmp_path, full_of)
    if results is not None:
        with tally(f"tmpfs full of {full_of}") as tries:
            record_results(tries, results)


@contextmanager
def small_files(max_bytes):
    """Context in which no file of this process may have more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


LONGEST = 12_000


def with_small_files(send, root):
    send(
        [
            run_limited(root / str(max_bytes), lambda max_bytes=max_bytes: small_files(max_bytes))
            for max_bytes in range(0, LONGEST, times(8, 2000))
        ]
    )


@quiet_forks
def test_a_limit_on_the_size_of_files_leaves_the_last_saved_checkpoint_whole(ram_path):
    with tally("a limit on the size of files") as tries:
        errors = record_results(tries, forked(with_small_files, ram_path))
        assert sum(errors) > len(errors) // 3


def test_a_file_system_that_cannot_sync_directories_is_written_to(tmp_path, monkeypatch):
    """As some network file systems. Another error of a sync is still raised."""
    fsync_of_os = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        fsync_of_os(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    for number in sorted(files.UNSYNCABLE):
        save(tmp_path / str(number), tree(0))
    number = errno.EIO
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path / "broken", tree(0))


@pytest.mark.parametrize("has_full_sync", [True, False])
def test_on_macos_files_are_synced_with_full_sync_where_the_file_system_has_it(has_full_sync, tmp_path, monkeypatch):
    requests, synced, fsync_of_os = [], [], os.fsync

    def fcntl(descriptor, request):
        requests.append(request)
        if not has_full_sync:
            raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(files, "FULL_SYNC", 51)
    monkeypatch.setattr(files.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: synced.append(descriptor) or fsync_of_os(descriptor))
    save(tmp_path / "state", tree(0))
    assert set(requests) == {51}
    assert len(synced) == (0 if has_full_sync else len(requests))


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
