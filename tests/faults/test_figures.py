"""The file of figures: rows are replaced by variant and metric, and nothing else is lost."""

from bench.rows import read
from tests.faults.figures import record


def test_figures_are_replaced_by_variant_and_metric(tmp_path):
    file = tmp_path / "faults.csv"
    record("a bit", file=file, runs=10, failures=1)
    record("a link", file=file, runs=5, failures=0)
    record("a bit", file=file, runs=20, failures=0, note="again")
    found = {(row.variant, row.metric): (row.median, row.unit, row.note) for row in read(tmp_path)}
    assert found == {
        ("a bit", "runs"): (20.0, "count", "again"),
        ("a bit", "failures"): (0.0, "count", "again"),
        ("a link", "runs"): (5.0, "count", ""),
        ("a link", "failures"): (0.0, "count", ""),
    }
    assert all(row.question == "faults" and row.device and row.torch and row.commit for row in read(tmp_path))
