"""Distinguish failures of a compiler from failures of the step itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ftrain.backends.oom import is_out_of_memory
from ftrain.errors import FtrainError
from ftrain.types import UpdateFn


class CompilerError(Exception):
    """A compiler failed, or its code did in its first run; nothing was written. The cause is the error itself."""

    def __str__(self) -> str:
        error = _inner(self.__cause__)
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def attempted() -> Iterator[None]:
    """Raise errors inside as a CompilerError, except those of ftrain and those for lack of memory.

    Raises:
        CompilerError: from the error itself.
    """
    try:
        yield
    except Exception as error:
        if _is_other(error):
            raise
        raise CompilerError from error


def _is_other(error: Exception) -> bool:
    return isinstance(error, CompilerError | FtrainError) or is_out_of_memory(_inner(error))


def _inner(error: Any) -> BaseException:
    """Return the error of a compiler, which torch wraps in its own."""
    return getattr(error, "inner_exception", error)  # type: ignore[no-any-return]


class UntilUpdate:
    """`attempted` for a split step, until its update begins, which is the first to write anything."""

    _updating = False

    def around_update(self, update: UpdateFn) -> UpdateFn:
        """Return the update, which notes that it has begun."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._updating = True
            return update(*args, **kwargs)

        return noted

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """As `attempted`, unless the update had begun: then errors are raised as they are.

        Raises:
            CompilerError: from the error itself.
        """
        self._updating = False
        try:
            yield
        except Exception as error:
            if self._updating or _is_other(error):
                raise
            raise CompilerError from error
