"""The history: one record for each step and evaluation, with the metrics as numbers."""

import gc
import json
import tracemalloc

import pytest
import torch

import ftrain as ft
from ftrain.errors import OptionError
from ftrain.training.history import History
from tests.training.problem import batches, fit, make_step, squares, train_by_hand


@pytest.mark.parametrize("log_every", [1, 3, 10])
def test_the_history_has_every_step_for_any_log_every(log_every):
    _, history = fit(make_step(ft.clip(1.0)), batches(7), log_every=log_every)
    for record in history:
        assert list(record) == ["step", "seconds", "loss", "largest", "grad_norm", "lr"]
        assert all(type(value) in (int, float) for value in record.values())
    assert history["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert history["seconds"] == sorted(history["seconds"])


def test_the_history_is_read_by_index_slice_or_name():
    history = fit(make_step(), batches(4)).history
    assert history[-1]["step"] == 4
    assert [record["step"] for record in history[1:3]] == [2, 3]
    assert history["loss"] == [record["loss"] for record in history]
    with pytest.raises(OptionError, match=r"history: nothing is recorded as 'los'; there are loss, lr, "):
        history["los"]


def test_metrics_of_many_types_are_recorded():
    def loss(params, batch):
        value, _ = squares(params, batch)
        return value, {
            "mean": ft.Mean(torch.tensor(6.0), torch.tensor(4.0)),
            "vector": torch.tensor([1.0, 2.0]),
            "count": torch.tensor(3),
            "flag": torch.tensor(True),
            "number": 0.5,
        }

    _, history = fit(make_step(loss=loss), batches(2))
    assert history["mean"] == [1.5, 1.5]
    assert history["vector"] == [[1.0, 2.0]] * 2
    assert history["count"] == [3, 3]
    assert history["flag"] == [1.0, 1.0]
    assert history["number"] == [0.5, 0.5]


def test_metrics_within_dicts_and_lists_are_recorded_as_numbers(tmp_path):
    """In the history, in the log, and in the checkpoint, from which a resumed run has its history."""

    def loss(params, batch):
        value, _ = squares(params, batch)
        mean = ft.Mean(torch.tensor(6.0), torch.tensor(4.0))
        return value, {"layers": {"first": torch.tensor(2.0), "all": [mean, (torch.ones(2), "text")]}}

    step, log = make_step(loss=loss), tmp_path / "log.jsonl"
    expected = {"first": 2.0, "all": [1.5, [[1.0, 1.0], "text"]]}
    checkpoints = ft.Checkpoints(tmp_path / "run", every=1)
    _, history = fit(step, batches(2), loggers=[ft.loggers.jsonl(log)], checkpoints=checkpoints)
    assert history["layers"] == [expected] * 2
    assert [json.loads(line)["layers"] for line in log.read_text().splitlines()] == [expected] * 2
    _, resumed = fit(step, batches(2), steps=3, checkpoints=checkpoints)
    assert resumed["layers"] == [expected] * 3


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
def test_a_metric_that_is_a_parameter_has_its_value_before_the_update(wrappers):
    def loss(params, batch):
        return squares(params, batch)[0], {"w": params["w"], "first": params["w"][0]}

    _, history = fit(make_step(*wrappers, loss=loss), batches(3))
    states = [train_by_hand(make_step(), batches(3)[:count])[0] for count in range(3)]
    for recorded, state in zip(history["w"], states, strict=True):
        assert recorded == pytest.approx(state.params["w"].tolist(), rel=1e-5)
    assert history["first"] == [row[0] for row in history["w"]]


@pytest.mark.parametrize("wrappers", [[], [ft.update_in_backward()]], ids=["donated", "in backward"])
def test_a_loss_that_is_a_view_of_a_parameter_is_reported_as_it_was_before_the_update(wrappers):
    step = ft.compose(ft.train_step(lambda params, batch: params["w"][0], ft.optim.sgd(0.5)), *wrappers, ft.donated())
    _, history = ft.fit(step, step.init({"w": torch.ones(1)}), [torch.zeros(2)] * 3, steps=3, progress=False)
    assert history["loss"] == [1.0, 0.5, 0.0]


def test_memory_grows_by_no_more_than_the_record_of_each_step():
    """Measured by tracemalloc, because the memory of the process changes by whole pages."""

    def traced_memory(state):
        gc.collect()
        return {"bytes": tracemalloc.get_traced_memory()[0]}

    step = make_step()
    # The first run fills caches of limited size, which would be counted otherwise.
    fit(step, batches(), steps=300)
    tracemalloc.start()
    try:
        _, history = fit(step, batches(), steps=500, evaluate=traced_memory)
    finally:
        tracemalloc.stop()
    # A record takes 310 bytes: a dict, a float for each name, and an entry of the list. A tensor would take more.
    assert history["eval_bytes"][0] / 500 < 420


def test_a_history_prints_as_a_short_table():
    history = fit(make_step(), batches(3), evaluate=lambda state: {"f1": 0.5}).history
    lines = repr(history).splitlines()
    assert lines[0] == "History of 4 records, ended by data"
    assert lines[1].split() == ["step", "seconds", "loss", "largest", "lr", "eval_f1"]
    assert lines[2].split()[0] == "1"
    assert lines[-1].split() == ["3", "0.5"]
    assert len(lines) == 6
    assert repr(History()) == "History of 0 records"


def test_a_long_history_prints_its_first_and_last_records():
    vector = [0.1] * 1000
    text = repr(History({"step": i, "loss": 1 / (i + 1), "vector": vector} for i in range(100_000)))
    assert text.startswith("History of 100,000 records\n step")
    assert "\n...\n" in text
    assert len(text) < 1000
    assert text.splitlines()[-1].split()[0] == "99999"


def test_a_history_of_many_metrics_prints_the_first_and_names_the_others():
    text = repr(History([{f"column{i}": i for i in range(20)}]))
    assert text.splitlines()[-1].startswith("and column8, column9")
