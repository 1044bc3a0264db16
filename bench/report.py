"""The report: made from the rows, and from nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.claims import ON_RANKS, Verdict, judge, times
from bench.plots import plot
from bench.rows import FAILED, MISSING, RATIO, SKIPPED, TIME, Row, read

RANKS = Path(__file__).parents[1] / "docs" / "parallel.md"
BEGIN, END = "<!-- written by python -m bench -->", "<!-- end of what is written -->"
NOTES = (MISSING, FAILED, SKIPPED)
INTRODUCTION = """# Bench

Made by `python -m bench` from the rows in `bench/results`; nothing here is written by hand. A ratio is ftrain's time
over the other's, so less than 1 is faster: the median over rounds in which both took a turn, with its 95% bootstrap
interval. That interval knows of the noise within one run; another run or machine differs by more. Before a case is
timed, the losses of the first steps of all entrants are compared, and a case whose maths differs is not timed.
"""


def write_report(folder: Path) -> Path:
    """Write the report of the rows of a folder, into its parent when it is the one that is kept."""
    rows = read(folder)
    path = (folder.parent if folder.name == "results" else folder) / "REPORT.md"
    drawn = plot(rows, folder / "plots")
    path.write_text(report(rows, [str(p.relative_to(path.parent)) for p in drawn]), encoding="utf-8")
    if folder.name == "results":
        RANKS.write_text(fill(RANKS.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return path


def fill(page: str, rows: Sequence[Row]) -> str:
    """Return the text of a page with the claims about many ranks between its two marks, as the rows bear them out."""
    head, rest = page.split(BEGIN)
    lines = [_verdict(verdict)[:6] for verdict in judge(rows, ON_RANKS)]
    filled = table(("ratio of medians", "must", "aim", "measured", "95%", "met"), lines)
    return f"{head}{BEGIN}\n\n{filled}\n{END}{rest.split(END)[1]}"


def report(rows: Sequence[Row], drawn: Sequence[str] = ()) -> str:
    """Return the text: machines, claims, then every question with its times, its other figures and what is missing."""
    parts = [INTRODUCTION, "## Machines\n", _machines(rows), "## Claims\n", _claims(judge(rows))]
    parts += [_question(rows, question) for question in dict.fromkeys(row.question for row in rows)]
    if drawn:
        parts += ["## Plots\n", "\n".join(f"![{Path(name).stem}]({name})" for name in drawn), ""]
    return "\n".join(parts)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    shown = [" | ".join(line) for line in (head, ["---"] * len(head), *lines)]
    return "".join(f"| {line} |\n" for line in shown)


def number(value: float) -> str:
    """Four digits, or nothing for what is not a number."""
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _machines(rows: Sequence[Row]) -> str:
    cases_of_machine: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        cases = cases_of_machine.setdefault((row.device, row.torch, row.commit), [])
        case = row.question.split()[0]
        if case not in cases:
            cases.append(case)
    lines = [(*where, ", ".join(cases)) for where, cases in cases_of_machine.items()]
    return table(("machine", "torch", "commit", "cases"), lines)


def _claims(verdicts: Sequence[Verdict]) -> str:
    text = "Of all cases and peers the worst one counts. Less is better.\n\n"
    head = ("claim", "must", "aim", "measured", "95%", "met", "worst of", "where")
    tried = [f"- {v.claim.text}: {v.claim.tried}" for v in verdicts if v.word == "short" and v.claim.tried]
    notes = "\nWhat was tried where it falls short, and what remains:\n\n" + "\n".join(tried) + "\n" if tried else ""
    return text + table(head, [_verdict(verdict) for verdict in verdicts]) + notes


def _verdict(verdict: Verdict) -> tuple[str, ...]:
    claim, worst = verdict.claim, verdict.worst
    bounds = f"{claim.must:g} {claim.unit}".strip(), f"{claim.aim:g} {claim.unit}".strip()
    if worst is None:
        return claim.text, *bounds, "", "", verdict.word, "0", ""
    where = f"{worst.question}: {worst.variant}, {worst.metric}; {worst.device}"
    return (
        claim.text,
        *bounds,
        number(worst.median),
        _interval(worst),
        verdict.word,
        str(verdict.count),
        where,
    )


def _interval(row: Row) -> str:
    return "" if math.isnan(row.low) else f"{number(row.low)} to {number(row.high)}"


def _question(rows: Sequence[Row], question: str) -> str:
    of_question = [row for row in rows if row.question == question]
    ordered = times(of_question, question)
    text = f"## {question}\n\n{of_question[0].device}, torch {of_question[0].torch}, commit {of_question[0].commit}\n\n"
    if ordered:
        lines = [(row.variant, *(number(v) for v in (row.p20, row.median, row.p80))) for row in ordered]
        text += table(("us a step", "20%", "median", "80%"), lines) + "\n"
    compared = [row for row in of_question if row.metric.startswith(RATIO) and row.variant.startswith("ft")]
    text += _ratios(compared) if compared else ""
    others = [row for row in of_question if row.metric not in (TIME, *NOTES) and row not in compared]
    if others:
        lines = [(r.variant, r.metric, f"{number(r.median)} {r.unit}".strip(), _interval(r), r.note) for r in others]
        text += table(("variant", "metric", "median", "95%", "note"), lines) + "\n"
    return text + "".join(f"* {row.variant}: {row.metric}. {row.note}\n" for row in of_question if row.metric in NOTES)


def _ratios(rows: Sequence[Row]) -> str:
    """Each of ftrain's variants in a column, each of the others in a line."""
    variants = list(dict.fromkeys(row.variant for row in rows))
    cells = {(row.metric, row.variant): f"{number(row.median)} ({_interval(row)})" for row in rows}
    metrics = dict.fromkeys(row.metric for row in rows)
    lines = [(name.removeprefix(RATIO), *(cells.get((name, variant), "") for variant in variants)) for name in metrics]
    return table((RATIO.strip(), *variants), lines) + "\n"
