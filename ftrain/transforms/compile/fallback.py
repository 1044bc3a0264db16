"""Tell failures of a compiler from failures of the step itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ftrain.backends.oom import is_out_of_memory
from ftrain.errors import FtrainError
from ftrain.types import UpdateFn


class CompilerError(Exception):
    """A compiler failed, or what it made did when it first ran; nothing was written. Its cause says how."""

    def __str__(self) -> str:
        error = _inner(self.__cause__)
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def attempted() -> Iterator[None]:
    """Mark whatever fails inside as a failure of the compiler, but for what is known to be something else.

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
    """What went wrong in a compiler, which torch wraps."""
    return getattr(error, "inner_exception", error)  # type: ignore[no-any-return]


class UntilUpdate:
    """Marks what fails in a step before its update, which is the first to write anything."""

    _updating = False

    def around_update(self, update: UpdateFn) -> UpdateFn:
        """Take note of where an update begins."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._updating = True
            return update(*args, **kwargs)

        return noted

    @contextmanager
    def attempted(self) -> Iterator[None]:
        """Mark what fails inside, as `attempted` does, unless the update of the step had begun.

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
