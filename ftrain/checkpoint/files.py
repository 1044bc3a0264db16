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
"""False on Windows, which lacks `preadv` and other calls that are used here."""
FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)
"""A request of macOS: its `fsync` leaves data in the cache of the disk, which is lost when power fails (man fsync)."""

NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags of each file that is opened: a link is not followed, and a program that is started does not inherit it."""
DIRECTORY = getattr(os, "O_DIRECTORY", 0)
# Opening a FIFO would otherwise block until another process writes to it.
NONBLOCKING = getattr(os, "O_NONBLOCK", 0)

HOLDER_READS, SECONDS_BETWEEN_READS = 20, 0.01
"""The largest number of reads of a lock file, to learn which process holds the lock, and the seconds between two."""

UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK}
"""Errors of a file system without locks."""
UNSYNCABLE = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY}
"""Errors of a file system that cannot sync directories or has no `FULL_SYNC`, such as some network file systems."""
UNREACHABLE = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT}
"""Errors after which the content of a file may still be intact."""
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
    """Close the locks that a forked process inherits, without `LOCK_UN`, which would release those of the parent."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _flock(descriptor: int) -> bool:
    """Lock an open file or directory; return False if the file system has no locks.

    Raises a BlockingIOError if another process holds the lock.
    """
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
    """Sync an open file to disk, so that it survives a loss of power and other machines can read it.

    Raises the OSError of the system.
    """
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
    """Make a directory and its missing parents, and sync the parent directory. Raises an OSError for a broken link."""
    _require_calls()
    if not os.path.isdir(path):
        make_directories(path.parent)
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):  # Otherwise another process has made it since.
                raise OSError(errno.ENOTDIR, "is a file, or a link that leads to nothing", str(path)) from None
    # Also if the directory exists: the process that made it may have been killed before it synced the parent.
    # A parent that this process may not read cannot be synced; this process has then not made a directory in it.
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
    """Set the length of a new file in bytes; parts that are not written read as zeros."""
    os.ftruncate(descriptor, length)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at an offset of a file."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    write(descriptor, data)


def append(path: Path, data: bytes, offset: int) -> None:
    """Cut a file off after `offset` bytes, write `data` there, and sync the file to disk.

    Raises an OSError if the file has fewer than `offset` bytes or is not a regular file.
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
    """Sync the entries of a directory to disk. Raises an OSError, unless the file system cannot sync a directory."""
    with _descriptor(path, os.O_RDONLY | DIRECTORY) as descriptor:
        try:
            sync(descriptor)
        except OSError as error:
            if error.errno not in UNSYNCABLE:
                raise


def rename(old: Path, new: Path) -> None:
    """Rename a directory. Raises an OSError if the new name is in use, except by an empty directory."""
    os.rename(old, new)


def link(path: Path, new: Path) -> None:
    """Give a file a second name, a hard link: the file stays when its first name is removed."""
    os.link(path, new)


def can_link(path: Path) -> bool:
    """Whether a file exists and its file system supports hard links; tries one."""
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
    """Remove a directory that no process has locked.

    Does nothing if the file system has no locks, or this process may not remove it, as where several users save.
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
    """Context of a regular file to read. Raises an OSError for a link, a directory or a device without opening it."""
    _require_calls()
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file (a link, a directory or a device)", str(path))
    with _descriptor(path, os.O_RDONLY | NO_LINKS | NONBLOCKING) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # It was replaced after `lstat`.
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
        target = target[count:]
        offset += count


def read(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises an OSError when it has more than `max_bytes`."""
    with opened(path) as descriptor:
        length = size(descriptor)
        if length > max_bytes:
            raise OSError(errno.EFBIG, f"has {length:,} bytes, more than the {max_bytes:,} that are allowed", str(path))
        data = bytearray(length)
        read_into(descriptor, memoryview(data), 0)
        return bytes(data)


def names(path: Path) -> list[str]:
    """Return the names in a directory, sorted."""
    return sorted(os.listdir(path))


def resolved(path: Path) -> Path:
    """Return a path with its links followed: files of other programs may be links, as in Hugging Face's cache."""
    return Path(os.path.realpath(path))


def is_directory(path: Path) -> bool:
    """Whether a path is a directory, and not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def exists(path: Path) -> bool:
    """Whether a path exists; True for a broken link."""
    return os.path.lexists(path)


def remove(path: Path) -> None:
    """Remove a file, or a directory with its content; links are removed and not followed."""
    if not is_directory(path):
        os.unlink(path)
        return
    for name in names(path):
        remove(path / name)
    os.rmdir(path)


def free_bytes(path: Path) -> int:
    """Return the number of bytes that this user may still write to the file system of `path`."""
    file_system = os.statvfs(path)
    return file_system.f_bavail * file_system.f_frsize


def touch(path: Path) -> None:
    """Make an empty file if none exists, and sync its directory to disk."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | NO_LINKS, 0o644))
    sync_directory(path.parent)


def lock(path: Path, holder: Mapping[str, object]) -> Lock:
    """Lock a file for this process, and write `holder` into it as JSON.

    The lock ends when the process ends or is killed; a forked process does not inherit it. Raises a BlockingIOError if
    this or another process holds the lock; its text is the JSON that the holder wrote.
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
    """Whether a lock is one of this process, not of its parent, and its file is still the one at its path."""
    if held.process != os.getpid():
        return False
    try:
        at_path = os.stat(held.path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(at_path, os.fstat(held.descriptor))


def _holder(descriptor: int) -> str:
    """Return the text that the holder of a lock wrote into its file.

    A process that has just taken the lock has not written yet: the file is empty, or has the text of an earlier holder
    that was killed. Therefore the file is read until two reads agree.
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
