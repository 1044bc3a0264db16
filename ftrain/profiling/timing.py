"""How long steps take, measured in turns, so that a drift of the machine affects all of them alike."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ftrain import backends, tree
from ftrain import data as sources
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import DataError
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

TURN = 0.1
"""Seconds that a turn takes, unless one step takes longer."""

WARM_UP = 3
"""Steps before a state is timed: libraries load, graphs are captured, and recorded for tensors at these addresses."""

MOST_BATCHES, ENOUGH_SECONDS = 32, 0.5
"""A pass over data ends after so many batches, or so many seconds of steps."""

PASSES = 3
MISSED = 0.025
"""Probability that the median lies beyond one end of an interval."""


class Interval(NamedTuple):
    """A median, and a range that holds it 95 times in 100."""

    low: float
    median: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Return the median of independent values, between two of them that hold it; of fewer than six, between all.

    How many values lie below the median is binomial, whatever their distribution.

    >>> interval([5.0, 1.0, 2.0, 4.0, 3.0, 9.0, 8.0, 7.0, 6.0])
    Interval(low=2.0, median=5.0, high=8.0)
    """
    ordered, missed, left_out = sorted(values), 0.0, 0
    while (missed := missed + math.comb(len(ordered), left_out) / 2 ** len(ordered)) <= MISSED:
        left_out += 1
    left_out = max(left_out - 1, 0)
    return Interval(ordered[left_out], statistics.median(ordered), ordered[-1 - left_out])


class Racer:
    """A step that is timed on one batch and a state of its own, which is made in its first turn.

    Args:
        step: the step.
        begin: makes a state that nothing else uses.
        batch: the batch.
        device: where both are.
        needs: bytes that it takes at its peak; 0 if that is not known.
    """

    def __init__(
        self, step: Step, begin: Callable[[], TrainState], batch: PyTree, device: torch.device, needs: int = 0
    ) -> None:
        self._step, self._begin, self._batch, self.device, self._needs = step, begin, batch, device, needs
        self._state: TrainState | None = None
        self._steps = 0

    @property
    def fits(self) -> bool:
        """Whether it has its state already, or there is memory for it beside what the others have."""
        free = None if self._state is not None else backends.of(self.device).free()
        return free is None or self._needs <= free

    def turn(self) -> float:
        """Return the seconds of a step, over as many of them as fill a turn."""
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
    """Return the seconds that a piece of work takes; waits for the device before it and after it."""
    wait = backends.of(device).synchronize
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def race(
    racers: Mapping[str, Racer], rounds: int, *, is_result: Callable[[str, Exception], bool]
) -> dict[str, list[float] | Exception]:
    """Return the seconds of a step of each racer, round by round, or the error that ended it.

    One round more, which is not counted, comes first. Every other round runs in reverse order, so that no racer always
    follows the same one. Where a racer does not fit beside the states of the others, or runs out of memory, the others
    release theirs, and make new ones when it is their turn.

    Args:
        racers: name -> racer.
        rounds: how often each has its turn.
        is_result: ``(name, error) -> bool``, whether an error is a result.

    Raises:
        Exception: of a racer, if it is no result.
    """
    times: dict[str, list[float]] = {name: [] for name in racers}
    errors: dict[str, Exception] = {}
    # A collection would slow down the racer in whose turn it happens; all start with the same clean heap.
    gc.collect()
    for number in range(rounds + 1):
        for name in list(racers)[:: -1 if number % 2 else 1]:
            if name in errors:
                continue
            try:
                times[name].append(_turn(racers, name))
            except Exception as error:  # Of any kind: the others go on.
                racers[name].close()
                if not is_result(name, error):
                    raise
                release(error, racers[name].device)
                errors[name] = error
    _close(racers)
    return {name: errors.get(name, seconds[1:]) for name, seconds in times.items()}


def _turn(racers: Mapping[str, Racer], name: str) -> float:
    # Asked first: a host that runs out of memory raises nothing, and its kernel ends the process.
    if racers[name].fits:
        try:
            return racers[name].turn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _close(racers)
            release(error, racers[name].device)
    else:
        _close(racers)
    return racers[name].turn()


def _close(racers: Mapping[str, Racer]) -> None:
    for racer in racers.values():
        racer.close()


class Loading(NamedTuple):
    """Seconds for each batch of a source of data.

    Args:
        alone: to get it, and do nothing with it.
        ready: to make a step of it when it is on the device already.
        together: to get it and make a step of it.
    """

    alone: float
    ready: float
    together: float

    @property
    def waiting(self) -> float:
        """Share of the time in which the device has nothing to do: at most that of the data."""
        return min(max(0.0, 1 - self.ready / self.together), self.alone / self.together)


def loading(step: Step, state: TrainState, data: Iterable[PyTree], device: torch.device) -> Loading:
    """Time a source of data and a step that is fed by it; the position of the data is restored.

    Args:
        step: the step.
        state: one that nothing else uses.
        data: batches, which can be iterated several times.
        device: where the state is.

    Raises:
        DataError: when the data can be iterated only once, or has fewer than two batches.
    """
    if isinstance(data, Iterator) or not isinstance(data, Iterable):
        raise DataError(
            f"hints, ladder: data is {type(data).__name__}; needs batches that can be iterated several times, such as "
            "those of ft.data.loader"
        )
    position = sources.position(data)

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
            took = seconds(partial(run, batch), device)
            count = min(MOST_BATCHES, max(2, round(ENOUGH_SECONDS / took)))
            loaded = list(batches(count))
            if len(loaded) > 1:
                # In turns: the first pass may find a machine that is still busy with something else.
                passes = [
                    [_pass(batches(count), id, device), _pass(loaded, run, device), _pass(batches(count), run, device)]
                    for _ in range(PASSES)
                ]
                return Loading(*(statistics.median(column) for column in zip(*passes, strict=True)))
        raise DataError("data has fewer than two batches; needs two or more")
    finally:
        if position is not None:
            sources.seek(data, position)


def _pass(batches: Iterable[PyTree], work: Callable[[PyTree], object], device: torch.device) -> float:
    """Return the seconds for a batch of a pass, without the first batch, before which workers start."""
    rest = iter(batches)
    work(next(rest))
    count = 0

    def work_on_rest() -> None:
        nonlocal count
        for batch in rest:
            work(batch)
            count += 1

    return seconds(work_on_rest, device) / max(count, 1)
