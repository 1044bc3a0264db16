"""The training loop: steps and epochs, the history, evaluations, progress, device reads, and how a run ends."""

import dataclasses
import errno
import gc
import io
import itertools
import json
import logging
import math
import re
import signal
import sys
import threading
import time
import traceback
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ftrain as ft
from ftrain.backends import registry
from ftrain.errors import ConsumedError, DataError, FtrainError, LossError, OptionError
from ftrain.training import progress
from ftrain.training.progress import total_steps

F64 = torch.float64


def squares(params, batch):
    x, y = batch
    return ((x @ params["w"] - y) ** 2).mean(), {"largest": y.max()}


def params():
    return {"w": torch.tensor([1.0, -1.0, 0.5])}


def batches(count=4, length=4):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(length, 3, generator=generator), torch.randn(length, generator=generator)) for _ in range(count)
    ]


def make(*wrappers, loss=squares, lr=None):
    return ft.compose(ft.train_step(loss, ft.optim.adamw(lr or 0.1)), *wrappers)


def by_hand(step, data, state=None):
    """Call the step with each batch, and return the last state and the losses."""
    state = state if state is not None else step.init(params())
    losses = []
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def fit(step, data, state=None, **options):
    state = state if state is not None else step.init(params())
    return ft.fit(step, state, data, **{"progress": False, **options})


def assert_bitwise(actual, expected):
    assert ft.tree.leaf_names(actual) == ft.tree.leaf_names(expected)
    for a, b in zip(ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
@pytest.mark.parametrize("donate", [True, False])
def test_fit_is_the_loop_by_hand(wrappers, donate):
    step = make(ft.clip(1.0), ft.ema(0.9), *wrappers, lr=ft.schedules.warmup_cosine(0.1, warmup=2, total=8))
    expected, losses = by_hand(step, batches())
    state, history = fit(step, batches(), donate=donate)
    assert_bitwise(state, expected)
    assert history["loss"] == losses
    assert history["lr"] == pytest.approx([0.0, 0.05, 0.1, step.optimizer.schedules["lr"](3)])


def test_a_dataloader_is_data():
    x, y = torch.randn(10, 3, generator=torch.Generator().manual_seed(1)), torch.arange(10.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    state, history = fit(make(), loader, epochs=2)
    expected_batches = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    expected, losses = by_hand(make(), expected_batches * 2)
    assert_bitwise(state, expected)
    assert history["loss"] == losses


def test_a_dataloader_of_dicts_and_a_loss_of_dicts():
    rows = [{"x": torch.full((3,), float(i)), "y": torch.tensor(float(i)), "id": i} for i in range(6)]
    step = make(loss=lambda params, batch: ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean())
    _, history = fit(step, DataLoader(rows, batch_size=2, shuffle=True), steps=7)
    assert len(history) == 7


@pytest.mark.parametrize(
    ("limits", "step_count", "passes", "stopped"),
    [
        ({}, 4, 1, "data"),
        ({"epochs": 1}, 4, 1, "data"),
        ({"epochs": 3}, 12, 3, "data"),
        ({"steps": 3}, 3, 1, "steps"),
        ({"steps": 4}, 4, 1, "steps"),
        ({"steps": 9}, 9, 3, "steps"),
        ({"steps": 9, "epochs": 2}, 8, 2, "data"),
        ({"steps": 6, "epochs": 2}, 6, 2, "steps"),
    ],
)
def test_steps_and_epochs(limits, step_count, passes, stopped):
    class Data:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(batches())

    data = Data()
    state, history = fit(make(), data, **limits)
    assert int(state.step) == step_count
    assert history["step"] == list(range(1, step_count + 1))
    assert data.passes == passes
    assert history.stopped == stopped


def test_no_batch_is_drawn_after_the_last_step():
    drawn = []

    def data():
        for batch in itertools.cycle(batches()):
            drawn.append(batch)
            yield batch

    fit(make(), data(), steps=3)
    assert len(drawn) == 3


def test_steps_are_counted_from_the_state():
    step = make(lr=ft.schedules.warmup_cosine(0.1, warmup=2, total=6))
    uninterrupted, history = fit(step, batches(6), steps=6)
    data = batches(6)
    state, first = fit(step, data[:4], steps=4)
    state, rest = fit(step, data[4:], state, steps=6)
    assert_bitwise(state, uninterrupted)
    assert rest["step"] == [5, 6]
    assert first["loss"] + rest["loss"] == history["loss"]
    assert first["lr"] + rest["lr"] == history["lr"]


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_has_made_its_steps_makes_none_and_logs_that(steps, caplog):
    step = make()
    state, _ = fit(step, batches(), steps=3)
    kept = ft.tree.clone(state)
    assert not caplog.messages
    again, history = fit(step, batches(), state, steps=steps)
    assert_bitwise(again, kept)
    assert list(history) == []
    assert history.stopped == "steps"
    (message,) = caplog.messages
    assert f"no step is made, for steps={steps}, and 3 were made before" in message


def test_a_cycle_over_the_data_is_logged(caplog):
    fit(make(), itertools.cycle(batches()), steps=3)
    (message,) = caplog.messages
    assert "does not shuffle or augment again" in message
    assert "Pass what it cycles over" in message


def test_epochs_are_counted_from_the_start_of_the_call():
    step = make()
    state, _ = fit(step, batches(), epochs=1)
    state, history = fit(step, batches(), state, epochs=1)
    assert int(state.step) == 8
    assert history["step"] == [5, 6, 7, 8]


@pytest.mark.parametrize("log_every", [1, 3, 10])
def test_the_history_has_every_step_for_any_log_every(log_every):
    _, history = fit(make(ft.clip(1.0)), batches(7), log_every=log_every)
    assert list(history[0]) == ["step", "seconds", "loss", "largest", "grad_norm", "lr"]
    assert len(history) == 7
    for column in ("step", "seconds", "loss", "largest", "grad_norm", "lr"):
        assert len(history[column]) == 7
        assert all(type(value) in (int, float) for value in history[column])
    assert history["seconds"] == sorted(history["seconds"])
    with pytest.raises(OptionError, match=r"history: nothing is recorded as 'los'; there are loss, lr, "):
        history["los"]
    assert history[-1]["step"] == 7
    assert [record["step"] for record in history[2:4]] == [3, 4]


def test_metrics_of_many_types_are_recorded():
    def loss(params, batch):
        value, _ = squares(params, batch)
        weighted = ft.Mean(torch.tensor(6.0), torch.tensor(4.0))
        return value, {
            "mean": weighted,
            "vector": torch.tensor([1.0, 2.0]),
            "count": torch.tensor(3),
            "flag": torch.tensor(True),
            "number": 0.5,
        }

    _, history = fit(make(loss=loss), batches(2))
    assert history["mean"] == [1.5, 1.5]
    assert history["vector"] == [[1.0, 2.0]] * 2
    assert history["count"] == [3, 3]
    assert history["flag"] == [1.0, 1.0]
    assert history["number"] == [0.5, 0.5]


def test_metrics_within_dicts_and_lists_are_recorded_as_numbers(tmp_path):
    def loss(params, batch):
        value, _ = squares(params, batch)
        weighted = ft.Mean(torch.tensor(6.0), torch.tensor(4.0))
        return value, {"layers": {"first": torch.tensor(2.0), "all": [weighted, (torch.ones(2), "text")]}}

    path, expected = tmp_path / "log.jsonl", {"first": 2.0, "all": [1.5, [[1.0, 1.0], "text"]]}
    checkpoints = ft.Checkpoints(tmp_path / "run", every=1)
    _, history = fit(make(loss=loss), batches(2), loggers=[ft.loggers.jsonl(path)], checkpoints=checkpoints)
    assert history["layers"] == [json.loads(line)["layers"] for line in path.read_text().splitlines()] == [expected] * 2
    _, resumed = fit(make(loss=loss), batches(2), steps=3, checkpoints=checkpoints)
    assert resumed["layers"] == [expected] * 3


def test_jsonl_writes_one_line_for_each_record(tmp_path):
    path = tmp_path / "runs" / "new" / "log.jsonl"

    def loss(params, batch):
        value, _ = squares(params, batch)
        return value, {"odd": batch[1].sum() * float("nan"), "list": torch.tensor([1.0, float("inf")])}

    evaluate = lambda state: {"accuracy": 0.5, "best": -math.inf}  # noqa: E731
    options = {"loggers": [ft.loggers.jsonl(path)], "evaluate": evaluate, "evaluate_every": 2}
    _, history = fit(make(loss=loss), batches(3), **options)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert len(records) == len(history) == 5
    assert [record["step"] for record in records] == [1, 2, 2, 3, 3]
    for record, expected in zip(records, history, strict=True):
        assert list(record) == list(expected)
        if "loss" in expected:
            assert record["loss"] == expected["loss"]
            assert record["odd"] is None
            assert record["list"] == [1.0, None]
        else:
            assert record == {"step": expected["step"], "eval_accuracy": 0.5, "eval_best": None}
    # A second run appends.
    fit(make(loss=loss), batches(1), loggers=[ft.loggers.jsonl(path)])
    assert len(path.read_text(encoding="utf-8").splitlines()) == 6


def test_jsonl_starts_a_new_line_after_one_that_a_killed_run_left_unfinished(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    log = ft.loggers.jsonl(path)
    assert repr(log) == f"jsonl({str(path)!r})"
    log({"step": 1})
    log({"step": 2})
    assert path.read_text().splitlines() == ['{"step": 1}', '{"step": 2, "lo', '{"step": 1}', '{"step": 2}']


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_jsonl_names_the_file_on_a_full_disk():
    with pytest.raises(FtrainError, match=r"jsonl: '/dev/full' could not be written: .*No space left.*; make room"):
        ft.loggers.jsonl("/dev/full")({"step": 1})


def test_jsonl_writes_tensors_of_an_evaluation_as_numbers(tmp_path):
    path = tmp_path / "log.jsonl"
    evaluate = lambda state: {"tensor": torch.tensor(0.5), "mean": torch.tensor([1, 3]).float().mean()}  # noqa: E731
    _, history = fit(make(), batches(1), loggers=[ft.loggers.jsonl(path)], evaluate=evaluate)
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 1, "eval_tensor": 0.5, "eval_mean": 2.0}
    assert type(history[-1]["eval_tensor"]) is float


def test_an_error_of_a_logger_names_the_records_that_are_lost():
    def full(record):
        if record["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        fit(make(), batches(), loggers=[full], log_every=3)
    assert any("the records of steps 2 to 3 are not logged again" in note for note in caught.value.__notes__)


def test_jsonl_takes_values_that_json_lacks(tmp_path):
    path = tmp_path / "log.jsonl"
    values = {"report": {0: {"f1": math.nan}, "all": (1, math.inf)}, "path": path, "kind": {F64}}
    fit(make(), batches(1), loggers=[ft.loggers.jsonl(path)], evaluate=lambda state: values)
    expected = {"report": {"0": {"f1": None}, "all": [1, None]}, "path": str(path), "kind": "{torch.float64}"}
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 1} | {f"eval_{k}": v for k, v in expected.items()}


def test_jsonl_writes_the_metrics_of_a_loop_of_ones_own_as_numbers(tmp_path):
    log, step = ft.loggers.jsonl(tmp_path / "log.jsonl"), make()
    for record in ft.iterate(step, step.init(params()), batches(1), steps=1):
        log(
            {
                "step": record.step,
                **record.metrics,
                "mean": ft.Mean(torch.tensor(3.0), torch.tensor(2.0)),
                "of numpy": np.int64(3),
            }
        )
        expected = {
            "step": 1,
            **{name: float(value) for name, value in record.metrics.items()},
            "mean": 1.5,
            "of numpy": 3,
        }
    assert json.loads((tmp_path / "log.jsonl").read_text()) == expected


def test_a_logger_may_change_its_record(tmp_path):
    steps = []
    options = {"evaluate": lambda state: {"a": 1.0}, "evaluate_every": 2, "stop": ft.patience("eval_a", 9)}
    checkpoints = ft.Checkpoints(tmp_path, every=2)
    history = fit(
        make(),
        batches(4),
        loggers=[lambda record: steps.append(record.pop("step"))],
        checkpoints=checkpoints,
        **options,
    ).history
    assert history["step"] == steps == [1, 2, 2, 3, 4, 4]


def test_loggers_get_every_record_in_order():
    first, second = [], []
    _, history = fit(make(), batches(3), loggers=[first.append, second.append], log_every=2)
    assert first == second == list(history)


class PythonReads:
    """Counts the calls in Python that copy the value of a floating-point or bool tensor to the host."""

    NAMES = ("item", "tolist", "numpy", "__float__", "__bool__", "__int__", "__index__", "__format__", "__array__")

    def __init__(self, monkeypatch):
        self.count = 0
        for name in self.NAMES:
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))

    def _counting(self, method):
        def counted(tensor, *args, **kwargs):
            # The step count and the key are integers, and always on the host.
            self.count += tensor.is_floating_point() or tensor.dtype == torch.bool
            return method(tensor, *args, **kwargs)

        return counted


class DispatcherReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the reads of single values that operations make without a method of Python."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += args[0].dtype != torch.int64
        return func(*args, **(kwargs or {}))


STACKS = {
    "plain": (),
    "stack": (ft.accumulate(2), ft.clip(1.0), ft.ema(0.9), ft.skip_nonfinite()),
    "fp16": (ft.with_amp("fp16"), ft.clip(value=0.1)),
    "compiled": (ft.clip(1.0), ft.compiled(backend="eager", lowering="whole")),
}


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("donate", [True, False])
def test_values_are_read_only_every_log_every_steps(name, donate, monkeypatch):
    step = make(*STACKS[name])
    state = step.init(params())
    reads, counts = PythonReads(monkeypatch), []

    def watched():
        for batch in batches(9):
            counts.append(reads.count)
            yield batch

    with DispatcherReads() as dispatcher_reads:
        _, history = fit(step, watched(), state, log_every=4, donate=donate)
    assert len(history) == 9
    # Batch k is drawn after k steps, so the count rises only after steps 4 and 8.
    assert counts[:4] == [0] * 4
    assert len(set(counts[4:8])) == 1
    # `accumulate` checks once, with three pairs of examples, whether the loss is a mean over examples.
    check_reads = 3 if name == "stack" else 0
    assert counts[4] > check_reads
    assert counts[8] - counts[4] == counts[4] - check_reads
    assert dispatcher_reads.count == 0


def test_all_metrics_of_several_steps_are_read_in_one_transfer(monkeypatch):
    step = make()
    state = step.init(params())
    reads = PythonReads(monkeypatch)
    fit(step, batches(8), state, log_every=8)
    assert reads.count == 1


