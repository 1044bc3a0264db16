"""Distinguish failures of a compiler from failures of the step itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ftrain.backends.oom import is_out_of_memory
from ftrain.errors import FtrainError


class CompilerError(Exception):
    """A compiler failed, or its code did in its first run; nothing was written. The cause is the error itself."""

    def __str__(self) -> str:
        error = _inner(self.__cause__)
        lines = str(error).strip().splitlines()
        # A C++ compiler prints the cause: a header of Python that is missing, or a full disk.
        compiler_output = str(getattr(error, "output", "")).splitlines()
        compiler_errors = [line.strip() for line in compiler_output if "error" in line.lower()]
        return ": ".join([type(error).__name__, *lines[:1], *compiler_errors[:1]])


@contextmanager
def attempted(has_written: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Context for calls of the compiler.

    Raises a CompilerError in place of an error, unless the error is one of ftrain, says that memory ran out, or came
    after a write.
    """
    try:
        yield
    except Exception as error:
        if has_written() or isinstance(error, CompilerError | FtrainError) or is_out_of_memory(_inner(error)):
            raise
        raise CompilerError from error


def _inner(error: Any) -> BaseException:
    """Return the error of a compiler, which torch may have wrapped in an error of its own."""
    return getattr(error, "inner_exception", error)  # type: ignore[no-any-return]
