"""Loggers get every record in order, and `jsonl` writes each record as a line of JSON."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain.errors import FtrainError
from tests.training.problem import batches, fit, make_step, params, squares


def test_loggers_get_every_record_in_order():
    records, records_of_second = [], []
    _, history = fit(make_step(), batches(3), loggers=[records.append, records_of_second.append], log_every=2)
    assert records == list(history)
    assert records_of_second == list(history)


def test_a_logger_may_change_its_record(tmp_path):
    """The history, from which `stop` and the checkpoints read, has a record of its own."""
    logged_steps = []

    def change(record):
        logged_steps.append(record.pop("step"))
        record.get("eval_by_class", []).clear()

    _, history = fit(
        make_step(),
        batches(4),
        loggers=[change],
        checkpoints=ft.Checkpoints(tmp_path, every=2),
        evaluate=lambda state: {"score": 1.0, "by_class": [1, 2]},
        evaluate_every=2,
        stop=ft.patience("eval_score", 9),
    )
    assert logged_steps == [1, 2, 2, 3, 4, 4]
    assert history["step"] == logged_steps
    assert history["eval_by_class"] == [[1, 2]] * 2


def read_records(path):
    """Return the records of a log; an error if it has NaN or an infinity, which JSON lacks but Python reads."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_jsonl_writes_one_line_for_each_record(tmp_path):
    path = tmp_path / "runs" / "new" / "log.jsonl"

    def loss(params, batch):
        value, _ = squares(params, batch)
        return value, {"nan": value * math.nan, "vector": torch.tensor([1.0, math.inf])}

    def evaluate(state):
        return {"accuracy": 0.5, "best": -math.inf}

    step = make_step(loss=loss)
    _, history = fit(step, batches(3), loggers=[ft.loggers.jsonl(path)], evaluate=evaluate, evaluate_every=2)
    records = read_records(path)
    assert [record["step"] for record in records] == [1, 2, 2, 3, 3]
    for record, recorded in zip(records, history, strict=True):
        assert list(record) == list(recorded)
        if "loss" in recorded:
            assert record["loss"] == recorded["loss"]
            assert record["nan"] is None
            assert record["vector"] == [1.0, None]
        else:
            assert record == {"step": recorded["step"], "eval_accuracy": 0.5, "eval_best": None}


def test_jsonl_appends_the_records_of_a_second_run(tmp_path):
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        fit(make_step(), batches(2), loggers=[ft.loggers.jsonl(path)])
    assert [record["step"] for record in read_records(path)] == [1, 2, 1, 2]


def test_jsonl_starts_a_new_line_after_one_that_a_killed_run_left_unfinished(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    log = ft.loggers.jsonl(path)
    log({"step": 1})
    log({"step": 2})
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 1}', '{"step": 2}']


def test_jsonl_tells_steps_beyond_2_to_the_53_apart(tmp_path):
    path = tmp_path / "log.jsonl"
    log = ft.loggers.jsonl(path)
    for step in (2**53, 2**53 + 1):
        log({"step": step})
    log.rewind(2**53, 2)
    assert [record["step"] for record in read_records(path)] == [2**53]


def test_jsonl_prints_as_its_call(tmp_path):
    path = tmp_path / "log.jsonl"
    assert repr(ft.loggers.jsonl(path)) == f"jsonl({str(path)!r})"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_jsonl_names_the_file_on_a_full_disk():
    with pytest.raises(FtrainError, match=r"jsonl: '/dev/full' could not be written: .*No space left.*; make room"):
        ft.loggers.jsonl("/dev/full")({"step": 1})


def test_jsonl_writes_tensors_of_an_evaluation_as_numbers(tmp_path):
    path = tmp_path / "log.jsonl"
    _, history = fit(
        make_step(), batches(1), loggers=[ft.loggers.jsonl(path)], evaluate=lambda state: {"score": torch.tensor(0.5)}
    )
    assert read_records(path)[-1] == {"step": 1, "eval_score": 0.5}
    assert type(history[-1]["eval_score"]) is float


def test_jsonl_takes_values_that_json_lacks(tmp_path):
    path = tmp_path / "log.jsonl"
    values = {
        "report": {0: {"f1": math.nan}, "all": (1, math.inf)},
        "path": path,
        "dtypes": {torch.float64},
    }
    fit(make_step(), batches(1), loggers=[ft.loggers.jsonl(path)], evaluate=lambda state: values)
    assert read_records(path)[-1] == {
        "step": 1,
        "eval_report": {"0": {"f1": None}, "all": [1, None]},
        "eval_path": str(path),
        "eval_dtypes": "{torch.float64}",
    }


def test_jsonl_writes_the_tensors_of_a_loop_without_fit_as_numbers(tmp_path):
    path, step = tmp_path / "log.jsonl", make_step()
    (record,) = ft.iterate(step, step.init(params()), batches(1))
    mean = ft.Mean(torch.tensor(3.0), torch.tensor(2.0))
    ft.loggers.jsonl(path)({"step": record.step, **record.metrics, "mean": mean, "numpy": np.int64(3)})
    metrics = {name: float(value) for name, value in record.metrics.items()}
    assert read_records(path) == [{"step": 1, **metrics, "mean": 1.5, "numpy": 3}]