def interrupting(data, at, times=1):
    """Yield the batches of data, and raise SIGINT before the one with the index `at`."""
    for index, batch in enumerate(data):
        if index == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        yield batch


@pytest.fixture
def default_sigint():
    """The handler of SIGINT that Python has in a terminal: a shell starts its background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _, history = fit(make(), interrupting(batches(6), 2, times=2))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(history) == 6


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("at", [0, 2])
def test_ctrl_c_returns_what_was_trained(at, capsys):
    before = signal.getsignal(signal.SIGINT)
    step = make()
    state, history = fit(step, interrupting(batches(6), at), steps=6)
    assert signal.getsignal(signal.SIGINT) is before
    assert history.stopped == "interrupt"
    assert f"fit: ended by SIGINT after step {at + 1}; " in capsys.readouterr().err
    expected, losses = by_hand(make(), batches(6)[: at + 1])
    assert_bitwise(state, expected)
    assert history["loss"] == losses
    # A second run continues from that state.
    state, rest = fit(step, batches(6)[at + 1 :], state, steps=6)
    assert_bitwise(state, by_hand(make(), batches(6))[0])
    assert rest["step"] == list(range(at + 2, 7))


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_in_the_last_step_is_no_error():
    _, history = fit(make(), interrupting(batches(3), 2))
    assert len(history) == 3


@pytest.mark.usefixtures("default_sigint")
def test_a_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fit(make(), interrupting(batches(6), 2, times=2))
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_user_is_restored_and_gets_the_second_signal():
    received = []

    def handler(number, frame):
        received.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        _, history = fit(make(), interrupting(batches(6), 2, times=2))
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]
    assert history.stopped == "interrupt"


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("error_type", [ZeroDivisionError, KeyboardInterrupt])
def test_the_handler_is_restored_after_an_error(error_type):
    def failing():
        yield from batches(2)
        raise error_type

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(error_type):
        fit(make(), failing())
    assert signal.getsignal(signal.SIGINT) is before


def test_a_state_that_was_replaced_is_freed():
    step = make()
    records = ft.iterate(step, step.init(params()), batches(), steps=2)
    record = next(records)
    replaced = weakref.ref(next(iter(record.state.params.values())))
    records.send(ft.tree.clone(record.state))
    del record
    assert replaced() is None


def test_memory_grows_by_no_more_than_the_record_of_each_step():
    """Measured by tracemalloc, because the memory of the process changes by whole pages."""

    def memory(state):
        gc.collect()
        return {"bytes": tracemalloc.get_traced_memory()[0]}

    step = make()
    # The first run fills caches of limited size, which would be counted otherwise.
    fit(step, batches(), steps=300)
    tracemalloc.start()
    try:
        _, history = fit(step, batches(), steps=500, evaluate=memory)
    finally:
        tracemalloc.stop()
    # A record takes 310 bytes: a dict, a float for each name, and an entry of the list.
    assert history["eval_bytes"][0] / 500 < 420


WRONG_OPTIONS = {
    "evaluate of batches": ({"evaluate": batches()}, "evaluate is list; needs a function state ->"),
    "evaluate by an eval_step": (
        {"evaluate": ft.eval_step(lambda params, batch: params["w"].sum())},
        "evaluate is an eval_step, of one batch; needs a function state ->",
    ),
    "evaluate_every alone": ({"evaluate_every": 2}, "evaluate_every=2 needs evaluate="),
    "stop of a number": ({"stop": 3}, "stop is int; needs a function history ->"),
    "adapt of a scheduler": ({"adapt": object()}, "adapt is object; needs a function"),
    "a directory": ({"checkpoints": "runs"}, "checkpoints is 'runs'; needs ft.Checkpoints"),
    "one logger": ({"loggers": print}, "loggers is .*; needs a list of functions"),
    "a name of a logger": ({"loggers": ["wandb"]}, "loggers is .*; needs a list of functions"),
    "one count": ({"throughput": len}, "throughput is .*; needs functions of a batch by name"),
    "a number of tokens": ({"throughput": {"tokens": 512}}, "throughput is .*; needs functions of a batch by name"),
    "no epoch": ({"epochs": 0}, "epochs is 0"),
    "half a step": ({"steps": 1e3}, "steps is 1000.0, needs a whole number"),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_what_fit_refuses_before_a_step(case, caplog):
    options, message = WRONG_OPTIONS[case]
    data = iter(batches())
    with pytest.raises(OptionError, match=message):
        fit(make(), data, **options)
    assert len(list(data)) == len(batches()), "no batch was drawn"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": torch.ones(2, 3)}, r"data is a dict, one batch; needs an iterable of batches: \[batch\]"),
        (TensorDataset(torch.ones(4, 3)), r"data is TensorDataset; .* pass a dataset to a DataLoader"),
    ],
)
def test_data_that_is_no_iterable_of_batches_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        fit(make(), data)


@pytest.mark.parametrize("data", [{"x": torch.ones(2, 3)}, None])
def test_an_evaluation_refuses_data_that_is_no_iterable_of_batches(data):
    step = make()
    with pytest.raises(DataError, match=rf"evaluate: data is a {type(data).__name__}; needs an iterable of batches"):
        ft.evaluate(ft.eval_step(step.loss), step.init(params()), data)


@pytest.mark.parametrize(("returned", "name"), [(None, "NoneType"), ({"w": 1.0}, "dict")])
def test_an_adapt_that_returns_no_state_is_an_error_and_no_step_is_lost(returned, name):
    """Passed on to the loop as a state, None would mean `next`, and a step would be made without a record."""
    with pytest.raises(ft.errors.ComposeError, match=f"adapt returned {name}; needs the TrainState to go") as caught:
        fit(make(), batches(), adapt=lambda state, history: returned, log_every=2)
    assert int(caught.value.result.state.step) == 2


def test_a_history_prints_as_a_short_table():
    history = fit(make(), batches(3), evaluate=lambda state: {"f1": 0.5}).history
    lines = repr(history).splitlines()
    assert lines[0] == "History of 4 records, ended by data"
    assert lines[1].split() == ["step", "seconds", "loss", "largest", "lr", "eval_f1"]
    assert lines[2].split()[0] == "1"
    assert lines[-1].split() == ["3", "0.5"]
    assert len(lines) == 6
    each = [0.1] * 1000
    long_history = type(history)({"step": i, "loss": 1 / (i + 1), "each": each} for i in range(100_000))
    text = repr(long_history)
    assert text.startswith("History of 100,000 records\n step")
    assert "\n...\n" in text
    assert len(text) < 1000
    assert text.splitlines()[-1].split()[0] == "99999"
    wide_text = repr(type(history)([{f"column{i}": i for i in range(20)}]))
    assert wide_text.splitlines()[-1].startswith("and column8, column9")
    assert repr(type(history)()) == "History of 0 records"


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An error of the user on which neither `fit` can set a result, nor contextlib a traceback."""

    code: int


class SlottedError(Exception):
    """An error of the user with `__slots__`."""

    __slots__ = ("code",)


class ResultError(Exception):
    """An error of the user that already has an attribute `result`."""

    result = "of the user"


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("error_type", [FrozenError, SlottedError, ResultError])
def test_an_error_of_any_type_is_raised_unchanged(error_type):
    error = error_type(3)

    def failing():
        yield from batches(2)
        raise error

    with pytest.raises(error_type) as caught:
        fit(make(), failing())
    assert caught.value is error
    if error_type is ResultError:
        assert error.result == "of the user"
    else:
        assert error.result.history["step"] == [1, 2]


