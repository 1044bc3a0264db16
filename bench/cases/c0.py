"""The overhead of a step: its time when there is nothing to compute, and the time that each parameter adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench import registry
from bench.compiling import compile_rows
from bench.race import race
from bench.rows import SKIPPED, TIME, Row, unmeasured
from bench.settings import Settings
from bench.tasks import Entrant

NULL = "C0 null model"
COUNTS = (10, 100, 1_000, 10_000)
SWEPT = (registry.HAND_EAGER, registry.HAND_COMPILED, registry.OURS_EAGER, registry.OURS_COMPILED)
COMPILED = {registry.HAND_COMPILED.name, registry.OURS_COMPILED.name}
MOST_COMPILED = {False: 100, True: 1_000}
"""The largest number of leaves that is compiled in a quick and in a full run; more would compile for many minutes."""
TIMEOUT = 600.0
"""Seconds that a compilation of many leaves may take."""
MOST_CALLED = 1_000
"""The largest number of leaves for which calls alone are timed."""


def run(settings: Settings) -> list[Row]:
    """Time the null model, then models with more and more leaves."""
    entrants = (
        *registry.all_entrants(settings, trainers_in_smoke=False),
        registry.OURS_KEEPING,
        registry.HAND_OWN_PROCESS,
    )
    rows = race(NULL, settings.task("null"), entrants, settings, fraction=0.7)
    if settings.full or settings.smoke:
        rows += compile_rows(NULL, registry.OURS_COMPILED, settings.task("null"))
    swept = {count: _sweep(count, settings) for count in COUNTS}
    calls = {count: _race_calls(count, settings) for count in COUNTS if count <= MOST_CALLED}
    rows += [row for rows_of_count in (*swept.values(), *calls.values()) for row in rows_of_count]
    return rows + _slopes(swept, SWEPT) + _slopes(calls, (registry.OURS_CALLS,))


def title(count: int) -> str:
    """Return the name of the question about this number of leaves."""
    return f"C0 {count:,} leaves"


def _sweep(count: int, settings: Settings) -> list[Row]:
    question, entrants, left_out = title(count), [], []
    most = COUNTS[-1] if settings.tiny else MOST_COMPILED[settings.full]
    for entrant in SWEPT:
        if entrant.name in COMPILED and count > most:
            left_out.append(unmeasured(question, entrant.name, SKIPPED, f"compiling {count:,} leaves takes minutes"))
        elif entrant.name in COMPILED and count > MOST_COMPILED[False] and not settings.tiny:
            # In a process of its own, which can be ended if it compiles for too long.
            entrants.append(dataclasses.replace(entrant, own_process=True, timeout=TIMEOUT))
        else:
            entrants.append(entrant)
    part = 0.4 if count <= 100 else 0.2
    return race(question, settings.task(f"leaves {count}"), entrants, settings, fraction=part) + left_out


def _race_calls(count: int, settings: Settings) -> list[Row]:
    """Time the calls of a compiled step without its computation, which runs only once; so one loss is compared."""
    question, task = f"{title(count)}, calls alone", settings.task(f"leaves {count}")
    return race(question, task, [registry.OURS_CALLS], settings, fraction=0.5, compared=1)


def _slopes(swept: dict[int, list[Row]], entrants: Sequence[Entrant]) -> list[Row]:
    """Return the rows of the time per leaf: the slope between the smallest and the largest number of leaves timed."""
    rows = []
    for entrant in entrants:
        times = {
            count: row.median
            for count, rows_of_count in swept.items()
            for row in rows_of_count
            if row.variant == entrant.name and row.metric == TIME
        }
        if len(times) > 1:
            fewest, most = min(times), max(times)
            slope = (times[most] - times[fewest]) / (most - fewest)
            work = "without" if entrant is registry.OURS_CALLS else "with"
            note = f"from {fewest:,} to {most:,} leaves, {work} the work on them"
            rows.append(Row("C0 leaves", entrant.name, "added a leaf", "us", slope, slope, slope, note=note))
    return rows
