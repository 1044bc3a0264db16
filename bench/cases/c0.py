"""The cost of a step when there is nothing to compute, and what each parameter adds."""

from __future__ import annotations

import dataclasses

from bench import field
from bench.compiling import compile_rows
from bench.race import race
from bench.rows import SKIPPED, TIME, Row, said
from bench.settings import Settings

NULL = "C0 null model"
COUNTS = (10, 100, 1_000, 10_000)
SWEPT = (field.HAND_EAGER, field.HAND_COMPILED, field.OURS_EAGER, field.OURS_COMPILED)
COMPILED = {field.HAND_COMPILED.name, field.OURS_COMPILED.name}
MOST_COMPILED = 1_000
PATIENCE = 150.0


def run(settings: Settings) -> list[Row]:
    """Race on the null model, then sweep the number of leaves."""
    entrants = (*field.everyone(settings, smoke=False), field.OURS_KEEPING, field.HAND_APART)
    rows = race(NULL, settings.task("null"), entrants, settings)
    for entrant in (field.HAND_COMPILED, field.OURS_COMPILED):
        rows += compile_rows(NULL, entrant, settings.task("null"))
    swept = {count: _sweep(count, settings) for count in COUNTS}
    return rows + [row for found in swept.values() for row in found] + _slopes(swept)


def title(count: int) -> str:
    """The name of the question about so many leaves."""
    return f"C0 {count:,} leaves"


def _sweep(count: int, settings: Settings) -> list[Row]:
    question, entrants, left_out = title(count), [], []
    for entrant in SWEPT:
        if entrant.name in COMPILED and count > MOST_COMPILED and not settings.tiny:
            left_out.append(said(question, entrant.name, SKIPPED, f"compiling {count:,} leaves takes many minutes"))
        elif entrant.name in COMPILED and count >= MOST_COMPILED and not settings.tiny:
            # Apart, so that one that compiles for too long can be given up.
            entrants.append(dataclasses.replace(entrant, apart=True, patience=PATIENCE))
        else:
            entrants.append(entrant)
    task = settings.task(f"leaves {count}")
    return race(question, task, entrants, settings, part=0.5 if count <= 100 else 0.2) + left_out


def _slopes(swept: dict[int, list[Row]]) -> list[Row]:
    """What a leaf adds, from the fewest leaves to the most that an entrant was timed with."""
    rows = []
    for entrant in SWEPT:
        times = {
            count: row.median
            for count, found in swept.items()
            for row in found
            if row.variant == entrant.name and row.metric == TIME
        }
        if len(times) > 1:
            fewest, most = min(times), max(times)
            slope = (times[most] - times[fewest]) / (most - fewest)
            note = f"from {fewest:,} to {most:,} leaves; the work on them is included"
            rows.append(Row("C0 leaves", entrant.name, "added a leaf", "us", slope, slope, slope, note=note))
    return rows