def test_a_logger_that_fails_neither_stops_other_loggers_nor_hides_another_error():
    seen = []

    def failing(record):
        raise ZeroDivisionError

    def data():
        yield from batches(3)
        raise FrozenError(1)

    with pytest.raises(ZeroDivisionError) as caught:
        fit(make(), batches(), loggers=[failing, seen.append], log_every=2)
    assert [record["step"] for record in seen] == [1, 2]
    assert caught.value.result.history == seen
    seen.clear()
    with pytest.raises(FrozenError) as caught:
        fit(make(), data(), loggers=[failing, seen.append])
    assert caught.value.result.history == seen
    assert [record["step"] for record in seen] == [1, 2, 3]
    assert caught.value.__notes__ == ["fit: not all metrics could be recorded: ZeroDivisionError()"]


def test_evaluate_is_called_at_its_steps_and_at_the_end():
    seen = []

    def evaluate(state):
        seen.append(int(state.step))
        return {"norm": float(state.params["w"].norm())}

    _, history = fit(make(), batches(7), evaluate=evaluate, evaluate_every=3)
    assert seen == [3, 6, 7]
    assert [record["step"] for record in history if "eval_norm" in record] == [3, 6, 7]
    assert len(history["loss"]) == 7
    seen.clear()
    fit(make(), batches(6), evaluate=evaluate, evaluate_every=3)
    assert seen == [3, 6]
    seen.clear()
    fit(make(), batches(5), evaluate=evaluate)
    assert seen == [5]


def test_evaluate_gets_the_state_of_its_step():
    step, states = make(), []

    def evaluate(state):
        states.append(ft.tree.clone(state))
        return {}

    fit(step, batches(4), evaluate=evaluate, evaluate_every=2)
    for state, count in zip(states, (2, 4), strict=True):
        assert_bitwise(state, by_hand(make(), batches(4)[:count])[0])


def test_records_of_training_and_of_evaluation_are_read_in_order():
    def evaluate(state):
        return {"norm": 1.0}

    _, history = fit(make(), batches(5), evaluate=evaluate, evaluate_every=2, log_every=10)
    assert [("eval_norm" in record, record["step"]) for record in history] == [
        (False, 1),
        (False, 2),
        (True, 2),
        (False, 3),
        (False, 4),
        (True, 4),
        (False, 5),
        (True, 5),
    ]


def test_the_loss_of_an_evaluation_is_not_mistaken_for_that_of_a_step():
    evaluation = ft.eval_step(squares)

    def evaluate(state):
        return ft.evaluate(evaluation, state, batches(2))

    _, history = fit(make(), batches(4), evaluate=evaluate, evaluate_every=2)
    _, expected = by_hand(make(), batches(4))
    assert history["loss"] == expected
    assert len(history["eval_loss"]) == 2


@pytest.mark.parametrize("log_every", [1, 10])
def test_what_an_evaluation_returns_is_recorded_with_eval_before_its_name(log_every):
    """Whether a step has recorded a metric of that name before or not; a name with the prefix stays as it is."""
    evaluate = lambda state: {"loss": 1.0, "accuracy": 0.5, "eval_f1": 0.25}  # noqa: E731
    _, history = fit(make(), batches(2), evaluate=evaluate, evaluate_every=1, log_every=log_every)
    assert [list(record) for record in history[1::2]] == [["step", "eval_loss", "eval_accuracy", "eval_f1"]] * 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "evaluate returned NoneType; needs a dict"),
        (0.5, "evaluate returned float; needs a dict"),
        ({1: 0.5}, r"evaluate returned the keys \[1\]; needs a dict of numbers by name"),
        ({"loss": 1.0, "eval_loss": 2.0}, "two numbers that are recorded under one name: loss, eval_loss"),
    ],
)
def test_an_evaluation_that_returns_no_dict_of_numbers_by_name_is_an_error(returned, message):
    with pytest.raises(OptionError, match=message) as caught:
        fit(make(), batches(2), evaluate=lambda state: returned)
    assert int(caught.value.result.state.step) == 2


def test_an_evaluation_may_return_numbers_of_numpy(tmp_path):
    # As functions of scikit-learn return them.
    checkpoints = ft.Checkpoints(tmp_path, every=1, best="eval_a")
    values = {"a": np.float64(0.5), "b": np.float32(2.0), "c": np.int64(3)}
    _, history = fit(make(), batches(1), evaluate=lambda state: values, checkpoints=checkpoints)
    assert [type(history[-1][name]) for name in ("eval_a", "eval_b", "eval_c")] == [float, float, int]


def test_an_evaluation_may_return_arrays_of_numpy(tmp_path):
    # For example a confusion matrix: the log and the checkpoint store it, and a resumed run has it in its history.
    options = {
        "evaluate": lambda state: {"each": np.eye(2), "one": np.array(1.5)},
        "evaluate_every": 1,
        "checkpoints": ft.Checkpoints(tmp_path / "run", every=1),
        "loggers": [ft.loggers.jsonl(tmp_path / "log")],
    }
    fit(make(), batches(), steps=1, **options)
    _, history = fit(make(), batches(), steps=2, **options)
    assert history["eval_each"] == [[[1.0, 0.0], [0.0, 1.0]]] * 2
    assert history["eval_one"] == [1.5] * 2


def test_an_evaluation_may_return_vectors(capsys):
    _, history = fit(make(), batches(1), progress=True, evaluate=lambda state: {"each": torch.tensor([1.0, 2.0])})
    assert history["eval_each"] == [[1.0, 2.0]]
    assert "eval_each [1.0, 2.0]" in capsys.readouterr().err


def test_an_evaluation_of_batches_without_examples_warns_of_nan():
    step = make(loss=lambda params, batch: ((batch[0] @ params["w"] - batch[1]) ** 2).mean())
    state, empty = step.init(params()), (torch.zeros(0, 3), torch.zeros(0))
    with pytest.warns(UserWarning, match="evaluate: the mean of loss is NaN.*no examples"):
        assert math.isnan(ft.evaluate(ft.eval_step(step.loss), state, [empty])["loss"])


@pytest.mark.usefixtures("default_sigint")
def test_a_run_that_ctrl_c_ends_is_evaluated():
    seen = []
    _, history = fit(make(), interrupting(batches(6), 1), evaluate=lambda state: seen.append(int(state.step)) or {})
    assert history.stopped == "interrupt"
    assert seen == [2]


def test_donation_consumes_the_state_and_changes_no_bit():
    step = make(ft.ema(0.9))
    kept, donated = step.init(params()), step.init(params())
    copied = ft.tree.clone(kept)
    actual, history = fit(step, batches(), kept, donate=False)
    expected, other = fit(step, batches(), donated)
    assert_bitwise(actual, expected)
    assert history["loss"] == other["loss"]
    assert_bitwise(kept, copied)
    assert_bitwise(fit(step, batches(), kept, donate=False).state, expected)
    with pytest.raises(ConsumedError, match="donated"):
        fit(step, batches(), donated)


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
def test_a_metric_that_is_a_parameter_has_its_value_before_the_update(wrappers):
    def loss(params, batch):
        return squares(params, batch)[0], {"w": params["w"], "first": params["w"][0]}

    _, history = fit(make(*wrappers, loss=loss), batches(3))
    expected = [params()["w"].tolist()]
    for count in (1, 2):
        expected.append(by_hand(make(), batches(3)[:count])[0].params["w"].tolist())
    for actual, value in zip(history["w"], expected, strict=True):
        assert actual == pytest.approx(value, rel=1e-5)
    assert history["first"] == [row[0] for row in history["w"]]


