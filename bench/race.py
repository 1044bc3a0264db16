"""One question from start to end: get entrants ready, compare their maths, time them in turns, and make the rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from bench.memory import Peak, peak
from bench.problems import flops
from bench.rows import ADDED, FAILED, MEMORY, MISSING, RATIO, SKIPPED, TIME, WITHIN, Row, measured, said
from bench.same import MathsError, require_same
from bench.settings import Settings
from bench.stats import differences, pairwise
from bench.tasks import Entrant, Task, absent
from bench.timing import Racer, interleaved, racer

CHECKED = 3
"""How many losses are compared."""


def race(
    question: str,
    task: Task,
    entrants: Iterable[Entrant],
    settings: Settings,
    *,
    part: float = 1.0,
    steps: int | None = None,
    checked: int = CHECKED,
    tolerance: str = "",
    make: Callable[[Entrant, Task], Racer] = racer,
    added: Iterable[tuple[Entrant, Entrant]] = (),
) -> list[Row]:
    """Race entrants, and return the rows.

    Args:
        question: what is asked.
        task: what they train.
        entrants: who races; whose maths the others are held to is first.
        settings: of the run.
        part: of the rounds of the run.
        steps: of a turn. Default: as many as fill the seconds of the settings.
        checked: how many losses are compared.
        tolerance: a precision, whose difference of losses is allowed. Default: that of the task.
        make: makes an entrant ready.
        added: pairs of entrants; for each a row says what the first adds to the time of the second.
    """
    print(question, flush=True)
    contest = _Race(question, task, settings)
    try:
        contest.enter(entrants, checked, make)
        times = contest.time(settings.share(part), steps, tolerance or task.precision)
        for entrant, base in added:
            contest.add_difference(times, entrant.name, base.name)
    finally:
        contest.close()
    return contest.rows


class _Race:
    """The entrants of one question, those that are ready, and the rows so far."""

    def __init__(self, question: str, task: Task, settings: Settings) -> None:
        self.question, self.task, self.settings = question, task, settings
        self.rows: list[Row] = []
        self._racers: dict[str, Racer] = {}
        self._losses: dict[str, list[float]] = {}
        self._kinds: dict[str, str] = {}
        if settings.place.type == "cuda":
            # As one sets it at the start of a program; ftrain sets it for its own step.
            torch.set_float32_matmul_precision("high" if task.precision == "tf32" else "highest")

    def enter(self, entrants: Iterable[Entrant], checked: int, make: Callable[[Entrant, Task], Racer]) -> None:
        """Get entrants ready; who cannot gets a row that says why."""
        for entrant in entrants:
            if self.settings.late():
                self._say(entrant, SKIPPED, "the time of the run was used up")
                continue
            try:
                self._prepare(entrant, checked, make)
            except TimeoutError as error:
                self._say(entrant, SKIPPED, f"getting ready (compiling) took too long: {error}")
            except Exception as error:
                # An entrant that does not run is a result, and must not take the others with it.
                text = str(error) if absent(error) else f"{type(error).__name__}: {str(error)[-200:]}"
                self._say(entrant, MISSING if absent(error) else FAILED, text)

    def time(self, rounds: int, steps: int | None, tolerance: str) -> dict[str, list[float]]:
        """Compare the losses, then time all entrants that are ready; return microseconds a step by round."""
        if not self._racers:
            return {}
        try:
            difference = require_same(self._losses, tolerance)
        except MathsError as error:
            self.rows.append(said(self.question, "all", FAILED, str(error)))
            return {}
        self.rows.append(measured(self.question, "all", "largest difference of losses", "", [difference]))
        try:
            times = interleaved(self._racers, rounds=rounds, seconds=self.settings.seconds, steps=steps)
        except Exception as error:
            self.rows.append(said(self.question, "all", FAILED, f"while timed: {type(error).__name__}: {error}"))
            return {}
        for name, values in times.items():
            self.rows.append(measured(self.question, name, TIME, "us", values))
            self.rows += self._rates(name, values)
        self.rows += self._ratios(times)
        return times

    def add_difference(self, times: dict[str, list[float]], name: str, base: str) -> None:
        """Add a row of what an entrant adds to the time of another, when both were timed."""
        if name in times and base in times:
            values = differences(times[name], times[base])
            self.rows.append(measured(self.question, name, f"{ADDED}{base}", "us", values, sure=True))

    def close(self) -> None:
        """Drop all entrants."""
        for one in self._racers.values():
            one.close()
        self._racers.clear()
        torch.compiler.reset()
        gc.collect()
        if self.settings.place.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self, entrant: Entrant, checked: int, make: Callable[[Entrant, Task], Racer]) -> None:
        # The allocator of this process knows nothing of other processes: those of an entrant, or ranks.
        is_here = make is racer and not entrant.in_own_process
        on_gpu = self.settings.place.type == "cuda" and is_here
        at_start = torch.cuda.memory_allocated() if on_gpu else 0
        start = time.perf_counter()
        if on_gpu:
            # Before a graph is recorded, whose replays do not ask the allocator for memory.
            torch.cuda.reset_peak_memory_stats()
        one = make(entrant, self.task)
        try:
            losses = one.losses(checked)
            seconds = time.perf_counter() - start
            self.rows.append(measured(self.question, entrant.name, "time to get ready", "s", [seconds]))
            if on_gpu:
                one.turn(2)
                used = (torch.cuda.max_memory_allocated() - at_start) / 1e6
                self.rows.append(measured(self.question, entrant.name, MEMORY, "MB", [used]))
        except BaseException:
            one.close()
            raise
        self._racers[entrant.name] = one
        if entrant.checked:
            self._losses[entrant.name] = losses
        self._kinds[entrant.name] = entrant.kind
        print(f"  ready: {entrant.name}", flush=True)

    def _say(self, entrant: Entrant, what: str, why: str) -> None:
        self.rows.append(said(self.question, entrant.name, what, why))
        print(f"  {what}: {entrant.name}: {' '.join(why.split())[:160]}", flush=True)

    def _ratios(self, times: dict[str, list[float]]) -> list[Row]:
        """Ftrain's time over that of every other, and a control's over the first one's."""
        first = next(iter(times))
        pairs = [
            (name, other)
            for name in times
            for other in times
            if name != other and (self._kinds[name] == "ours" or (self._kinds[name] == "control" and other == first))
        ]
        return [
            measured(self.question, name, f"{RATIO}{other}", "", pairwise(times[name], times[other]), sure=True)
            for name, other in pairs
        ]

    def _rates(self, name: str, values: Sequence[float]) -> list[Row]:
        sizes, rows = self.task.sizes, []
        if sizes.length:
            tokens = [sizes.batch * sizes.length / value * 1e6 for value in values]
            rows.append(measured(self.question, name, "throughput", "tokens/s", tokens))
        ceiling = self.settings.ceilings.get(self.task.precision)
        if ceiling and sizes.length:
            with torch.device("meta"):
                work = flops(self.task.spec.model(sizes), sizes)
            used = [work / value / 1e6 / ceiling * 100 for value in values]
            rows.append(measured(self.question, name, "MFU of the measured ceiling", "%", used))
        return rows


