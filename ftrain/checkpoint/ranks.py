"""The ranks of a run agree on checkpoints by short messages through the store of torch's process group.

They are not collectives, so a thread may exchange them while the training thread computes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ftrain import errors
from ftrain._torch.store import rank_and_size, sign_of_life, store
from ftrain.errors import FtrainError, RankError

T = TypeVar("T")
Json: TypeAlias = Any

SHORTEST_WAIT, LONGEST_WAIT = 0.001, 0.1
"""Seconds between two looks for messages: at first, and at last."""
SILENCE = 20.0
"""Seconds without a sign of life after which a rank counts as dead, where ranks give one every second."""


class Ranks:
    """All ranks of the run, or this process alone when there is no process group.

    Every rank must make as many of these, and call their methods in the same order.

    Args:
        name: of what the ranks agree on, for the keys of messages and for errors.
    """

    def __init__(self, name: str) -> None:
        self.rank, self.size = rank_and_size()
        self._name, self._count, self._has_failed = name, 0, False
        self._abandoned = threading.Event()
        if self.size > 1:
            self._store = store()
            number = self._store.add(f"ftrain/{name}/opened/{self.rank}", 1)
            self._keys = f"ftrain/{name}/{number}"
            self._seconds = self._store.timeout.total_seconds()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks and writes for all."""
        return self.rank == 0

    def abandon(self) -> None:
        """Let calls that wait for other ranks, in whatever thread, raise at once."""
        self._abandoned.set()

    def together(self, function: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return what it returned on each, in the order of ranks.

        Args:
            function: returns what JSON can hold, if there are several ranks.

        Raises:
            FtrainError: on every rank the error of the first rank on which the function failed; on other ranks than
                that one, a `RankError` in place of an error that is not one of ftrain.
            RankError: when a rank does not come before the timeout of the process group; names it.
        """
        if self.size == 1:
            return [function()]
        error: BaseException | None = None
        try:
            message: Json = {"value": function()}
        except BaseException as caught:
            error, message = caught, {"error": type(caught).__name__, "text": str(caught)}
        messages = self._exchange(message)
        for rank, other in enumerate(messages):
            if "error" in other:
                self._has_failed = True
                if error is not None and rank == self.rank:
                    raise error
                raise _error_of(rank, other["error"], other["text"]) from error
        return [other["value"] for other in messages]

    def first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank alone, and return what it returned on every rank; raises as `together`."""
        return self.together(lambda: function() if self.is_first else None)[0]  # type: ignore[return-value]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Context in which what is raised on one rank, in or between calls of `together`, is raised on every rank."""
        self._has_failed = False
        try:
            yield
        except BaseException as error:
            if not self._has_failed:
                self.together(partial(_raise, error))
            raise
        self.together(lambda: None)

    def _exchange(self, message: Json) -> list[Json]:
        """Return the messages of all ranks."""
        keys = [f"{self._keys}/{self._count}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(message))
        waited, pause = 0.0, SHORTEST_WAIT
        heard, heard_at, is_silent = self._signs_of_life(keys), 0.0, False
        while not self._store.check(keys):
            if waited - heard_at > SILENCE:
                earlier, heard, heard_at = heard, self._signs_of_life(keys), waited
                is_silent = any(text == earlier.get(rank) or _failure(text) for rank, text in heard.items())
            if is_silent or waited > self._seconds or self._abandoned.is_set():
                self._has_failed = True
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                failed = {rank: _failure(text) for rank, text in self._signs_of_life(keys).items() if _failure(text)}
                why = "; ".join(f"rank {rank} failed: {text}" for rank, text in failed.items())
                raise RankError(
                    f"{self._name}: rank {', '.join(map(str, missing))} did not come within {waited:.0f} seconds; "
                    + (why or "it died, hangs, or runs another program")
                )
            self._abandoned.wait(pause)
            waited, pause = waited + pause, min(2 * pause, LONGEST_WAIT)
        messages = [json.loads(text) for text in self._store.multi_get(keys)]
        if self._count:
            # All have come here, so all have read the messages before.
            self._store.delete_key(f"{self._keys}/{self._count - 1}/{self.rank}")
        self._count += 1
        return messages

    def _signs_of_life(self, keys: list[str]) -> dict[int, bytes]:
        """Return what ranks whose messages are missing have written last to say that they live."""
        lives = {rank: sign_of_life(rank) for rank, key in enumerate(keys) if not self._store.check([key])}
        return {rank: self._store.get(life) for rank, life in lives.items() if self._store.check([life])}


def _failure(sign_of_life: bytes) -> str:
    failure: str = json.loads(sign_of_life)["failure"]
    return failure


def _raise(error: BaseException) -> None:
    raise error


def _error_of(rank: int, name: str, text: str) -> FtrainError:
    """Return the error that another rank has raised."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, FtrainError):
        return kind(f"rank {rank}: {text}")
    return RankError(f"rank {rank}: {name}: {text}")