def test_fit_does_not_change_the_step_it_is_given():
    step = make()
    text = repr(step)
    fit(step, batches())
    assert repr(step) == text
    assert not step.donate


def test_fit_in_a_thread():
    before, results = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: results.append(fit(make(), batches(), progress=True)))
    thread.start()
    thread.join()
    assert_bitwise(results[0].state, by_hand(make(), batches())[0])
    assert signal.getsignal(signal.SIGINT) is before


def gan():
    """Return a plain function that calls two Steps, each with parameters of the other, and its initial state."""

    def generated(params, batch):
        return batch["noise"] * params["scale"] + params["shift"]

    def generator_loss(params, batch):
        return -(batch["critic"] * generated(params, batch)).mean()

    def critic_loss(params, batch):
        return (params["critic"] * (batch["fake"] - batch["real"])).mean() + params["critic"].square().sum()

    generator_step = ft.train_step(generator_loss, ft.optim.sgd(0.1))
    critic_step = ft.train_step(critic_loss, ft.optim.adamw(0.1))

    def step(state, batch):
        noise, real = batch
        generator, critic = state
        fake = generated(generator.params, {"noise": noise})
        critic, critic_metrics = critic_step(critic, {"fake": fake, "real": real})
        generator, generator_metrics = generator_step(generator, {"noise": noise, "critic": critic.params["critic"]})
        return (generator, critic), {"generator": generator_metrics["loss"], "critic": critic_metrics["loss"]}

    generator_state = generator_step.init({"scale": torch.ones(()), "shift": torch.zeros(())})
    state = generator_state, critic_step.init({"critic": torch.ones(())})
    return step, state


def gan_batches():
    return [(x[:, 0], x[:, 1] + 3) for x, _ in batches()]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_that_calls_two_steps(compiled, caplog):
    step, state = gan()
    fitted = ft.compiled(backend="eager")(step) if compiled else step
    expected, losses = state, []
    for batch in gan_batches():
        expected, metrics = step(expected, batch)
        losses.append(float(metrics["critic"]))
    with caplog.at_level(logging.WARNING, "ftrain"):
        actual, history = ft.fit(fitted, state, gan_batches(), progress=False)
    assert history["step"] == [1, 2, 3, 4]
    assert history["critic"] == losses
    assert [int(part.step) for part in actual] == [4, 4]
    for a, b in zip(actual, expected, strict=True):
        assert_bitwise(a, b)
    # The state of a plain function is never donated, so it is unchanged.
    assert [int(part.step) for part in state] == [0, 0]
    # A function that calls Steps is not compiled, which is logged once.
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (1 if compiled else 0)
    assert all("step runs uncompiled" in message for message in messages)


def test_a_plain_function_of_tensors_compiles_and_fits():
    def step(state, batch):
        count, mean = state
        x, _ = batch
        new = count + 1, mean + (x.mean() - mean) / (count + 1)
        return new, {"mean": new[1]}

    start = torch.zeros(()), torch.zeros(())
    plain = ft.fit(step, start, batches(), progress=False)
    compiled = ft.fit(ft.compiled(backend="eager")(step), start, batches(), progress=False)
    assert plain.history["mean"] == pytest.approx(compiled.history["mean"], rel=1e-6)
    torch.testing.assert_close(plain.state[1], torch.cat([x for x, _ in batches()]).mean())
    assert plain.history["step"] == [1, 2, 3, 4]


def test_batches_go_to_the_device_of_a_state_of_several_states(monkeypatch):
    # The first tensor of a TrainState is its step, which is on the CPU wherever the parameters are.
    monkeypatch.setattr(registry, "_records", dict(registry._records))
    ft.backends.register(dataclasses.replace(ft.backends.get("cpu"), name="meta"))
    seen = []

    def step(state, batch):
        seen.append(batch[0].device.type)
        return state, {}

    part = make().init({"w": torch.ones(3, device="meta")})
    ft.fit(step, (part, part), batches(1), progress=False)
    assert seen == ["meta"]


def test_a_throughput_that_is_no_number_is_an_error():
    with pytest.raises(OptionError, match=r"fit: throughput\['tokens'\] returned None; needs a number"):
        fit(make(), batches(), steps=1, throughput={"tokens": lambda batch: None})


def test_progress_lines_show_metrics_throughput_and_time_left(capsys):
    options = {"steps": 20, "log_every": 1, "throughput": {"examples": lambda batch: len(batch[1])}}
    evaluate = lambda state: {"accuracy": 0.25}  # noqa: E731
    fit(make(), batches(), progress=True, evaluate=evaluate, evaluate_every=10, **options)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert "step 10  eval_accuracy 0.2500" in lines
    assert "step 20  eval_accuracy 0.2500" in lines
    steps = [line for line in lines if "/20" in line]
    assert 9 <= len(steps) <= 11
    assert steps[-1].startswith("step 20/20  loss ")
    pattern = r"step \d+/20  loss \d+\.\d{4}  largest -?\d+\.\d{4}  [\d,]+ examples/s  \d+:\d\d:\d\d left  \d+\.\d GiB"
    for line in steps:
        assert re.fullmatch(pattern, line), line
        assert len(line) < 100


def test_progress_of_a_run_without_end_and_of_very_small_and_large_numbers(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)

    def step(state, batch):
        return state, {"loss": 2e-6, "largest": 3e12, "zero": 0.0}

    options = {"stop": lambda history: "enough", "evaluate": lambda state: {"accuracy": 2e-5}, "evaluate_every": 1}
    ft.fit(step, make().init(params()), batches(1), steps=sys.maxsize, progress=True, log_every=1, **options)
    _, err = capsys.readouterr()
    assert "  loss 2.000e-06  largest 3.000e+12  zero 0.0000  " in err
    assert "left" not in err
    assert "eval_accuracy 2.000e-05" in err
    assert progress.describe({}, {"images": 0.25}, None, 0) == "0.25 images/s  0.0 GiB"


