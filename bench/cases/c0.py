"""The cost of a step when there is nothing to compute, and what each parameter adds."""

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
"""In a quick and in a full run; more would compile for many minutes."""
TIMEOUT = 600.0
MOST_CALLED = 1_000


def run(settings: Settings) -> list[Row]:
    """Race on the null model, then sweep the number of leaves."""
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
    """The name of the question about so many leaves."""
    return f"C0 {count:,} leaves"


def _sweep(count: int, settings: Settings) -> list[Row]:
    question, entrants, left_out = title(count), [], []
    most = COUNTS[-1] if settings.tiny else MOST_COMPILED[settings.full]
    for entrant in SWEPT:
        if entrant.name in COMPILED and count > most:
            left_out.append(unmeasured(question, entrant.name, SKIPPED, f"compiling {count:,} leaves takes minutes"))
        elif entrant.name in COMPILED and count > MOST_COMPILED[False] and not settings.tiny:
            # In a process of its own, so that one that compiles for too long can be given up.
            entrants.append(dataclasses.replace(entrant, own_process=True, timeout=TIMEOUT))
        else:
            entrants.append(entrant)
    part = 0.4 if count <= 100 else 0.2
    return race(question, settings.task(f"leaves {count}"), entrants, settings, fraction=part) + left_out


def _race_calls(count: int, settings: Settings) -> list[Row]:
    """Time the calls of a compiled step alone; the work is left out, so the losses are those of one step."""
    question, task = f"{title(count)}, calls alone", settings.task(f"leaves {count}")
    return race(question, task, [registry.OURS_CALLS], settings, fraction=0.5, compared=1)


def _slopes(swept: dict[int, list[Row]], entrants: Sequence[Entrant]) -> list[Row]:
    """What a leaf adds, from the fewest leaves to the most that an entrant was timed with."""
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