def memory_rows(
    question: str,
    task: Task,
    entrants: Sequence[Entrant],
    settings: Settings,
    peak: Callable[[Entrant, Task], Peak] = peak,
) -> list[Row]:
    """Rows of peak memory of entrants, each in processes of its own, and of their ratios to the first one."""
    peaks: dict[str, Peak] = {}
    rows = []
    base = entrants[0].name
    for entrant in entrants:
        if settings.late():
            rows.append(said(question, entrant.name, SKIPPED, f"{MEMORY}: the time of the run was used up"))
            continue
        try:
            peaks[entrant.name] = peak(entrant, task)
        except Exception as error:
            what = MISSING if absent(error) else FAILED
            rows.append(said(question, entrant.name, what, f"{MEMORY}: {str(error)[-200:]}"))
            continue
        rows.append(measured(question, entrant.name, MEMORY, "MB", [peaks[entrant.name].most / 1e6]))
        rows.append(measured(question, entrant.name, WITHIN, "MB", [peaks[entrant.name].within / 1e6]))
    for name in peaks.keys() - {base} if base in peaks else ():
        for metric, bytes_held, base_bytes in zip((MEMORY, WITHIN), peaks[name], peaks[base], strict=True):
            # What is tiny may hold less than a page.
            if bytes_held > 0 and base_bytes > 0:
                rows.append(measured(question, name, f"{metric}, {RATIO}{base}", "", [bytes_held / base_bytes]))
    return rows
