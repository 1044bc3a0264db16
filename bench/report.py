"""The report, which is made from the rows alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.cases import c9, c11
from bench.claims import ON_RANKS, Verdict, check_claims, times
from bench.plots import plot
from bench.registry import ADAMW
from bench.rows import FAILED, MISSING, RATIO, SKIPPED, TIME, Row, read

PARALLEL_PAGE = Path(__file__).parents[1] / "docs" / "parallel.md"
BEGIN, END = "<!-- written by python -m bench -->", "<!-- end of what is written -->"
WITHOUT_NUMBER = (MISSING, FAILED, SKIPPED)
INTRODUCTION = """# Bench

`python -m bench` writes this page from the rows in `bench/results`. Only the notes below the claims are written by hand
(`bench/claims.py`); they also name figures of runs whose rows are not stored.

A ratio is the time of ftrain divided by that of the other entrant: below 1, ftrain is faster. It is the median of the
ratios of all rounds, with its 95% bootstrap interval. The interval covers the noise within one run; other runs and
machines differ by more. Some questions have only five or six rounds, of which the interval is nearly the whole range.
Before the entrants of a question are timed, the losses of their first steps are compared. If they differ, none is
timed.

The rows of a question are of one run, on the machine and the commit that are named below its title; a later commit may
be faster or slower. A plus after a commit means that files differed from it.
"""
OTHER_WORK = {ADAMW.name, c11.ALONE.name, c11.BOUND.name, c9.KEEPING_ALL.name, "checkpoint.save, no fsync"}
"""Entrants that do other or less work than those of ftrain, and only show what the rest of it costs."""


def write_report(folder: Path) -> Path:
    """Write the report on the rows of a folder, and return its path.

    The report on ``bench/results`` goes into ``bench/``, and its claims about many ranks into ``docs/parallel.md``. The
    report on any other folder goes into that folder.
    """
    rows = read(folder)
    is_kept = folder.name == "results"
    path = (folder.parent if is_kept else folder) / "REPORT.md"
    plots = [str(file.relative_to(path.parent)) for file in plot(rows, folder / "plots")]
    path.write_text(report(rows, plots), encoding="utf-8")
    if is_kept:
        PARALLEL_PAGE.write_text(fill_claims(PARALLEL_PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return path


def fill_claims(page: str, rows: Sequence[Row]) -> str:
    """Return the text of a page with the table of the claims about many ranks between its two marks."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    head = ("ratio of medians", "limit", "target", "measured", "95%", "result")
    table = markdown_table(head, [_claim_cells(verdict)[: len(head)] for verdict in check_claims(rows, ON_RANKS)])
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def report(rows: Sequence[Row], plots: Sequence[str] = ()) -> str:
    """Return the text of the report: machines, claims, and for each question its times and other figures."""
    parts = [INTRODUCTION, "## Machines\n", _machines(rows), "## Claims\n", _claims(check_claims(rows)), _faster(rows)]
    parts += [_question(rows, question) for question in dict.fromkeys(row.question for row in rows)]
    if plots:
        parts += ["## Plots\n", "\n".join(f"![{Path(name).stem}]({name})" for name in plots), ""]
    return "\n".join(parts)


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    joined = [" | ".join(line) for line in (head, ["---"] * len(head), *lines)]
    return "".join(f"| {line} |\n" for line in joined)