def test_the_time_of_an_evaluation_is_not_counted_as_training(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def data():
        for batch in batches(4):
            now[0] += 1
            yield batch

    def evaluate(state):
        now[0] += 100
        return {"accuracy": 0.5}

    options = {"steps": 4, "log_every": 1, "throughput": {"examples": lambda batch: len(batch[1])}}
    fit(make(), data(), progress=True, evaluate=evaluate, evaluate_every=2, **options)
    lines = [line for line in capsys.readouterr().err.splitlines() if "examples/s" in line]
    assert len(lines) == 4
    assert all("  4 examples/s  " in line for line in lines)
    assert [re.search(r"(\d+:\d\d:\d\d) left", line).group(1) for line in lines] == [
        "0:00:03",
        "0:00:02",
        "0:00:01",
        "0:00:00",
    ]


def test_progress_without_a_known_end_shows_no_time_left(capsys):
    fit(make(), iter(batches()), progress=True, log_every=1)
    _, err = capsys.readouterr()
    assert "left" not in err
    assert "\r" not in err


def test_epochs_of_data_with_a_length_have_a_known_end(capsys):
    """Also if the run resumes in the middle of an epoch."""
    fit(make(), batches() * 5, epochs=2, progress=True, log_every=1)
    lines = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert lines == [f"{4 * number}/40" for number in range(1, 11)]
    assert total_steps(None, 3, [0] * 4, 10, 1, 2) == 16
    assert total_steps(12, 3, [0] * 4, 10, 1, 2) == 12
    assert total_steps(None, None, [0] * 4, 7, 0, 0) == 11
    assert total_steps(9, None, [0] * 4, 7, 0, 0) == 9
    assert total_steps(None, 2, iter([0]), 0, 0, 0) is None


class Tee:
    """A replacement of stderr with the two methods that `print` needs."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_is_printed_to_a_stderr_that_is_no_file(monkeypatch):
    monkeypatch.setattr("sys.stderr", tee := Tee())
    fit(make(), batches(), steps=3, progress=True)
    assert "loss" in tee.text


def test_progress_to_a_closed_file_does_not_end_a_run(monkeypatch):
    monkeypatch.setattr("sys.stderr", closed := io.StringIO())
    closed.close()
    assert len(fit(make(), batches(3), progress=True).history) == 3


def test_progress_without_a_console_is_not_shown(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", None)
    _, history = fit(make(), batches(2), progress=True)
    assert len(history) == 2
    assert capsys.readouterr().out == ""


class Closed(Tee):
    """A terminal that was closed, or a pipe whose reader has ended."""

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "closed"), ValueError("closed file")])
def test_progress_that_cannot_be_written_does_not_end_a_run(error, monkeypatch):
    monkeypatch.setattr("sys.stderr", Closed(error))
    assert len(fit(make(), batches(3), progress=True).history) == 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_progress_in_a_terminal(term, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", term)
    fit(make(), batches(), steps=4, progress=True, log_every=1)
    assert capsys.readouterr().out == ""
    assert "4/4" in terminal.getvalue()
    assert ("step 1/4" in terminal.getvalue()) == (term == "dumb")


def test_a_bar_in_a_narrow_terminal_shows_the_step(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    fit(make(), batches(), steps=4, progress=True, log_every=1)
    assert "4/4  loss " in terminal.getvalue()
    assert "GiB" not in terminal.getvalue()


@pytest.mark.parametrize("to_terminal", [True, False])
def test_a_bar_does_not_redirect_what_a_program_prints_to_a_file(to_terminal, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr("sys.stdout", printed := Terminal() if to_terminal else io.StringIO())
    fit(make(), batches(), progress=True, log_every=1, loggers=[lambda record: print("record", record["step"])])  # noqa: T201
    # If stdout is a terminal too, it is printed above the bar, which would overwrite it otherwise.
    with_records, without_records = (terminal, printed) if to_terminal else (printed, terminal)
    assert "record 4" in with_records.getvalue()
    assert "record" not in without_records.getvalue()


def test_a_bar_shows_square_brackets(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    values = {"classes": "[red]", "[/test] acc": 0.5}
    fit(make(), batches(), progress=True, log_every=1, evaluate=lambda state: values)
    assert "eval_classes [red]  eval_[/test] acc 0.5000" in terminal.getvalue()


def test_a_bar_shows_metrics_with_square_brackets(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    fit(make(loss=lambda p, batch: (squares(p, batch)[0], {"[/a]": batch[1].max()})), batches(), progress=True)
    assert "[/a]" in terminal.getvalue()


def test_progress_can_be_turned_off(capsys):
    fit(make(), batches(), progress=False, evaluate=lambda state: {"accuracy": 1.0})
    assert capsys.readouterr() == ("", "")


def test_iterate_yields_after_each_step():
    step = make()
    records = list(ft.iterate(step, step.init(params()), batches(3), steps=5))
    expected, losses = by_hand(make(), [*batches(3), *batches(3)[:2]])
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert [float(record.metrics["loss"]) for record in records] == losses
    assert_bitwise(records[-1].state, expected)
    assert torch.equal(records[3].batch[0], batches(3)[0][0])
    # iterate does not donate by itself, so all states are still usable.
    assert [int(record.state.step) for record in records] == [1, 2, 3, 4, 5]


def test_iterate_in_a_loop_of_ones_own():
    step = ft.donated(make())
    state = step.init(params())
    for record in ft.iterate(step, state, batches(), epochs=10):
        state = record.state
        if float(record.metrics["loss"]) < 0 or record.step == 6:
            break
    assert int(state.step) == 6
    rest = list(ft.iterate(step, state, batches(), steps=7))
    assert [record.step for record in rest] == [7]


def test_iterate_continues_in_the_middle_of_a_pass():
    def loader():
        return ft.data.loader(ft.data.arrays(tuple(map(torch.cat, zip(*batches(6), strict=True)))), 4, seed=1)

    step, data = make(), loader()
    for record in ft.iterate(step, step.init(params()), data):
        if record.step == 2:
            break
    *_, record = ft.iterate(step, record.state, data)
    expected, losses = by_hand(step, loader())
    assert record.step == len(losses) == 6
    assert_bitwise(record.state, expected)


def test_iterate_yields_a_usable_state_in_each_step():
    step = make()
    norms = [float(record.state.params["w"].norm()) for record in ft.iterate(step, step.init(params()), batches())]
    assert len(set(norms)) == 4


ROWS = 11


def table():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(ROWS, 3, dtype=F64, generator=generator), torch.randn(ROWS, dtype=F64, generator=generator)
    keep = torch.arange(ROWS) % 3 != 1
    return x, y, keep


def uneven(size):
    x, y, keep = table()
    return list(zip(x.split(size), y.split(size), keep.split(size), strict=True))


def selected_loss(params, batch):
    """Return the mean over the rows that `keep` selects, and as metrics the mean over all and the selected share."""
    x, y, keep = batch
    errors = (x @ params["w"] - y) ** 2
    kept = ft.Mean((errors * keep).sum(), keep.sum().to(F64))
    return kept, {"all": errors.mean(), "share": ft.Mean(keep.sum().to(F64), torch.tensor(float(len(y)), dtype=F64))}


@pytest.mark.parametrize("size", [1, 4, 5, 11])
def test_an_evaluation_is_exact_for_uneven_batches(size):
    step = ft.train_step(selected_loss, ft.optim.sgd(0.1))
    state = step.init({"w": params()["w"].double()})
    actual = ft.evaluate(ft.eval_step(selected_loss), state, uneven(size))
    x, y, keep = table()
    errors = (x @ state.params["w"] - y) ** 2
    expected = {"loss": errors[keep].mean(), "all": errors.mean(), "share": keep.double().mean()}
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert type(actual[name]) is float
        assert actual[name] == pytest.approx(float(value), rel=1e-14)


def test_an_evaluation_cannot_count_the_examples_of_a_batch_with_unequal_axes():
    def loss(params, batch):
        return batch["nodes"].mean() * params["w"].sum()

    batch = {"edges": torch.ones(2, 7), "nodes": torch.ones(5, 3)}
    with pytest.warns(
        UserWarning, match=r"loss: batch.edges has 2 rows and batch.nodes 5; .* \(loss\) .*: return ft.Mean"
    ):
        ft.evaluate(ft.eval_step(loss), make(loss=loss).init(params()), [batch])


def test_an_evaluation_counts_the_rows_of_numpy_arrays():
    step = ft.eval_step(lambda params, batch: torch.as_tensor(batch).float().mean())
    assert ft.evaluate(step, make().init(params()), [np.arange(2), np.arange(2, 8)])["loss"] == 3.5


def test_an_evaluation_warns_of_batches_whose_examples_it_cannot_count():
    @dataclasses.dataclass
    class Batch:
        x: np.ndarray

    state, step = make().init(params()), ft.eval_step(lambda params, batch: torch.as_tensor(batch.x).float().mean())
    batches = [Batch(np.arange(2)), Batch(np.arange(2, 8))]
    with pytest.warns(UserWarning, match=r"examples in a Batch is not known.* \(loss\): return ft\.Mean"):
        assert ft.evaluate(step, state, batches)["loss"] == (0.5 + 4.5) / 2
    # A number, say an index, has no examples to count.
    constant = ft.eval_step(lambda params, batch: torch.tensor(float(batch)))
    assert ft.evaluate(constant, state, [1, 2])["loss"] == 1.5


@pytest.mark.parametrize("wrappers", [[], [ft.update_in_backward()]], ids=["donated", "in backward"])
def test_a_loss_that_is_a_view_of_a_parameter_is_reported_as_it_was_before_the_update(wrappers):
    step = ft.compose(ft.train_step(lambda params, batch: params["w"][0], ft.optim.sgd(0.5)), *wrappers, ft.donated())
    _, history = ft.fit(step, step.init({"w": torch.ones(1)}), [torch.zeros(2)] * 3, steps=3, progress=False)
    assert history["loss"] == [1.0, 0.5, 0.0]


def test_an_evaluation_of_float32_adds_up_in_float64():
    # In float32, 2**24 + 1 is 2**24 again: the two ones would be lost.
    def loss(params, batch):
        return ft.Mean(batch * params, torch.tensor(2.0**24))

    state = ft.train_step(loss, ft.optim.sgd(0.1)).init(torch.ones(()))
    data = [torch.tensor(2.0**24), torch.tensor(1.0), torch.tensor(1.0)]
    actual = ft.evaluate(ft.eval_step(loss), state, data)
    assert actual["loss"] == (2.0**24 + 2) / (3 * 2.0**24)


def test_an_evaluation_reads_the_device_once(monkeypatch):
    state = make().init(params())
    evaluation = ft.eval_step(squares)
    reads, counts = PythonReads(monkeypatch), []

    def watched():
        for batch in batches(5):
            counts.append(reads.count)
            yield batch

    ft.evaluate(evaluation, state, watched())
    assert counts == [0] * 5


def test_an_evaluation_changes_neither_state_nor_random_numbers():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    loss = ft.from_module(module, lambda model, batch: model(batch[0]).square().mean())
    state = ft.train_step(loss, ft.optim.sgd(0.1)).init()
    kept, random_state = ft.tree.clone(state), torch.get_rng_state()
    first = ft.evaluate(ft.eval_step(loss), state, batches(3, length=2))
    assert first == ft.evaluate(ft.eval_step(loss), state, batches(3, length=2))
    assert_bitwise(state, kept)
    assert torch.equal(torch.get_rng_state(), random_state)


def writes_params(params, batch, buffers):
    params["w"].add_(1)
    return squares(params, batch)


def writes_batch(params, batch, buffers):
    batch[0].mul_(2)
    return squares(params, batch)


def writes_buffers(params, batch, buffers):
    buffers["seen"].add_(1)
    return squares(params, batch)


@pytest.mark.parametrize(
    ("loss", "path"), [(writes_params, "params.w"), (writes_batch, "batch.0"), (writes_buffers, "buffers.seen")]
)
def test_an_evaluation_that_changes_its_inputs_in_place_is_an_error(loss, path):
    state = make(loss=loss).init(params(), buffers={"seen": torch.zeros(())})
    with pytest.raises(LossError, match=f"{loss.__name__}.*{path} in place"):
        ft.evaluate(ft.eval_step(loss), state, batches(1))


@pytest.mark.parametrize("number", [np.float32(0.5), np.int64(3), np.array(2.0), True, 0.25])
def test_an_evaluation_takes_numbers_of_numpy_as_metrics(number):
    step = make(loss=lambda params, batch: (params["w"].square().mean(), {"each": number}))
    assert ft.evaluate(ft.eval_step(step.loss), step.init(params()), batches(3))["each"] == float(number)


NOT_NUMBERS = [
    (torch.ones(2), "float32[2]"),
    ("text", "str"),
    (torch.tensor(1j), "complex64[]"),
    (ft.Mean(torch.ones(2), torch.ones(())), "a Mean of float32[2]"),
]


@pytest.mark.parametrize(("metric", "description"), NOT_NUMBERS)
def test_an_evaluation_with_a_metric_that_is_no_number(metric, description):
    def loss(params, batch):
        return params["w"].square().mean(), {"each": metric}

    with pytest.raises(LossError, match=re.escape(f"loss: the metric 'each' is {description}; an evaluation takes")):
        ft.evaluate(ft.eval_step(loss), make(loss=loss).init(params()), batches(1))


def test_an_evaluation_gets_copies_of_the_dicts_of_batch_and_buffers():
    def loss(params, batch, buffers):
        buffers["seen"] = buffers["seen"] + 1
        batch["x"] = batch["x"] * 2
        return (batch["x"] @ params["w"]).mean(), {}, buffers

    state = make(loss=loss).init(params(), buffers={"seen": torch.zeros(())})
    batch = {"x": torch.ones(2, 3)}
    first = ft.evaluate(ft.eval_step(loss), state, [batch])
    assert ft.evaluate(ft.eval_step(loss), state, [batch]) == first
    assert float(state.buffers["seen"]) == 0
    assert torch.equal(batch["x"], torch.ones(2, 3))


def test_an_evaluation_of_the_averages():
    step = make(ft.ema(0.5))
    state, _ = fit(step, batches())
    evaluation = ft.eval_step(squares)
    actual = ft.evaluate(evaluation, ft.averaged(state), batches())
    params_by_step, trained = [params()["w"]], make().init(params())
    for batch in batches():
        trained, _ = make()(trained, batch)
        params_by_step.append(trained.params["w"])
    average = params_by_step[0]
    for params_of_step in params_by_step[1:]:
        average = torch.lerp(average, params_of_step, 0.5)
    x, y = (torch.cat(column) for column in zip(*batches(), strict=True))
    expected = ((x @ average - y) ** 2).mean()
    assert actual["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert actual != ft.evaluate(evaluation, state, batches())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", torch.bfloat16])
def test_an_evaluation_in_a_narrow_dtype(dtype):
    seen = []

    def loss(params, batch):
        out = batch[0] @ params["w"].unsqueeze(-1)
        seen.append(out.dtype)
        return out.float().square().mean()

    state = make(loss=loss).init(params())
    wide = ft.evaluate(ft.eval_step(loss), state, batches())
    narrow = ft.evaluate(ft.eval_step(loss), state, batches(), dtype=dtype)
    assert narrow["loss"] == pytest.approx(wide["loss"], rel=1e-2)
    assert set(seen) == {torch.float32, torch.float16 if dtype == "fp16" else torch.bfloat16}


def test_batches_may_hold_strings_and_numbers():
    def loss(params, batch):
        assert batch["name"] == "train"
        return (batch["x"] @ params["w"]).square().mean() * batch["scale"]

    data = [{"x": x, "name": "train", "scale": 2} for x, _ in batches()]
    _, history = fit(make(loss=loss), data)
    assert len(history) == 4


def _calls(wrappers, batch):
    """Return functions that pass the batch to a linear model, by the public function that they call."""
    loss = ft.from_module(nn.Linear(3, 1), lambda model, batch: model(batch["x"]).square().mean())
    step = make(*wrappers, loss=loss)
    return {
        "step": lambda: step(step.init(), batch),
        "fit": lambda: ft.fit(step, step.init(), [batch], progress=False),
        "iterate": lambda: list(ft.iterate(step, step.init(), [batch])),
        "evaluate": lambda: ft.evaluate(ft.eval_step(loss), step.init(), [batch]),
    }


@pytest.mark.parametrize("call", ["step", "fit", "iterate", "evaluate"])
@pytest.mark.parametrize(
    ("batch", "note"),
    [
        ({"x": torch.zeros(2, 3).numpy()}, r"NumPy arrays \(batch\.x\), .*torch\.from_numpy, .*ft\.data\.loader"),
        ({"x": torch.zeros(2, 3).double()}, r"batch\.x is float64\[2, 3\], but the parameters are float32: convert"),
        ({"x": [[0.0] * 3] * 2}, r"lists in place of tensors \(batch\.x\), .*\.pad\(\), .*return_tensors='pt'$"),
        ({"x": torch.zeros(2, 3).byte()}, r"uint8 tensors \(batch\.x\), .*x\.float\(\) / 255"),
        ({"x": [torch.zeros(2)] * 3}, r"lists in place of tensors \(batch\.x\), .*collate=ft\.data\.pad\(\)"),
        ({"y": torch.zeros(2, 3)}, r"Linear\): its second argument was this batch: batch\.y is float32\[2, 3\]$"),
        ((torch.zeros(2, 3), 7), r"this batch: batch\.0 is float32\[2, 3\], batch\.1 is int$"),
    ],
    ids=["numpy", "float64", "lists", "uint8", "columns", "names", "tuple"],
)
def test_a_batch_that_does_not_fit_the_parameters_is_named_by_a_note(call, batch, note):
    with pytest.raises((TypeError, RuntimeError, KeyError)) as raised:
        _calls((), batch)[call]()
    (message,) = raised.value.__notes__
    assert re.search(note, message)
    assert message in "".join(traceback.format_exception(raised.value))


def test_notes_name_a_batch_elsewhere_a_criterion_without_module_and_a_second_backward_pass():
    def notes(call):
        with pytest.raises((TypeError, RuntimeError)) as raised:
            call()
        return " ".join(raised.value.__notes__)

    elsewhere = _calls((), {"x": torch.zeros(2, 3, device="meta")})["step"]
    assert "batch.x is on meta, but the parameters are on cpu" in notes(elsewhere)

    step = make(loss=lambda model, batch: model(batch))
    assert "ft.from_module(module, criterion)" in notes(lambda: step(step.init({"w": torch.ones(3)}), torch.ones(3)))

    def calls_backward(params, batch):
        loss = (params["w"] * batch).square().sum()
        loss.backward()
        return loss

    twice = make(loss=calls_backward)
    assert "called .backward()" in notes(lambda: twice(twice.init({"w": torch.ones(3)}), torch.ones(3)))


def test_uint8_is_named_where_an_operation_has_no_bytes():
    loss = ft.from_module(nn.BatchNorm1d(3), lambda model, batch: model(batch["x"]).square().mean())
    step = make(loss=loss)
    with pytest.raises(NotImplementedError) as raised:
        step(step.init(), {"x": torch.zeros(2, 3).byte()})
    assert any("uint8 tensors (batch.x)" in note for note in raised.value.__notes__)


def test_a_float64_batch_is_named_where_the_step_is_compiled_and_cut():
    with pytest.raises(RuntimeError) as raised:
        _calls((ft.accumulate(2), ft.compiled(backend="eager")), {"x": torch.zeros(2, 3).double()})["step"]()
    assert any("batch.x is float64[" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("wrapper", [ft.accumulate(2), ft.compiled(backend="eager")], ids=["pieces", "graph"])
def test_the_gradient_of_an_input_that_is_no_leaf_says_how_to_take_it(wrapper):
    def loss(params, batch):
        (slope,) = torch.autograd.grad((batch["x"] * params["w"]).sum(), batch["x"], create_graph=True)
        return slope.square().mean()

    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), wrapper)
    with pytest.raises(RuntimeError) as raised:
        step(step.init({"w": torch.ones(3)}), {"x": torch.ones(4, 3, requires_grad=True)})
    assert any("x = batch['x'].detach().requires_grad_()" in note for note in raised.value.__notes__)


def test_a_gradient_in_an_evaluation_gets_a_note_that_says_how_to_take_it():
    def slope(w, batch):
        x = batch["x"].detach().requires_grad_()
        return torch.autograd.grad((w * x).square().sum(), x, create_graph=True)[0].square().mean()

    def under_enable_grad(w, batch):
        with torch.enable_grad():
            return slope(w, batch)

    state, data = ft.train_step(slope, ft.optim.sgd(0.1)).init(torch.ones(2)), [{"x": torch.ones(3, 2)}]
    with pytest.raises(RuntimeError) as raised:
        ft.evaluate(ft.eval_step(slope), state, data)
    assert any("under torch.enable_grad()" in note for note in raised.value.__notes__)
    assert ft.evaluate(ft.eval_step(under_enable_grad), state, data) == {"loss": 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_of_a_loss_that_have_nothing_to_do_with_its_batch_get_no_note(dtype):
    def loss(params, batch):
        raise RuntimeError("out of luck")

    step = make(loss=loss)
    with pytest.raises(RuntimeError, match="out of luck") as raised:
        step(step.init(params()), {"x": torch.zeros(2, 3, dtype=dtype), "name": "train"})
    assert not hasattr(raised.value, "__notes__")


def test_batches_of_hugging_faces_collators():
    transformers = pytest.importorskip("transformers")
    data = [transformers.BatchEncoding({"x": x, "y": y}) for x, y in batches()]

    def loss(params, batch):
        return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()

    actual, _ = fit(make(ft.accumulate(2), loss=loss), data)
    expected, _ = fit(make(ft.accumulate(2), loss=loss), [dict(batch) for batch in data])
    assert_bitwise(actual, expected)


def test_data_that_an_earlier_run_has_begun_is_warned_of(recwarn):
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1))
    data = ft.data.loader(ft.data.arrays(torch.ones(8, 1)), 2)
    state, _ = ft.fit(step, step.init({"w": torch.ones(1)}), data, steps=3, progress=False)
    ft.fit(step, state, data, steps=5, progress=False)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"state is at step 0, and the data at epoch 1, window 1, batch 0"):
        ft.fit(step, step.init({"w": torch.ones(1)}), data, steps=1, progress=False)


def test_an_evaluation_of_a_loader_that_leaves_out_samples_is_warned_of(recwarn):
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1))
    dataset, evaluate = ft.data.arrays(torch.ones(9, 1)), ft.eval_step(step.loss)
    state = step.init({"w": torch.ones(1)})
    ft.evaluate(evaluate, state, ft.data.loader(dataset, 2, drop_last=False))
    assert not recwarn
    with pytest.warns(UserWarning, match=r"leaves out 1 samples.*shuffle=False, drop_last=False"):
        ft.evaluate(evaluate, state, ft.data.loader(dataset, 2))
