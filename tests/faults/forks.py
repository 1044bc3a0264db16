"""Children of a process that has torch loaded already, each of which says things in a pipe and ends on its own."""

import json
import os
import select
import signal
import time
import traceback

import pytest

from tests.faults.figures import times

# A child here runs Python alone, on the one thread that it has, until it makes its own.
quiet_forks = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")
PATIENCE = 300.0
"""Seconds after which a child hangs, which no load of the machine explains."""
FOREVER = 10 * PATIENCE
"""Seconds for which a child sleeps that must be ended by a signal."""
AT_LENGTH = times(3600.0, PATIENCE)
"""The same for a child that says what it has found when it is through with all of it."""
BROKEN = 70
"""The exit code of a child that ended by an error."""


class Child:
    """A function in a process of its own: ``function(tell, *given)``, where `tell` sends what JSON can hold.

    It ends with what the function returns, or exits with, as its exit code.
    """

    def __init__(self, function, *given):
        self._pipe, there = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._pipe)
            _live(function, lambda said: os.write(there, json.dumps(said).encode() + b"\n"), given)
        os.close(there)
        self._left, self._code = b"", None

    def hear(self, patience=PATIENCE):
        """Return the next that it says; None when it has ended without a word."""
        until = time.monotonic() + patience
        while b"\n" not in self._left:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.signal(signal.SIGKILL)
            assert ready, "a child hangs"
            more = os.read(self._pipe, 2**16)
            if not more:
                return None
            self._left += more
        line, self._left = self._left.split(b"\n", 1)
        return json.loads(line)

    def signal(self, number):
        """Send a signal, unless it was already found to have ended."""
        if self._code is None:
            os.kill(self.pid, number)

    def end(self, patience=PATIENCE):
        """Wait for it, and return its exit code: negative for the signal that has ended it."""
        until = time.monotonic() + patience
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self._code = -signal.SIGKILL
                raise AssertionError("a child hangs")
            else:
                time.sleep(0.0005)
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        return self._code


def forked(function, *given):
    """Return what a function says first, in a child that must end well."""
    child = Child(function, *given)
    said = child.hear(AT_LENGTH)
    code = child.end()
    assert code == 0, f"the child has ended with {code}"
    return said


def _live(function, tell, given):
    code = BROKEN
    try:
        code = function(tell, *given) or 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
