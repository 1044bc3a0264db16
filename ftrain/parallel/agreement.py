"""Agreement of all ranks, on the host: on numbers, on errors, and on what the first rank decides.

Messages are sent in a process group of their own: they wait neither for a device nor for the collectives of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ftrain import backends, tree
from ftrain._torch import store
from ftrain.errors import OptionError, RankError, kind_and_text
from ftrain.parallel.rank_watch import watch
from ftrain.parallel.same_step import ADDRESS

T = TypeVar("T")


class Agreement:
    """Makes all ranks agree: a context, in which every rank calls the same methods in the same order.

    A single rank sends nothing.
    """

    # A class, not a generator: contextlib sets attributes of the errors that pass through a generator, which an error
    # that is a frozen dataclass refuses.
    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._rank = dist.get_rank() if ranks > 1 else 0
        self._group: Any = None
        self._vote: tuple[torch.Tensor, Any] | None = None
        self._shared_error: BaseException | None = None
        self._watch: Any = None

    def __enter__(self) -> Agreement:
        """Make the group; waits for all ranks."""
        if self._ranks > 1:
            # The library of the default group may support only tensors on the device.
            on_host = backends.default().device == tree.HOST
            library = None if on_host else backends.of(tree.HOST).distributed
            self._watch = watch()
            self._watch.report_failure(None)
            with self._explaining():
                self._group = dist.new_group(backend=library, timeout=store.timeout())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, RankError) and not self.shares(error):
            self._watch.report_failure(error)
        group, self._group = self._group, None
        if group is not None:
            # The destructor of a group waits for a vote; when ranks have failed, its result is not used.
            with suppress(Exception):
                self.last_vote()
            dist.destroy_process_group(group)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self._rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self._ranks == 1

    def largest(self, number: int) -> int:
        """Return the largest number that a rank has; waits for all ranks."""
        if self._ranks == 1:
            return number
        return int(self._wait_for(self._start_largest(number))[0])

    def sums(self, numbers: list[float]) -> list[float]:
        """Return the sums of numbers over ranks; waits for all ranks."""
        if self._ranks == 1 or not numbers:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64, device=tree.HOST)
        work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return [float(total) for total in self._wait_for((tensor, work))]

    def vote(self, *numbers: int) -> list[int]:
        """Start to find the largest of each number over ranks, and return the result of the previous call.

        The first call returns []. So ranks learn of a number one call later, and rarely wait for each other.
        """
        result = self.last_vote()
        self._vote = self._start_largest(*numbers)
        return result

    def last_vote(self) -> list[int]:
        """Return the result of the last `vote`, or [] if it was returned already."""
        if self._vote is None:
            return []
        vote, self._vote = self._vote, None
        return [int(number) for number in self._wait_for(vote)]

    def _start_largest(self, *numbers: int) -> tuple[torch.Tensor, Any]:
        tensor = torch.tensor(numbers, device=tree.HOST)
        return tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _wait_for(self, started: tuple[torch.Tensor, Any]) -> torch.Tensor:
        tensor, work = started
        with self._explaining():
            work.wait()
        return tensor

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Context that turns the error of a collective into a RankError that names the absent ranks."""
        try:
            yield
        except RuntimeError as error:
            self._watch.explain(error)
            raise

    def note_place(self, place: str) -> None:
        """Note for the other ranks where this one is between steps, such as ``"in evaluate"``; "" when it has left."""
        if self._ranks > 1:
            self._watch.note_place(place)

    def from_first(self, value: T, source: int = 0) -> T:
        """Return the value of the first rank, or of the rank `source`; it is pickled. Waits for that rank."""
        if self._ranks == 1:
            return value
        values: list[Any] = [value if self._rank == source else None]
        with self._explaining():
            dist.broadcast_object_list(values, src=source, group=self._group)
        return values[0]  # type: ignore[no-any-return]

    def together(self, name: str, function: Callable[[], T]) -> T:
        """Call `function`, wait until it has returned on all ranks, and return its result on this rank.

        Raises a RankError if it has failed on another rank. If it waits for other ranks and fails on this one alone,
        they wait until the deadline.
        """
        if self._ranks == 1:
            return function()
        result: Any = None
        error: Exception | None = None
        self.note_place(f"in {name}")
        try:
            result = function()
        except RankError:
            raise
        except Exception as raised:
            error = raised
            self._watch.explain(error)
        else:
            self._watch.note_place(f"at the end of {name}", waits=True)
        try:
            failed_rank = self.largest(-1 if error is None else self._rank)
        except RankError as timeout:
            if error is None:
                raise
            raise error from timeout
        self.note_place("")
        if failed_rank >= 0:
            # All ranks know of the failure, and may save together what was trained.
            self._watch.report_failure(None)
            text = self.from_first(kind_and_text(error) if error else "", failed_rank)
            error = error or RankError(f"fit: rank {failed_rank} failed in {name}, and so all ranks stop: {text}")
            self._shared_error = error
            raise error
        return result  # type: ignore[no-any-return]

    def decide(self, name: str, function: Callable[[], T]) -> T:
        """Return the result of a function on the first rank; every rank calls it, as in `together`."""
        return self.from_first(self.together(name, function))

    def require_same(self, arguments: Mapping[str, Any]) -> None:
        """Check that all ranks have the same arguments, given by name: they are compared as they print.

        Raises an OptionError on the ranks whose arguments differ from those of rank 0, and a RankError on the others.
        """
        texts = {name: value if isinstance(value, str) else repr(value) for name, value in arguments.items()}
        texts = {name: ADDRESS.sub("", text) for name, text in texts.items()}
        first_texts = self.from_first(texts)

        def compare() -> None:
            for name, text in texts.items():
                if text != first_texts[name]:
                    raise OptionError(
                        f"fit: {name} is {text} on rank {self._rank}, and {first_texts[name]} on rank 0; every rank "
                        "must call it with the same arguments"
                    )

        self.together("comparing the arguments of fit", compare)

    def shares(self, error: BaseException) -> bool:
        """Return whether all ranks have stopped together: at this error, or at an error of their own in `together`."""
        return self._ranks == 1 or error is self._shared_error
