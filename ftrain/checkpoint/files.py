"""Every call that a checkpoint makes to the file system, all of them through `os`: a test stands between here."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

SYSTEM_HAS_LOCKS = fcntl is not None

NOT_THROUGH_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# A FIFO would otherwise wait for somebody to write to it.
AT_ONCE = getattr(os, "O_NONBLOCK", 0)

LOOKS, BETWEEN = 20, 0.01
"""How often to look who holds a lock, and after how many seconds again."""

UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
"""What a file system says that has no locks."""

_held: set[int] = set()
"""Descriptors by which this process holds locks."""


class Lock(NamedTuple):
    """A lock that was taken.

    Args:
        path: of its file.
        descriptor: by which it is held.
        process: which holds it.
        excludes: whether others are kept out; not where the system or the file system has no locks.
    """

    path: Path
    descriptor: int
    process: int
    excludes: bool


def _close_in_child() -> None:
    """Close what a forked process has of the locks of its parent, and would keep when the parent has ended.

    Closing takes nothing from the parent, as `fcntl.flock(LOCK_UN)` would.
    """
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _flock(descriptor: int) -> bool:
    """Lock an open file or directory; False where there are no locks.

    Not `fcntl.lockf`: such a lock ends as soon as anything in the process closes the same file.

    Raises:
        BlockingIOError: when another has it.
    """
    if not SYSTEM_HAS_LOCKS:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    _held.add(descriptor)
    return True


def make_directory(path: Path) -> None:
    """Make a directory that is not there."""
    os.mkdir(path)


def make_directories(path: Path) -> None:
    """Make a directory and those above it, where they are missing, and bring its name to the disk in any case.

    One that is there may have been made a moment ago, by a process that was killed.
    """
    if not os.path.isdir(path):
        make_directories(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
    # What this process may pass through but not read, it cannot sync, and did not make.
    with suppress(PermissionError):
        sync_directory(path.parent)


@contextmanager
def created(path: Path) -> Iterator[int]:
    """Context of a new file, whose bytes are on the disk when it ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOT_THROUGH_LINKS, 0o644)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, data: bytes, offset: int) -> None:
    """Let a file have `data` behind its first `offset` bytes and nothing else; when this returns, it is on the disk.

    Raises:
        OSError: when it has fewer bytes than that, or is no regular file.
    """
    if exists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NOT_THROUGH_LINKS | AT_ONCE, 0o644)
    try:
        length = size(descriptor)
        if length < offset:
            raise OSError(errno.EIO, f"has {length:,} bytes, and {offset:,} were written: it was cut off or removed")
        if length > offset:
            os.ftruncate(descriptor, offset)
        os.lseek(descriptor, offset, os.SEEK_SET)
        write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if not offset:
        sync_directory(path.parent)


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, in as many calls as it takes.

    Raises:
        OSError: when the system takes no more.
    """
    left = memoryview(data).cast("B")
    while left:
        count = os.write(descriptor, left)
        if not count:
            raise OSError(errno.EIO, "nothing was written")
        left = left[count:]


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename a directory; the new name must be free.

    An empty directory may be replaced, which loses nothing; a checkpoint never is one.
    """
    os.rename(old, new)


def hold(path: Path) -> int:
    """Mark a directory as in use by this process, for as long as that lives; the mark is a descriptor.

    Raises:
        OSError: when it is no directory that can be opened, or another process has marked it.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | NOT_THROUGH_LINKS)
    try:
        _flock(descriptor)
    except BaseException:
        release(descriptor)
        raise
    return descriptor


def release(descriptor: int) -> None:
    """Take the mark of `hold` away."""
    _held.discard(descriptor)
    # Nothing was written through it, so that no error can be of what matters; and it is closed in any case.
    with suppress(OSError):
        os.close(descriptor)


def is_abandoned(path: Path) -> bool:
    """Whether no process holds a directory; where there are no locks, none can be said to be."""
    try:
        descriptor = hold(path)
    except OSError:
        return False
    abandoned = descriptor in _held
    release(descriptor)
    return abandoned


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Context of a file to read; anything but a regular file is refused before it is opened.

    Raises:
        OSError: for a link, a directory or a device.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is no regular file (a link, a directory or a device)", str(path))
    descriptor = os.open(path, os.O_RDONLY | NOT_THROUGH_LINKS | AT_ONCE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def size(descriptor: int) -> int:
    """Return the bytes of an open file."""
    return os.fstat(descriptor).st_size


def read_into(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill `target` with the bytes from `offset` on.

    Raises:
        OSError: when the file ends before.
    """
    while target:
        count = os.preadv(descriptor, [target], offset)
        if not count:
            raise OSError(errno.EIO, "the file ends too early")
        target, offset = target[count:], offset + count


