"""The rows of the bench, the claims that are checked against them, and the report."""

import dataclasses
import math

import pytest

from bench import claims, rows
from bench.registry import HAND_EAGER, JAX, OURS_COMPILED, OURS_EAGER, OURS_UPDATE, TRAINERS
from bench.report import report, write_report


def ratio(question, variant, other, median):
    """Return a row of the ratio of a variant to another one."""
    return rows.Row(question, variant, f"{rows.RATIO}{other}", "", median, median, median, median, median, "here")


def test_rows_come_back_as_they_were_written(tmp_path):
    written = [
        rows.measured("C1 test", "a", rows.TIME, "us", [1.0, 2.0, 3.0], interval=True),
        rows.unmeasured("C1 test", "b", rows.MISSING, "no\n  such   thing"),
    ]
    rows.write(written, tmp_path / "C1.csv")
    read = rows.read(tmp_path)
    assert read[0] == written[0]
    # NaN differs from itself, so it is replaced before the rows are compared.
    no_nan = {"p20": 0.0, "median": 0.0, "p80": 0.0, "low": 0.0, "high": 0.0}
    assert dataclasses.replace(read[1], **no_nan) == dataclasses.replace(written[1], **no_nan)
    assert math.isnan(read[1].median)
    assert read[1].note == "no such thing"


def test_a_run_replaces_the_rows_of_its_questions_and_keeps_those_of_others(tmp_path):
    quick, full = (rows.measured(name, "a", rows.TIME, "us", [1.0], interval=True) for name in ("C1 test", "C1 long"))
    rows.write([quick, full, dataclasses.replace(quick, variant="gone")], tmp_path / "C1.csv")
    again = dataclasses.replace(quick, median=2.0)
    rows.write([again], tmp_path / "C1.csv")
    assert rows.read(tmp_path) == [again, full]


def test_the_worst_row_decides_a_claim_and_rows_without_a_number_do_not_count():
    given = [
        ratio("C1 MLP", OURS_COMPILED.name, JAX[0].name, 0.90),
        ratio("C2 GPT", OURS_COMPILED.name, JAX[1].name, 1.02),
        ratio("C10 other", OURS_COMPILED.name, JAX[1].name, 9.0),
        rows.unmeasured("C3 GPT", OURS_COMPILED.name, f"{rows.RATIO}{JAX[0].name}", "missing"),
    ]
    verdicts = {verdict.claim.text: verdict for verdict in claims.check_claims(given)}
    jax = verdicts["compiled step / JAX jit"]
    assert (jax.worst.median, jax.cases, jax.result) == (1.02, "C1, C2", "limit met")
    others = {verdict.result for text, verdict in verdicts.items() if text != "compiled step / JAX jit"}
    assert others == {"not measured"}


@pytest.mark.parametrize(("median", "result"), [(0.90, "target met"), (0.97, "limit met"), (0.98, "limit missed")])
def test_a_claim_is_met_up_to_its_limit_and_target(median, result):
    best = next(entrant for entrant in TRAINERS if entrant.best)
    given = [ratio("C1 MLP", OURS_COMPILED.name, best.name, median)]
    text = "compiled step / trainers at their best"
    assert next(v.result for v in claims.check_claims(given) if v.claim.text == text) == result


def test_the_report_shows_machines_claims_figures_and_missing_entrants():
    given = [
        ratio("C1 MLP", OURS_COMPILED.name, JAX[0].name, 1.5),
        dataclasses.replace(rows.measured("C1 MLP", "loop, eager", rows.TIME, "us", [1234.0]), device="here"),
        rows.unmeasured("C1 MLP", "Fabric, best", rows.MISSING, "No module named 'lightning'"),
    ]
    text = report(given, ["plots/c1-mlp.svg"])
    assert "| compiled step / JAX jit | 1.05 | 0.95 | 1.5 | 1.5 to 1.5 | limit missed | 1 of C1 |" in text
    assert "| loop, eager | 1,234 | 1,234 | 1,234 |" in text
    assert "* Fabric, best: missing. No module named 'lightning'" in text
    assert "| here |" in text
    assert "![c1-mlp](plots/c1-mlp.svg)" in text


def test_a_report_of_no_rows_is_a_report(tmp_path):
    assert "not measured" in write_report(tmp_path).read_text(encoding="utf-8")


def test_claims_count_the_null_model_and_the_loop_with_the_same_products():
    given = [
        ratio("C0 null model", OURS_EAGER.name, HAND_EAGER.name, 1.3),
        ratio("C0 null model", OURS_COMPILED.name, JAX[1].name, 2.8),
        ratio("C3 GPT", OURS_COMPILED.name, "loop, torch.compile(model), matmuls at medium", 1.1),
        ratio("C8 schedule_free_adamw, 10 leaves", OURS_UPDATE.name, "schedulefree", 1.2),
    ]
    missed = {verdict.claim.text for verdict in claims.check_claims(given) if verdict.result == "limit missed"}
    assert missed == {
        "eager step / eager loop by hand",
        "compiled step / JAX jit",
        "compiled step / torch.compile loops, GEMM-bound",
        "optimizer update, eager / lion-pytorch, schedulefree, torchao",
    }


def test_the_report_lists_who_is_faster_than_each_entrant_of_ftrain():
    given = [
        ratio("C1 MLP", OURS_EAGER.name, JAX[0].name, 3.0),
        ratio("C1 MLP", OURS_EAGER.name, HAND_EAGER.name, 1.2),
        ratio("C1 MLP", OURS_EAGER.name, OURS_COMPILED.name, 2.0),
        ratio("C1 MLP", OURS_COMPILED.name, JAX[0].name, 1.5),
        ratio("C1 MLP", OURS_COMPILED.name, HAND_EAGER.name, 0.6),
        ratio("C11 GPT, 2 ranks", OURS_EAGER.name, "loop, no communication", 1.1),
        ratio("C11 GPT, 2 ranks", "loop, no communication", "DDP", 1.1),
    ]
    section = report(given).split("## Where others are faster")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| C")]
    assert lines == [f"| C1 MLP | {JAX[0].name} | {OURS_COMPILED.name} | 1.5 | 1.5 to 1.5 | here |"]


def test_a_row_says_how_many_measurements_it_is_of():
    assert rows.measured("C1 test", "a", rows.TIME, "us", [1.0, 2.0, 3.0]).rounds == "3"
