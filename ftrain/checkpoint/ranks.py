"""Short messages between the ranks of a run, with which they agree on a checkpoint.

They go through the store of torch's process group and are not collectives, so a thread may exchange them while the
training thread computes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ftrain import errors
from ftrain._torch.store import rank_and_size, store
from ftrain.checkpoint.heartbeats import wait_for_ranks
from ftrain.errors import FtrainError, RankError

T = TypeVar("T")
Json: TypeAlias = Any


class Ranks:
    """All ranks of the run, or only this process if there is no process group.

    Every rank must create the same number of these objects, and call their methods in the same order. `name` is the
    function in errors. With `alone`, this process does not wait for other ranks even if there are some.
    """

    def __init__(self, name: str, *, alone: bool = False) -> None:
        self.rank, self.size = (0, 1) if alone else rank_and_size()
        self._name, self._count, self._has_failed = name, 0, False
        self._abandoned = threading.Event()
        if self.size > 1:
            self._store = store()
            number = self._store.add(f"ftrain/{name}/opened/{self.rank}", 1)
            self._keys = f"ftrain/{name}/{number}"

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self.rank == 0

    def abandon(self) -> None:
        """Make every call that waits for other ranks, in any thread, raise an error at once."""
        self._abandoned.set()

    def gather(self, function: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return the results in the order of ranks; each must fit into JSON.

        Raises:
            FtrainError: on every rank, the error of the first rank on which the function failed; on other ranks a
                `RankError` in place of an error that is not one of ftrain.
            RankError: naming a rank that does not call this before the timeout of the process group.
        """
        if self.size == 1:
            return [function()]
        error: BaseException | None = None
        try:
            message: Json = {"value": function()}
        except BaseException as caught:
            error, message = caught, {"error": type(caught).__name__, "text": str(caught)}
        messages = self._exchange(message)
        for rank, received in enumerate(messages):
            if "error" in received:
                self._has_failed = True
                if error is not None and rank == self.rank:
                    raise error
                raise _error_of(rank, received["error"], received["text"]) from error
        return [received["value"] for received in messages]

    def on_each(self, function: Callable[[], T]) -> T:
        """Call a function on every rank, and return its result on this rank, of any type. Raises like `gather`."""
        results = list[T]()
        self.gather(lambda: results.append(function()))
        return results[0]

    def on_first(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank only, and return its result on every rank. Raises like `gather`."""
        return self.gather(lambda: function() if self.is_first else None)[0]  # type: ignore[return-value]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Context that raises an error of one rank on every rank, also one raised between calls of other methods."""
        self._has_failed = False
        try:
            yield
        except BaseException as error:
            if not self._has_failed:
                self.gather(partial(_raise, error))
            raise
        self.gather(lambda: None)

    def _exchange(self, message: Json) -> list[Json]:
        """Send a message to all ranks, and return the messages of all."""
        keys = [f"{self._keys}/{self._count}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(message))
        self._wait_for(keys)
        messages = [json.loads(text) for text in self._store.multi_get(keys)]
        if self._count:
            # Every rank has sent this message, so every rank has read the messages before it.
            self._store.delete_key(f"{self._keys}/{self._count - 1}/{self.rank}")
        self._count += 1
        return messages

    def _wait_for(self, keys: list[str]) -> None:
        """Wait until every rank has written its key. Raises a RankError if one cannot or does not."""

        def absent() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

        # A thread that writes in the background may wait while other ranks are in later steps.
        in_order = threading.current_thread() is threading.main_thread()
        gave_up = wait_for_ranks(
            self._store,
            (self.rank, self.size),
            lambda: self._store.check(keys),
            absent,
            in_order=in_order,
            abandoned=self._abandoned,
        )
        if gave_up:
            self._has_failed = True
            raise RankError(
                f"{self._name}: rank {', '.join(map(str, absent()))} did not come within {gave_up.waited:.0f} seconds; "
                f"{gave_up.why or 'it died, hangs, or runs another program'}. Every rank must call it"
            )


def _raise(error: BaseException) -> None:
    raise error


def _error_of(rank: int, name: str, text: str) -> FtrainError:
    """Return the error of another rank, from the name of its class and its text."""
    error_class = getattr(errors, name, None)
    if isinstance(error_class, type) and issubclass(error_class, FtrainError):
        return error_class(f"rank {rank}: {text}")
    return RankError(f"rank {rank}: {name}: {text}".removesuffix(": "))
