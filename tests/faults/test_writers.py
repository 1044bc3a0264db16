"""Several processes that want to write to a directory: one does, and the others get an error at once that names it."""

import errno
import importlib.util
import os
import shutil
import signal
import socket
import sys
import time

import pytest

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import files, saving
from ftrain.errors import CheckpointError
from tests.faults.figures import tally, times
from tests.faults.forks import FOREVER, Child, forked, quiet_forks
from tests.faults.specimens import have_same_bits, state

pytestmark = quiet_forks


def close_both_ends(pipe):
    for end in pipe:
        os.close(end)


def write(send, directory, start, stop):
    """Try to become the writer when the pipe `start` is closed, and stay the writer until `stop` is closed."""
    os.close(start[1])
    os.close(stop[1])
    os.read(start[0], 1)
    start_time = time.monotonic()
    try:
        with ft.Checkpoints(directory, every=1) as checkpoints:
            send(["writes", "", time.monotonic() - start_time])
            checkpoints.save(1, {"state": state()})
            os.read(stop[0], 1)
    except CheckpointError as error:
        send(["refused", str(error), time.monotonic() - start_time])


def race(directory, count):
    """Start `count` writers at once; return the message of each by process, and their exit codes."""
    start, stop = os.pipe(), os.pipe()
    children = [Child(write, directory, start, stop) for _ in range(count)]
    close_both_ends(start)
    messages = {child.pid: child.receive() for child in children}
    close_both_ends(stop)
    codes = [child.wait() for child in children]
    return messages, codes


def test_of_several_writers_one_wins_and_the_others_say_who(tmp_path):
    slowest = 0.0
    with tally("writers") as tries:
        for number in range(times(100, 8)):
            directory = tmp_path / str(number % 10)
            # A lock file with the text of a killed writer, which must not be taken for that of the winner.
            if number % 10 != number:
                shutil.rmtree(directory)
                directory.mkdir()
                (directory / ".lock").write_text('{"host": "nowhere", "process": 1}')
            messages, codes = race(directory, 2 + number % 3)
            winners = [pid for pid, (event, _, _) in messages.items() if event == "writes"]
            # The winner holds the lock until all have sent a message, so a writer that waited for it would hang.
            slowest = max(slowest, *(seconds for _, _, seconds in messages.values()))
            refusals = [text for event, text, _ in messages.values() if event == "refused"]
            with tries.attempt((number, messages)):
                assert codes == [0] * len(messages)
                (winner,) = winners
                for piece in (f'"process": {winner}', socket.gethostname(), str(directory)):
                    assert all(piece in text for text in refusals), piece
                assert have_same_bits(ft.Checkpoints(directory, every=1).latest().parts["state"], state())
        tries.note = f"the slowest knew after {slowest:.3f} s"


def test_a_second_writer_of_one_process_is_refused_until_the_first_has_left(tmp_path):
    with ft.Checkpoints(tmp_path, every=1), pytest.raises(CheckpointError, match=f'"process": {os.getpid()}'):
        ft.Checkpoints(tmp_path, every=1).__enter__()
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": state()})