def read(path: Path, most: int) -> bytes:
    """Return what is in a regular file of no more than `most` bytes.

    Raises:
        OSError: when it has more.
    """
    with opened(path) as descriptor:
        length = size(descriptor)
        if length > most:
            raise OSError(errno.EFBIG, f"has {length:,} bytes, more than the {most:,} that are allowed", str(path))
        data = bytearray(length)
        read_into(descriptor, memoryview(data), 0)
        return bytes(data)


def names(path: Path) -> list[str]:
    """Return the names in a directory, sorted."""
    return sorted(os.listdir(path))


def is_directory(path: Path) -> bool:
    """Whether a path is a directory itself, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def exists(path: Path) -> bool:
    """Whether there is anything at a path, a broken link included."""
    return os.path.lexists(path)


def remove(path: Path) -> None:
    """Remove a file, or a directory with all that is in it, however deep; links are removed and not followed."""
    if not is_directory(path):
        os.unlink(path)
        return
    left = [path]
    while left:
        folders = []
        for entry in [left[-1] / name for name in names(left[-1])]:
            if is_directory(entry):
                folders.append(entry)
            else:
                os.unlink(entry)
        if not folders:
            os.rmdir(left.pop())
        left += folders


def free(path: Path) -> int:
    """Return the bytes that may still be written where `path` is."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def touch(path: Path) -> None:
    """Make an empty file, if it is not there, and bring its name to the disk."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | NOT_THROUGH_LINKS, 0o644))
    sync_directory(path.parent)


def lock(path: Path, holder: Mapping[str, object]) -> Lock:
    """Lock a file for this process, and write into it who holds it.

    The lock ends with the process, however that ends; opening and closing the file elsewhere does not end it, and
    forked processes neither keep it nor give it away.

    Raises:
        BlockingIOError: when it is held, by this process too; the message is what the holder has written.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NOT_THROUGH_LINKS, 0o644)
        try:
            held = Lock(path, descriptor, os.getpid(), _flock(descriptor))
            if is_held(held):
                os.ftruncate(descriptor, 0)
                write(descriptor, json.dumps(holder).encode())
                return held
        except (BlockingIOError, PermissionError):
            said = _holder(descriptor)
            release(descriptor)
            raise BlockingIOError(said) from None
        except BaseException:
            release(descriptor)
            raise
        # Between opening and locking it another process has removed it: what counts is the file of that name.
        release(descriptor)


def is_held(held: Lock) -> bool:
    """Whether a lock is this process's still: not its parent's, and of the file that has the name now.

    Raises:
        OSError: when that cannot be found out.
    """
    if held.process != os.getpid():
        return False
    try:
        there = os.stat(held.path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    here = os.fstat(held.descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _holder(descriptor: int) -> str:
    """What the one who holds a lock says; just before it does, there is nothing, or what a killed one has said."""
    said = b""
    for _ in range(LOOKS):
        before, said = said, os.pread(descriptor, 4096, 0)
        if said and said == before:
            break
        threading.Event().wait(BETWEEN)
    return said.decode(errors="replace") or "another process"


def unlock(held: Lock) -> None:
    """Give a lock back; that of a parent stays the parent's."""
    if held.process != os.getpid():
        return
    with suppress(OSError):
        os.ftruncate(held.descriptor, 0)
    release(held.descriptor)
