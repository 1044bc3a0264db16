"""Child processes that are forked from one that has loaded torch; each sends messages through a pipe."""

import json
import os
import select
import signal
import time
import traceback

import pytest

from tests.faults.figures import times

# Safe here: a child runs only Python, in its only thread, until it starts threads of its own.
quiet_forks = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")
PATIENCE = 300.0
"""Seconds without a message after which a child counts as hanging, also on a busy machine."""
FOREVER = 10 * PATIENCE
"""Seconds for which a child sleeps that must be ended by a signal."""
RESULT_PATIENCE = times(3600.0, PATIENCE)
"""The same for a child that sends only its result, at the end."""
BROKEN = 70
"""The exit code of a child that an error has ended."""


class Child:
    """A process that calls ``function(send, *arguments)``; ``send(message)`` sends any value that JSON can hold.

    Its exit code is the value that the function returns or exits with.
    """

    def __init__(self, function, *arguments):
        self._pipe, write_end = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._pipe)
            _run_in_child(
                function, lambda message: os.write(write_end, json.dumps(message).encode() + b"\n"), arguments
            )
        os.close(write_end)
        self._buffer, self._code = b"", None

    def receive(self, patience=PATIENCE):
        """Return the next message; None if the child has ended without another one."""
        deadline = time.monotonic() + patience
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.signal(signal.SIGKILL)
            assert ready, "a child hangs"
            data = os.read(self._pipe, 2**16)
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def signal(self, number):
        """Send a signal, unless `wait` has already returned the exit code."""
        if self._code is None:
            os.kill(self.pid, number)

    def wait(self, patience=PATIENCE):
        """Wait for the child to end, and return its exit code; negative if a signal has ended it."""
        deadline = time.monotonic() + patience
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
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


def forked(function, *arguments):
    """Call a function in a child, which must end with exit code 0, and return its first message."""
    child = Child(function, *arguments)
    message = child.receive(RESULT_PATIENCE)
    code = child.wait()
    assert code == 0, f"the child has ended with {code}"
    return message


def _run_in_child(function, send, arguments):
    """Call a function in a forked child, and end the child."""
    code = BROKEN
    try:
        code = function(send, *arguments) or 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
