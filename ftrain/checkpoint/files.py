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

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]

NOT_THROUGH_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# A FIFO would otherwise wait for somebody to write to it.
AT_ONCE = getattr(os, "O_NONBLOCK", 0)

LOOKS, BETWEEN = 20, 0.01
"""How often to look who holds a lock, and after how many seconds again."""

_held: dict[tuple[int, str], int] = {}


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
    """Mark a directory as in use by this process, for as long as that lives; the mark is a descriptor."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | NOT_THROUGH_LINKS)
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def release(descriptor: int) -> None:
    """Take the mark of `hold` away."""
    # Nothing was written through it, so that no error can be of what matters; and it is closed in any case.
    with suppress(OSError):
        os.close(descriptor)


def is_abandoned(path: Path) -> bool:
    """Whether no process holds a directory."""
    try:
        release(hold(path))
    except OSError:
        return False
    return True


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
    """Remove a file, or a directory with all that is in it; links are removed and not followed."""
    if not is_directory(path):
        os.unlink(path)
        return
    for name in names(path):
        remove(path / name)
    os.rmdir(path)


def free(path: Path) -> int:
    """Return the bytes that may still be written where `path` is."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def touch(path: Path) -> None:
    """Make an empty file, if it is not there, and bring its name to the disk."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | NOT_THROUGH_LINKS, 0o644))
    sync_directory(path.parent)


def lock(path: Path, holder: Mapping[str, object]) -> int:
    """Lock a file for this process, write into it who holds it, and return its descriptor.

    The lock ends with the process, however that ends, and processes that it has forked do not keep it.

    Raises:
        BlockingIOError: when it is held; the message is what the holder has written.
    """
    # Locks of one process do not exclude each other; a fork knows those of its parent, and has none of them.
    here = os.getpid(), os.path.realpath(path)
    if here in _held:
        raise BlockingIOError(json.dumps(holder))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NOT_THROUGH_LINKS, 0o644)
    try:
        if fcntl is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        write(descriptor, json.dumps(holder).encode())
    except (BlockingIOError, PermissionError):
        said = _holder(descriptor)
        os.close(descriptor)
        raise BlockingIOError(said) from None
    except BaseException:
        os.close(descriptor)
        raise
    _held[here] = descriptor
    return descriptor


def _holder(descriptor: int) -> str:
    """What the one who holds a lock says; just before it does, there is nothing, or what a killed one has said."""
    said = b""
    for _ in range(LOOKS):
        before, said = said, os.pread(descriptor, 4096, 0)
        if said and said == before:
            break
        threading.Event().wait(BETWEEN)
    return said.decode(errors="replace") or "another process"


def unlock(descriptor: int) -> None:
    """Give a lock back."""
    mine = [here for here, held in _held.items() if held == descriptor and here[0] == os.getpid()]
    for here in mine:
        del _held[here]
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
    release(descriptor)