def test_a_link_to_the_directory_is_the_same_directory(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with ft.Checkpoints(tmp_path / "run", every=1), pytest.raises(CheckpointError, match="is being written to by"):
        ft.Checkpoints(tmp_path / "link", every=1).__enter__()


@pytest.mark.parametrize("held", [True, False], ids=["held by the parent", "given back by it"])
def test_a_forked_child_does_not_own_the_lock_of_its_parent(tmp_path, held):
    """Although it inherits the memory and the descriptors of the parent."""
    start, stop = os.pipe(), os.pipe()
    checkpoints = ft.Checkpoints(tmp_path, every=1)
    checkpoints.__enter__()
    child = Child(write, tmp_path, start, stop)
    if not held:
        checkpoints.__exit__(None, None, None)
    close_both_ends(start)
    event, text, _ = child.receive()
    close_both_ends(stop)
    assert child.wait() == 0
    if held:
        assert event == "refused"
        assert f'"process": {os.getpid()}' in text
        # The child has not released the lock of the parent.
        with pytest.raises(CheckpointError, match="is being written to by"):
            ft.Checkpoints(tmp_path, every=1).__enter__()
        checkpoints.save(2, {"state": state()})
        checkpoints.__exit__(None, None, None)
        assert checkpoints.steps() == [2]
    else:
        assert event == "writes"
        assert checkpoints.steps() == [1]


def write_late(send, directory):
    """Become the writer, and write the process into the lock file a little later."""
    write_of_files = files.write

    def late_write(descriptor, data):
        send("locked")
        time.sleep(0.05)
        write_of_files(descriptor, data)

    files.write = late_write
    with ft.Checkpoints(directory, every=1):
        send("writes")
        time.sleep(FOREVER)


def test_a_writer_that_has_not_yet_written_its_process_into_the_lock_is_named(tmp_path):
    child = Child(write_late, tmp_path)
    assert child.receive() == "locked"
    with pytest.raises(CheckpointError, match=f'"process": {child.pid}'):
        ft.Checkpoints(tmp_path, every=1).__enter__()
    assert child.receive() == "writes"
    child.signal(signal.SIGKILL)
    child.wait()


def leave(send, checkpoints):
    checkpoints.__exit__(None, None, None)
    send("left")


def test_a_child_that_leaves_the_context_of_its_parent_does_not_release_the_lock(tmp_path):
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        forked(leave, checkpoints)
        messages, codes = race(tmp_path, 1)
        ((event, text, _),) = messages.values()
        assert (event, codes) == ("refused", [0])
        assert f'"process": {os.getpid()}' in text


def test_the_lock_of_a_killed_writer_is_released(tmp_path):
    start, stop = os.pipe(), os.pipe()
    child = Child(write, tmp_path, start, stop)
    close_both_ends(start)
    assert child.receive()[0] == "writes"
    with pytest.raises(CheckpointError, match=f'"process": {child.pid}'):
        ft.Checkpoints(tmp_path, every=1).__enter__()
    child.signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    close_both_ends(stop)
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(3, {"state": state()})
    assert checkpoints.steps()[-1] == 3


def test_reading_needs_no_lock(tmp_path):
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": state()}, wait=True)
        assert ft.Checkpoints(tmp_path, every=1).latest().step == 1


# Other uses of the lock file


def write_and_copy(send, directory, copy):
    """Become the writer, and use the directory as a logger may."""
    with ft.Checkpoints(directory, every=1) as checkpoints:
        checkpoints.save(1, {"state": state()}, wait=True)
        copy(directory)
        send("copied")
        time.sleep(FOREVER)


def refuse_a_second_writer(directory):
    with pytest.raises(CheckpointError):
        ft.Checkpoints(directory, every=1).__enter__()


def do_nothing(send):
    send("done")


COPIES = {
    "copied": lambda directory: shutil.copytree(directory, directory.with_name("copy")),
    "read": lambda directory: (directory / ".lock").read_bytes(),
    "asked for again": refuse_a_second_writer,
    "left by a child": lambda directory: forked(do_nothing),
}


@pytest.mark.parametrize("action", COPIES)
def test_a_writer_that_opens_and_closes_its_own_lock_keeps_it(action, tmp_path):
    child = Child(write_and_copy, tmp_path / "run", COPIES[action])
    assert child.receive() == "copied"
    with pytest.raises(CheckpointError, match=f'"process": {child.pid}'):
        ft.Checkpoints(tmp_path / "run", every=1).__enter__()
    child.signal(signal.SIGKILL)
    child.wait()
    with ft.Checkpoints(tmp_path / "run", every=1) as checkpoints:
        checkpoints.save(2, {"state": state()})


def test_a_child_that_outlives_a_killed_writer_does_not_keep_its_lock(tmp_path):
    """As workers of a data loader do, for some seconds."""
    start, stop = os.pipe()

    def linger(send):
        checkpoints = ft.Checkpoints(tmp_path, every=1)
        checkpoints.__enter__()
        if not os.fork():
            os.close(stop)
            os.read(start, 1)
            os._exit(0)
        send("forked")
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(linger)
    assert child.receive() == "forked"
    assert child.wait() == -signal.SIGKILL
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": state()})
    os.close(stop)
    os.close(start)


def save_in_child(send, checkpoints):
    try:
        checkpoints.save(2, {"state": state()})
    except CheckpointError as error:
        send(str(error))


def test_a_child_cannot_save_with_the_lock_of_its_parent(tmp_path):
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        message = forked(save_in_child, checkpoints)
        assert f"open for writing in process {os.getpid()}" in message
        checkpoints.save(1, {"state": state()})
    assert checkpoints.steps() == [1]


def removed(directory):
    (directory / ".lock").unlink()


def replaced(directory):
    removed(directory)
    (directory / ".lock").touch()


def renamed(directory):
    directory.rename(directory.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("lose", "expected"),
    [
        (removed, "its .lock was removed or replaced"),
        (replaced, "its .lock was removed or replaced"),
        (renamed, "it was renamed or removed"),
        (shutil.rmtree, "it was renamed or removed"),
    ],
    ids=["lock removed", "lock replaced", "directory renamed", "directory removed"],
)
def test_a_writer_that_has_lost_its_lock_is_told_before_it_saves(lose, expected, tmp_path):
    directory = tmp_path / "run"
    with ft.Checkpoints(directory, every=1) as checkpoints:
        checkpoints.save(1, {"state": state()}, wait=True)
        lose(directory)
        with pytest.raises(CheckpointError, match=expected):
            checkpoints.save(2, {"state": state()})
    # The failed save has not made the directory again.
    assert lose in (removed, replaced) or not directory.exists()


def test_a_lock_that_is_removed_while_it_is_taken_is_taken_again(tmp_path, monkeypatch):
    """Otherwise two writers would each hold the lock of another file."""
    flock_of_files, locked_descriptors = files._flock, []

    def flock(descriptor):
        locked_descriptors.append(descriptor)
        if len(locked_descriptors) == 1:
            (tmp_path / ".lock").unlink()
        return flock_of_files(descriptor)

    monkeypatch.setattr(files, "_flock", flock)
    with ft.Checkpoints(tmp_path, every=1):
        assert len(locked_descriptors) == 2
        with pytest.raises(CheckpointError, match="is being written to by"):
            ft.Checkpoints(tmp_path, every=1).__enter__()


def test_a_temporary_directory_that_another_save_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    make, paths = files.make_directory, []

    def make_directory(path):
        make(path)
        paths.append(path)
        if len(paths) == 1:
            saving.remove_abandoned(tmp_path)

    monkeypatch.setattr(files, "make_directory", make_directory)
    checkpoint.save(tmp_path / "a", {"state": state()})
    assert not paths[0].exists()
    assert checkpoint.load(tmp_path / "a")


def test_a_leftover_is_locked_until_it_is_removed(tmp_path, monkeypatch):
    leftover = tmp_path / f".a.{'0' * 32}.tmp"
    leftover.mkdir()
    remove = files.remove

    def remove_locked(path):
        with pytest.raises(BlockingIOError):
            files.hold(path)
        remove(path)

    monkeypatch.setattr(files, "remove", remove_locked)
    saving.remove_abandoned(tmp_path)
    assert not leftover.exists()


def test_a_leftover_that_cannot_be_removed_hinders_no_save(tmp_path, monkeypatch):
    """Such as that of another user in a shared directory."""
    leftover = tmp_path / f".a.{'0' * 32}.tmp"
    leftover.mkdir()

    def rmdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "rmdir", rmdir)
    checkpoint.save(tmp_path / "a", {"state": state()})
    assert checkpoint.load(tmp_path / "a")
    assert leftover.exists()


@pytest.mark.parametrize("number", sorted(files.UNSUPPORTED))
def test_a_file_system_without_locks_is_written_to_with_a_warning(number, tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.fcntl, "flock", flock)
    leftover = tmp_path / f".step-000000000009.{'0' * 32}.tmp"
    leftover.mkdir()
    with (
        pytest.warns(UserWarning, match="has no locks, so nothing keeps another process"),
        ft.Checkpoints(tmp_path, every=1) as checkpoints,
    ):
        checkpoints.save(1, {"state": state()})
    assert checkpoints.steps() == [1]
    # Another process may be writing it.
    assert leftover.exists()


def test_the_module_needs_no_locks_of_the_system(monkeypatch):
    """On Windows, which has no fcntl and no fork, it can be imported."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "register_at_fork")
    spec = importlib.util.spec_from_file_location("files_elsewhere", files.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.fcntl is None
