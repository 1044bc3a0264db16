"""One question from start to end: prepare its entrants, compare their losses, time them in turns, return the rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence

import torch

from bench.loss_check import LossMismatchError, require_same_losses
from bench.memory import Peak, peak
from bench.problems import flops
from bench.rows import ADDED, FAILED, MEMORY, MISSING, RATIO, SKIPPED, TIME, WITHIN, Row, measured, unmeasured
from bench.settings import Settings
from bench.stats import paired_differences, paired_ratios
from bench.tasks import Entrant, Task, is_missing
from bench.timing import Racer, interleaved, make_racer

COMPARED = 3
"""How many losses of each entrant are compared."""


def race(
    question: str,
    task: Task,
    entrants: Iterable[Entrant],
    settings: Settings,
    *,
    fraction: float = 1.0,
    steps: int | None = None,
    compared: int = COMPARED,
    tolerance: str = "",
    make: Callable[[Entrant, Task], Racer] = make_racer,
    added: Iterable[tuple[Entrant, Entrant]] = (),
    known: dict[str, list[float]] | None = None,
) -> list[Row]:
    """Time entrants in turns and return the rows.

    An entrant that fails gets a row without a number, which says why. If losses differ, no entrant is timed.

    Args:
        question: the name of the question.
        task: what the entrants train.
        entrants: the entrants; the losses of all others are compared with those of the first one.
        settings: the settings of the run.
        fraction: the number of rounds as a fraction of that of the settings.
        steps: the number of steps in a turn. Default: as many as take the seconds of the settings.
        compared: how many losses of each entrant are compared.
        tolerance: the precision whose tolerance applies to the losses. Default: that of the task.
        make: makes an entrant ready to be timed.
        added: pairs of entrants. For each pair there is a row of the time of the first minus that of the second.
        known: the losses of entrants of earlier races on the same task, by name; those of this race are added.
    """
    print(question, flush=True)
    race_of_question = _Race(question, task, settings, {} if known is None else known)
    try:
        race_of_question.prepare(entrants, compared, make)
        times = race_of_question.time(settings.scaled_rounds(fraction), steps, tolerance or task.precision)
        for entrant, base in added:
            race_of_question.add_difference(times, entrant.name, base.name)
    finally:
        race_of_question.close()
    return race_of_question.rows


class _Race:
    """One question: its entrants that are ready to be timed, their first losses, and the rows so far."""

    def __init__(self, question: str, task: Task, settings: Settings, losses: dict[str, list[float]]) -> None:
        self.question, self.task, self.settings = question, task, settings
        self.rows: list[Row] = []
        self._racers: dict[str, Racer] = {}
        self._losses = losses
        self._categories: dict[str, str] = {}
        if settings.torch_device.type == "cuda":
            # The loops by hand need this global setting; ftrain sets the precision within its own step.
            torch.set_float32_matmul_precision("high" if task.precision == "tf32" else "highest")

    def prepare(self, entrants: Iterable[Entrant], compared: int, make: Callable[[Entrant, Task], Racer]) -> None:
        """Make entrants ready to be timed. One that fails gets a row without a number, which says why."""
        for entrant in entrants:
            if self.settings.out_of_time():
                self._add_unmeasured(entrant, SKIPPED, "the time of the run was used up")
                continue
            try:
                self._prepare(entrant, compared, make)
            except TimeoutError as error:
                self._add_unmeasured(entrant, SKIPPED, f"getting ready (compiling) took too long: {error}")
            except Exception as error:
                # That an entrant fails is a result; the others are timed all the same.
                if is_missing(error):
                    self._add_unmeasured(entrant, MISSING, str(error))
                else:
                    self._add_unmeasured(entrant, FAILED, f"{type(error).__name__}: {str(error)[-200:]}")

    def time(self, rounds: int, steps: int | None, tolerance: str) -> dict[str, list[float]]:
        """Compare the losses, then time all entrants that are ready.

        Returns, by name of the entrant, microseconds a step in each round; nothing if the losses differ or one fails.
        """
        if not self._racers:
            return {}
        try:
            difference = require_same_losses(self._losses, tolerance)
        except LossMismatchError as error:
            self.rows.append(unmeasured(self.question, "all", FAILED, str(error)))
            return {}
        if len(self._losses) > 1:
            self.rows.append(measured(self.question, "all", "largest difference of losses", "", [difference]))
        try:
            times = interleaved(self._racers, rounds=rounds, seconds=self.settings.seconds, steps=steps)
        except Exception as error:
            self.rows.append(unmeasured(self.question, "all", FAILED, f"while timed: {type(error).__name__}: {error}"))
            return {}
        for name, values in times.items():
            self.rows.append(measured(self.question, name, TIME, "us", values))
            self.rows += self._rates(name, values)
        self.rows += self._ratios(times)
        return times

    def add_difference(self, times: dict[str, list[float]], name: str, base: str) -> None:
        """Add a row of the time of one entrant minus that of another, if both were timed."""
        if name in times and base in times:
            values = paired_differences(times[name], times[base])
            self.rows.append(measured(self.question, name, f"{ADDED}{base}", "us", values, interval=True))

    def close(self) -> None:
        """Close all entrants and free their memory."""
        for racer in self._racers.values():
            racer.close()
        self._racers.clear()
        torch.compiler.reset()
        gc.collect()
        if self.settings.torch_device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self, entrant: Entrant, compared: int, make: Callable[[Entrant, Task], Racer]) -> None:
        # The allocator's statistics of this process do not include other processes, such as those of ranks.
        in_this_process = make is make_racer and not entrant.own_process
        measures_memory = self.settings.torch_device.type == "cuda" and in_this_process
        bytes_before = torch.cuda.memory_allocated() if measures_memory else 0
        if measures_memory:
            # Reset before a CUDA graph is captured: its replays allocate nothing, so they would not count.
            torch.cuda.reset_peak_memory_stats()
        racer = make(entrant, self.task)
        try:
            losses = racer.losses(compared)
            if measures_memory:
                racer.turn(2)
                megabytes = (torch.cuda.max_memory_allocated() - bytes_before) / 1e6
                self.rows.append(measured(self.question, entrant.name, MEMORY, "MB", [megabytes]))
        except BaseException:
            racer.close()
            raise
        self._racers[entrant.name] = racer
        if entrant.compares_losses:
            self._losses[entrant.name] = losses
        self._categories[entrant.name] = entrant.category
        print(f"  ready: {entrant.name}", flush=True)

    def _add_unmeasured(self, entrant: Entrant, metric: str, reason: str) -> None:
        self.rows.append(unmeasured(self.question, entrant.name, metric, reason))
        print(f"  {metric}: {entrant.name}: {' '.join(reason.split())[:160]}", flush=True)

    def _ratios(self, times: dict[str, list[float]]) -> list[Row]:
        """Return the ratios of each entrant of ftrain to every other entrant, and of each control to the first one."""
        first = next(iter(times))
        rows = []
        for name in times:
            if self._categories[name] == "ours":
                others = [other for other in times if other != name]
            elif self._categories[name] == "control" and name != first:
                others = [first]
            else:
                others = []
            for other in others:
                values = paired_ratios(times[name], times[other])
                rows.append(measured(self.question, name, f"{RATIO}{other}", "", values, interval=True))
        return rows

    def _rates(self, name: str, values: Sequence[float]) -> list[Row]:
        """Return the rows of tokens a second and of model FLOPs utilisation, where the task has tokens."""
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
    """Return the rows of the peak memory of entrants, and of its ratios to that of the first entrant.

    Each entrant trains in processes of its own; `peak` measures it.
    """
    peaks: dict[str, Peak] = {}
    rows = []
    base = entrants[0].name
    for entrant in entrants:
        if settings.out_of_time():
            rows.append(unmeasured(question, entrant.name, SKIPPED, f"{MEMORY}: the time of the run was used up"))
            continue
        try:
            peaks[entrant.name] = peak(entrant, task)
        except Exception as error:
            metric = MISSING if is_missing(error) else FAILED
            rows.append(unmeasured(question, entrant.name, metric, f"{MEMORY}: {str(error)[-200:]}"))
            continue
        rows.append(measured(question, entrant.name, MEMORY, "MB", [peaks[entrant.name].total / 1e6]))
        rows.append(measured(question, entrant.name, WITHIN, "MB", [peaks[entrant.name].within_step / 1e6]))
    if base not in peaks:
        return rows
    for name in peaks:
        if name == base:
            continue
        for metric, bytes_held, base_bytes in zip((MEMORY, WITHIN), peaks[name], peaks[base], strict=True):
            # A tiny problem may need less than a page of memory, which is measured as zero or less.
            if bytes_held > 0 and base_bytes > 0:
                rows.append(measured(question, name, f"{metric}, {RATIO}{base}", "", [bytes_held / base_bytes]))
    return rows
