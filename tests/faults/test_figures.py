"""The file of results: rows are replaced by variant and metric, and all others stay."""

import pytest

from bench.rows import read
from tests.faults.figures import record, tally


def test_figures_are_replaced_by_variant_and_metric(tmp_path):
    file = tmp_path / "faults.csv"
    record("a bit", file=file, runs=10, failures=1)
    record("a link", file=file, runs=5, failures=0)
    record("a bit", file=file, runs=20, failures=0, note="again")
    actual = {(row.variant, row.metric): (row.median, row.unit, row.note) for row in read(tmp_path)}
    assert actual == {
        ("a bit", "runs"): (20.0, "count", "again"),
        ("a bit", "failures"): (0.0, "count", "again"),
        ("a link", "runs"): (5.0, "count", ""),
        ("a link", "failures"): (0.0, "count", ""),
    }
    assert all(row.question == "faults" and row.device and row.torch and row.commit for row in read(tmp_path))


def rows(folder):
    return {row.metric: (row.median, row.note) for row in read(folder)}


def test_a_row_counts_the_failures_and_is_written_also_by_a_test_that_fails(tmp_path):
    def attempt_four(bad, ends):
        with tally("a bit", file=tmp_path / "faults.csv") as tries:
            tries.note = "of four"
            for number in range(4):
                with tries.attempt(number):
                    assert number not in bad, "wrong"
            assert not ends, "the whole is wrong"

    attempt_four((), ends=False)
    assert rows(tmp_path) == {"runs": (4.0, "of four"), "failures": (0.0, "of four")}
    with pytest.raises(AssertionError, match=r"(?s)1: AssertionError: wrong.*3: AssertionError: wrong"):
        attempt_four((1, 3), ends=False)
    assert rows(tmp_path) == {"runs": (4.0, "of four"), "failures": (2.0, "of four")}
    with pytest.raises(AssertionError, match="the whole is wrong"):
        attempt_four((1,), ends=True)
    assert rows(tmp_path) == {"runs": (4.0, "of four"), "failures": (2.0, "of four")}


def test_a_row_has_counts_of_its_own_also_when_the_test_ends_early(tmp_path):
    def attempt_and_fail():
        with tally("a flip", file=tmp_path / "faults.csv") as tries:
            tries.figures["silent"] = 1
            tries.runs += 3
            tries.failures.append((2, "wrong"))
            raise OSError("the third does not end")

    with pytest.raises(OSError, match="the third"):
        attempt_and_fail()
    assert rows(tmp_path) == {"runs": (3.0, ""), "silent": (1.0, ""), "failures": (2.0, "")}
