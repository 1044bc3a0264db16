"""All file system calls of checkpoints, each through `os`, which the fault tests replace."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

SYSTEM_HAS_CALLS = hasattr(os, "preadv")
FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
"""A request of macOS, whose `fsync` leaves what was written in the memory of the disk, where a power loss ends it."""

NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# Opening a FIFO would otherwise block until another process writes to it.
NONBLOCKING = getattr(os, "O_NONBLOCK", 0)

HOLDER_READS, SECONDS_BETWEEN_READS = 20, 0.01
"""The largest number of reads to learn who holds a lock, and the seconds between two reads."""

UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
"""Errors of a file system without locks."""
UNSYNCABLE = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY}
"""Errors of a file system that cannot sync directories, or has no `FULL_SYNC`, as some that machines share."""
UNREACHABLE = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT}
"""Errors that say nothing of what is in a file."""
MAX_READ = 2**30
"""The largest number of bytes to read in one call: macOS refuses 2 GiB."""

_held: set[int] = set()
"""Descriptors through which this process holds locks."""


class Lock(NamedTuple):
    """A lock of process `process` on an open file; `excludes` is False where the file system has no locks."""

    path: Path
    descriptor: int
    process: int
    excludes: bool


def _close_in_child() -> None:
    """Close the locks that a forked process inherits; that of the parent stays, which `LOCK_UN` would release."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _flock(descriptor: int) -> bool:
    """Lock an open file or directory; False if there are no locks, a BlockingIOError if another process holds it."""
    # Not `fcntl.lockf`, whose lock ends as soon as the process closes any descriptor of the same file.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    _held.add(descriptor)
    return True