def format_number(value: float) -> str:
    """Return a number with four digits, or an empty text for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _machines(rows: Sequence[Row]) -> str:
    cases_of: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        cases = cases_of.setdefault((row.device, row.torch, row.commit), [])
        case = row.question.split()[0]
        if case not in cases:
            cases.append(case)
    lines = [(*origin, ", ".join(cases)) for origin, cases in cases_of.items()]
    return markdown_table(("machine", "torch", "commit", "cases"), lines)


def _claims(verdicts: Sequence[Verdict]) -> str:
    text = (
        "Each claim has a limit and a target. It counts rows of the cases in the column of rows; the worst of them "
        "decides, not a mean, and its median decides also where the limit is within its interval. Less is better. No "
        "claim counts rows of a GPU.\n\n"
    )
    head = ("claim", "limit", "target", "measured", "95%", "result", "rows", "worst row")
    text += markdown_table(head, [_claim_cells(verdict) for verdict in verdicts])
    notes = [
        f"- {verdict.claim.text}: {verdict.claim.notes}\n"
        for verdict in verdicts
        if verdict.result == "limit missed" and verdict.claim.notes
    ]
    if notes:
        text += "\nWhere a limit is missed: why, and what was tried.\n\n" + "".join(notes)
    return text


def _claim_cells(verdict: Verdict) -> tuple[str, ...]:
    claim, worst = verdict.claim, verdict.worst
    limit, target = (f"{bound:g} {claim.unit}".strip() for bound in (claim.limit, claim.target))
    if worst is None:
        return claim.text, limit, target, "", "", verdict.result, "0", ""
    return (
        claim.text,
        limit,
        target,
        format_number(worst.median),
        _interval(worst),
        verdict.result,
        f"{len(verdict.rows)} of {verdict.cases}",
        f"{worst.question}: {worst.variant}, {worst.metric}; {worst.device}",
    )


def _faster(rows: Sequence[Row]) -> str:
    """Return the section of the entrants that are faster than each entrant of ftrain that took turns with them."""
    # Only entrants of ftrain, and loops that are controls, have ratios.
    ratios = [row for row in rows if row.metric.startswith(RATIO) and not row.variant.startswith("loop,")]
    ours = {(row.question, row.variant) for row in ratios}
    fastest: dict[tuple[str, str], Row] = {}
    for row in ratios:
        key = row.question, row.metric.removeprefix(RATIO)
        if key not in ours and key[1] not in OTHER_WORK and (key not in fastest or row.median < fastest[key].median):
            fastest[key] = row
    lines = [
        (question, other, row.variant, format_number(row.median), _interval(row), row.device)
        for (question, other), row in fastest.items()
        if row.median > 1
    ]
    text = (
        "## Where others are faster\n\nEntrants that are faster than each entrant of ftrain that took turns with them, "
    )
    text += "on a CPU or a GPU.\n\n"
    head = ("question", "faster", "the fastest of ftrain", "ratio", "95%", "machine")
    return text + markdown_table(head, lines)


def _interval(row: Row) -> str:
    return "" if math.isnan(row.low) else f"{format_number(row.low)} to {format_number(row.high)}"


def _question(rows: Sequence[Row], question: str) -> str:
    """Return the section of a question: step times, ratios, other metrics, and the entrants that were not measured."""
    rows = [row for row in rows if row.question == question]
    ratios = [row for row in rows if row.metric.startswith(RATIO) and row.variant.startswith("ft")]
    others = [row for row in rows if row.metric not in (TIME, *WITHOUT_NUMBER) and row not in ratios]
    text = f"## {question}\n\n{rows[0].device}, torch {rows[0].torch}, commit {rows[0].commit}\n\n"
    if step_times := times(rows, question):
        lines = [(row.variant, *(format_number(v) for v in (row.p20, row.median, row.p80))) for row in step_times]
        text += markdown_table(("us a step", "20%", "median", "80%"), lines) + "\n"
    if ratios:
        text += _ratios(ratios)
    if others:
        lines = [
            (row.variant, row.metric, f"{format_number(row.median)} {row.unit}".strip(), _interval(row), row.note)
            for row in others
        ]
        text += markdown_table(("variant", "metric", "median", "95%", "note"), lines) + "\n"
    return text + "".join(
        f"* {row.variant}: {row.metric}. {row.note}\n" for row in rows if row.metric in WITHOUT_NUMBER
    )


def _ratios(rows: Sequence[Row]) -> str:
    """Return a table with a column for each variant of ftrain and a line for each other entrant."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    cells = {(row.metric, row.variant): f"{format_number(row.median)} ({_interval(row)})" for row in rows}
    lines = []
    for metric in dict.fromkeys(row.metric for row in rows):
        lines.append((metric.removeprefix(RATIO), *(cells.get((metric, variant), "") for variant in variants)))
    return markdown_table((RATIO.strip(), *variants), lines) + "\n"
