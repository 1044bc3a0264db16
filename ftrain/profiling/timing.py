"""Measure the time of steps in turns, so that changes in the speed of the machine affect all of them equally."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from ftrain import backends, tree
from ftrain import data as sources
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import DataError
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

K = TypeVar("K", bound=Hashable)

TURN = 0.1
"""Seconds of a turn, unless one step takes longer."""

WARM_UP = 3
"""Steps that run on a state before it is timed: they load libraries, and capture and record graphs."""

MOST_BATCHES, ENOUGH_SECONDS = 32, 0.5
"""A pass over data ends after this many batches, or this many seconds of steps."""

PASSES = 3
MISSED = 0.025
"""Probability that the median is beyond one end of its confidence interval."""


class Interval(NamedTuple):
    """A median with its 95% confidence interval."""

    low: float
    median: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Return the median of independent values and its 95% confidence interval; with fewer than six, the full range.

    The ends are order statistics: the number of values below the true median is binomial for any distribution.

    >>> interval([5.0, 1.0, 2.0, 4.0, 3.0, 9.0, 8.0, 7.0, 6.0])
    Interval(low=2.0, median=5.0, high=8.0)
    """
    ordered = sorted(values)
    count = len(ordered)
    # The probability that at most `left_out` of the values are below the true median.
    missed, left_out = 1 / 2**count, 0
    while missed <= MISSED:
        left_out += 1
        missed += math.comb(count, left_out) / 2**count
    left_out = max(left_out - 1, 0)
    return Interval(ordered[left_out], statistics.median(ordered), ordered[-1 - left_out])


class Racer:
    """A step that is timed on one batch and its own state, which `begin` returns in the first turn.

    `needs` are the bytes of the step at its peak; 0 if they are not known.
    """

    def __init__(
        self, step: Step, begin: Callable[[], TrainState], batch: PyTree, device: torch.device, needs: int = 0
    ) -> None:
        self._step, self._begin, self._batch, self.device, self._needs = step, begin, batch, device, needs
        self._state: TrainState | None = None
        self._steps = 0

    @property
    def fits(self) -> bool:
        """Whether it has its state already, or there is free memory for the step."""
        if self._state is not None:
            return True
        free = backends.of(self.device).free()
        return free is None or self._needs <= free

    def turn(self) -> float:
        """Run steps for about `TURN` seconds, and return the seconds of one step."""
        if self._state is None:
            self._state = self._begin()
            self._run(WARM_UP)
        if not self._steps:
            self._steps = max(1, round(TURN / max(self._run(1), 1e-6)))
        return self._run(self._steps) / self._steps

    def _run(self, steps: int) -> float:
        def work() -> None:
            for _ in range(steps):
                self._state, _ = self._step(self._state, self._batch)  # type: ignore[arg-type]

        return seconds(work, self.device)

    def close(self) -> None:
        """Release the state."""
        self._state = None


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes, after waiting for the device before and after it."""
    wait = backends.of(device).synchronize
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def race(
    racers: Mapping[K, Racer], rounds: int, *, is_result: Callable[[K, Exception], bool]
) -> dict[K, list[float] | Exception]:
    """Return for each racer the seconds of a step in each round, or the error that ended it.

    The first round does not count. Every second round runs in reverse order, so that no racer always follows the same
    one.
    If a racer does not fit beside the states of the others, or runs out of memory, the others release their states, and
    make new ones in their next turns. Raises an error of a racer unless ``is_result(key, error)``.
    """
    times: dict[K, list[float]] = {key: [] for key in racers}
    errors: dict[K, Exception] = {}
    # Collect now: a collection within a turn would slow down that racer alone.
    gc.collect()
    for number in range(rounds + 1):
        for key in list(racers)[:: -1 if number % 2 else 1]:
            if key in errors:
                continue
            try:
                times[key].append(_turn(racers, key))
            except Exception as error:
                racers[key].close()
                if not is_result(key, error):
                    raise
                release(error, racers[key].device)
                errors[key] = error
    _close(racers)
    return {key: errors.get(key, seconds[1:]) for key, seconds in times.items()}


def _turn(racers: Mapping[K, Racer], key: K) -> float:
    # Compare with the free memory first: if a host runs out of memory, its kernel kills the process without an error.
    if racers[key].fits:
        try:
            return racers[key].turn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _close(racers)
            # After `_close`, so that this also empties the allocator's cache of their memory.
            release(error, racers[key].device)
    else:
        _close(racers)
    return racers[key].turn()


def _close(racers: Mapping[K, Racer]) -> None:
    for racer in racers.values():
        racer.close()


class Loading(NamedTuple):
    """Seconds per batch of a source of data.

    `alone` is the time to load a batch without a step, `ready` the time of a step on a batch that is on the device
    already, and `together` the time of both.
    """

    alone: float
    ready: float
    together: float

    @property
    def waiting(self) -> float:
        """The share of the time in which the device waits for data; at most the share that loading alone takes."""
        return min(max(0.0, 1 - self.ready / self.together), self.alone / self.together)


def loading(step: Step, state: TrainState, data: Iterable[PyTree], device: torch.device) -> Loading:
    """Return the times to load data and to train on it; restores the position of the data, and torch's generator.

    Nothing else may use the state. Raises a DataError if the data can be iterated only once, or has fewer than two
    batches.
    """
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        raise DataError(
            f"hints, ladder: data is {type(data).__name__}; needs batches that can be iterated several times, such as "
            "those of ft.data.loader"
        )
    # For each pass, torch's `DataLoader` draws a seed from the generator, and its shuffle another.
    position, restore_generator = sources.position(data), backends.of(tree.HOST).generators()

    def batches(count: int) -> Iterator[PyTree]:
        if position is not None:
            sources.seek(data, position)
        return (tree.to(tree.as_tree(batch), device) for batch in itertools.islice(data, count))

    def run(batch: PyTree) -> None:
        nonlocal state
        state, _ = step(state, batch)

    try:
        for batch in batches(1):
            for _ in range(WARM_UP):
                run(batch)
            count = min(MOST_BATCHES, max(2, round(ENOUGH_SECONDS / seconds(partial(run, batch), device))))
            loaded = list(batches(count))
            if len(loaded) > 1:
                # In turns, because the machine may be busy with other work during a part of them.
                passes = [
                    [_pass(batches(count), id, device), _pass(loaded, run, device), _pass(batches(count), run, device)]
                    for _ in range(PASSES)
                ]
                timed = len(loaded) - 1
                return Loading(*(statistics.median(column) / timed for column in zip(*passes, strict=True)))
        raise DataError("hints, ladder: data has fewer than two batches; needs two or more")
    finally:
        restore_generator()
        if position is not None:
            sources.seek(data, position)


def _pass(batches: Iterable[PyTree], work: Callable[[PyTree], object], device: torch.device) -> float:
    """Return the seconds of a pass after its first batch, before which workers start."""
    rest = iter(batches)
    work(next(rest))
    return seconds(lambda: [work(batch) for batch in rest], device)