def sync(descriptor: int) -> None:
    """Sync what was written to disk, so that other machines can read it too."""
    if FULL_SYNC is not None:
        try:
            fcntl.fcntl(descriptor, FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in UNSYNCABLE:
                raise
    os.fsync(descriptor)


def _require_calls() -> None:
    if not SYSTEM_HAS_CALLS:
        raise OSError(errno.ENOSYS, "checkpoints need file calls of Linux or macOS; on Windows use WSL 2")


def make_directory(path: Path) -> None:
    """Make a directory, which must not exist."""
    os.mkdir(path)


def make_directories(path: Path) -> None:
    """Make a directory and its missing parents, and sync the parent directory; raises an OSError for a broken link."""
    _require_calls()
    if not os.path.isdir(path):
        make_directories(path.parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):  # Not made by another process since.
                raise OSError(errno.ENOTDIR, "is a file, or a link that leads to nothing", str(path)) from None
    # Also of an existing directory: the process that made it may have been killed before it synced.
    # A directory that this process may traverse but not read cannot be synced, and is not one that it made.
    with suppress(PermissionError):
        sync_directory(path.parent)


@contextmanager
def _descriptor(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def created(path: Path) -> Iterator[int]:
    """Context of a new file, which is synced to disk when the context ends."""
    with _descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS) as descriptor:
        yield descriptor
        sync(descriptor)


@contextmanager
def opened_to_write(path: Path) -> Iterator[int]:
    """Context of an existing file to write to, which is synced to disk when the context ends."""
    with _descriptor(path, os.O_WRONLY | NO_LINKS) as descriptor:
        yield descriptor
        sync(descriptor)


def resize(descriptor: int, length: int) -> None:
    """Give a new file its length in bytes; what is not written reads as zeros."""
    os.ftruncate(descriptor, length)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at an offset of a file."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    write(descriptor, data)


def append(path: Path, data: bytes, offset: int) -> None:
    """Write `data` after the first `offset` bytes of a file, remove the rest, and sync the file to disk.

    Raises an OSError if the file has fewer than `offset` bytes, or is not a regular file, which has no length to set.
    """
    with _descriptor(path, os.O_RDWR | os.O_CREAT | NO_LINKS | NONBLOCKING) as descriptor:
        length = size(descriptor)
        if length < offset:
            raise OSError(errno.EIO, f"has {length:,} bytes, and {offset:,} were written: it was cut off or removed")
        os.ftruncate(descriptor, offset)
        write_at(descriptor, data, offset)
        sync(descriptor)
    if not offset:
        sync_directory(path.parent)


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, in several calls if necessary. Raises an OSError if the system writes nothing."""
    remaining = memoryview(data).cast("B")
    while remaining:
        count = os.write(descriptor, remaining)
        if not count:
            raise OSError(errno.EIO, "nothing was written")
        remaining = remaining[count:]


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory to disk."""
    with _descriptor(path, os.O_RDONLY | DIRECTORY) as descriptor:
        try:
            sync(descriptor)
        except OSError as error:
            if error.errno not in UNSYNCABLE:
                raise


def rename(old: Path, new: Path) -> None:
    """Rename a directory to a name that is not in use, except for an empty directory, which no checkpoint is."""
    os.rename(old, new)


def link(path: Path, new: Path) -> None:
    """Give a file a second name, under which it stays when the first one is removed."""
    os.link(path, new)


def can_link(path: Path) -> bool:
    """Whether a file exists, and its file system gives it a second name."""
    probe = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        os.link(path, probe)
    except OSError:
        return False
    os.unlink(probe)
    return True


def hold(path: Path) -> int:
    """Lock a directory until `release` of the descriptor.

    Raises a BlockingIOError if another process has locked it, and a FileNotFoundError if one has removed it.
    """
    descriptor = os.open(path, os.O_RDONLY | DIRECTORY | NO_LINKS)
    try:
        _flock(descriptor)
        # It may have been removed between the two calls above.
        os.stat(path)
    except BaseException:
        release(descriptor)
        raise
    return descriptor


def release(descriptor: int) -> None:
    """Close a descriptor, which ends its lock."""
    _held.discard(descriptor)
    # Nothing was written through it, so an error loses nothing; the descriptor is closed in any case.
    with suppress(OSError):
        os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Remove a directory that no process has locked; not if there are no locks, because it cannot be known.

    Does nothing if this process may not remove it, as in a directory that several users share.
    """
    with suppress(OSError):
        descriptor = hold(path)
        try:
            # Locked until it is removed: the process that made it may be about to lock it.
            if descriptor in _held:
                remove(path)
        finally:
            release(descriptor)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Context of a file to read. Raises an OSError for a link, a directory or a device, before it is opened."""
    _require_calls()
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file (a link, a directory or a device)", str(path))
    with _descriptor(path, os.O_RDONLY | NO_LINKS | NONBLOCKING) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        yield descriptor


def size(descriptor: int) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(descriptor).st_size


def read_into(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill `target` with the bytes of a file from `offset` on. Raises an OSError if the file ends before."""
    while target:
        count = os.preadv(descriptor, [target[:MAX_READ]], offset)
        if not count:
            raise OSError(errno.EIO, "the file ends too early")
        target, offset = target[count:], offset + count


def read(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file. Raises an OSError when it has more than `most` bytes."""
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


def resolved(path: Path) -> Path:
    """Return where the links of a path lead: files of other programs may be links, as in Hugging Face's cache."""
    return Path(os.path.realpath(path))


def is_directory(path: Path) -> bool:
    """Whether a path is a directory, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def exists(path: Path) -> bool:
    """Whether a path exists; a broken link does."""
    return os.path.lexists(path)


def remove(path: Path) -> None:
    """Remove a file, or a directory with its content; links are removed and not followed."""
    if not is_directory(path):
        os.unlink(path)
        return
    for name in names(path):
        remove(path / name)
    os.rmdir(path)


def free(path: Path) -> int:
    """Return the bytes that are free on the file system of `path`."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def touch(path: Path) -> None:
    """Make an empty file if it does not exist, and sync its directory to disk."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | NO_LINKS, 0o644))
    sync_directory(path.parent)


def lock(path: Path, holder: Mapping[str, object]) -> Lock:
    """Lock a file for this process, and write `holder` into it.

    The lock ends with the process, also when that is killed, and no fork inherits it. Raises a BlockingIOError with
    what the holder wrote when the lock is held, by this process or another.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o644)
        try:
            held = Lock(path, descriptor, os.getpid(), _flock(descriptor))
            if is_held(held):
                os.ftruncate(descriptor, 0)
                write(descriptor, json.dumps(holder).encode())
                return held
        except (BlockingIOError, PermissionError):
            text = _holder(descriptor)
            release(descriptor)
            raise BlockingIOError(text) from None
        except BaseException:
            release(descriptor)
            raise
        # Another process removed the file after it was opened here: lock the file that has the name now.
        release(descriptor)


def is_held(held: Lock) -> bool:
    """Whether this process, and not its parent, holds the lock, and on the file that has the name now."""
    if held.process != os.getpid():
        return False
    try:
        named = os.stat(held.path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    opened_file = os.fstat(held.descriptor)
    return (named.st_dev, named.st_ino) == (opened_file.st_dev, opened_file.st_ino)


def _holder(descriptor: int) -> str:
    """Return what the holder of a lock wrote into its file.

    Just after it took the lock, the file is empty or holds what a killed process wrote: read until two reads agree.
    """
    text = b""
    for _ in range(HOLDER_READS):
        previous, text = text, os.pread(descriptor, 4096, 0)
        if text and text == previous:
            break
        threading.Event().wait(SECONDS_BETWEEN_READS)
    return text.decode(errors="replace") or "another process"


def unlock(held: Lock) -> None:
    """Release a lock of this process; the lock of a parent process stays."""
    if held.process != os.getpid():
        return
    with suppress(OSError):
        os.ftruncate(held.descriptor, 0)
    release(held.descriptor)
