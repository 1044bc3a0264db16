"""Stand-ins for the module `os` that count calls, kill the process or fail.

All calls of checkpoints to the system go through the name `os` in `ftrain.checkpoint.files`, which `through` replaces.
"""

import errno
import functools
import os
import signal
import threading
from contextlib import contextmanager, suppress

from ftrain.checkpoint import files

READING = {"listdir", "stat", "lstat", "fstat", "preadv", "pread", "statvfs"}
WRITING = {"open", "close", "write", "fsync", "mkdir", "rename", "link", "unlink", "rmdir", "ftruncate", "lseek"}
CALLS = READING | WRITING
ANSWERING = {"getpid", "path", "path.isdir", "path.lexists", "path.realpath", "path.samestat", "register_at_fork"}
"""Other functions of `os` that `files` calls; none of them raises an error of the system."""


class Calls:
    """The module `os`, but calls to the system go through `call`, numbered from 0; their names are in `names`."""

    lasting = False
    """Whether all calls fail after the first one that does."""

    def __init__(self):
        self.names = []
        self._lock = threading.Lock()

    def __getattr__(self, name):
        actual = getattr(os, name)
        return functools.partial(self._numbered, name, actual) if name in CALLS else actual

    def _numbered(self, name, function, *args):
        with self._lock:
            number = len(self.names)
            self.names.append(name)
        return self.call(number, name, function, args)

    def call(self, number, name, function, args):
        return function(*args)


@contextmanager
def through(proxy):
    """Context in which checkpoints use this `os`."""
    files.os = proxy
    try:
        yield proxy
    finally:
        files.os = os


def write_half(name, function, args):
    """Write the first half of the data of a write; do nothing for another call."""
    if name == "write":
        function(args[0], bytes(args[1])[: len(args[1]) // 2])


class Killed(Calls):
    """Kills this process by SIGKILL before, halfway through or after a call."""

    def __init__(self, at, moment):
        super().__init__()
        self.at, self.moment = at, moment

    def call(self, number, name, function, args):
        if number != self.at:
            return function(*args)
        if self.moment == "halfway":
            write_half(name, function, args)
        elif self.moment == "after":
            # A call that fails, such as `lstat` of a missing file, has ended too.
            with suppress(OSError):
                function(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        # The signal may be delivered to another thread first.
        signal.pause()
        return None


class Failing(Calls):
    """Lets call number `at` fail with an error; with `lasting` also all later calls that write.

    With the error "short", a write takes only the first half of its data.
    """

    def __init__(self, at, error, *, after=False, lasting=False):
        super().__init__()
        self.at, self.error, self.after, self.lasting = at, error, after, lasting
        self.failed = 0

    def call(self, number, name, function, args):
        fails_too = self.lasting and number > self.at and name in WRITING - {"close"}
        if number != self.at and not fails_too:
            return function(*args)
        self.failed += 1
        if self.error == "short":
            if name == "write":
                descriptor, data = args
                return function(descriptor, bytes(data)[: (len(data) + 1) // 2])
            return function(*args)
        # A descriptor is closed even where closing fails.
        if self.after or name == "close":
            result = function(*args)
            if name == "open":
                os.close(result)
        raise OSError(self.error, os.strerror(self.error))


def open_files(directory):
    """Return the paths of the files in a directory that this process has open.

    Not all of its descriptors: the garbage collector may close those of earlier tests at any time, such as the pipes to
    the workers of a loader.
    """
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        # That of the listing itself is closed by now.
        with suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in paths if path.startswith(f"{directory}/")]


ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT, "EINTR": errno.EINTR}
