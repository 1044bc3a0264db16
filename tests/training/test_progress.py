"""The progress of `fit`: lines in a file, a bar in a terminal, and a stderr that cannot be written to."""

import errno
import io
import re
import sys
import time

import pytest
import torch

import ftrain as ft
from ftrain.training import progress
from ftrain.training.progress import total_steps
from tests.training.problem import batches, fit, make_step, squares


def test_progress_lines_show_metrics_throughput_and_time_left(capsys):
    fit(
        make_step(),
        batches(),
        steps=20,
        evaluate=lambda state: {"accuracy": 0.25},
        evaluate_every=10,
        log_every=1,
        throughput={"examples": lambda batch: len(batch[1])},
        progress=True,
    )
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert "step 10  eval_accuracy 0.2500" in lines
    assert "step 20  eval_accuracy 0.2500" in lines
    lines_of_steps = [line for line in lines if "/20" in line]
    # One after each tenth of the steps.
    assert len(lines_of_steps) == 10
    assert lines_of_steps[-1].startswith("step 20/20  loss ")
    pattern = r"step \d+/20  loss \d+\.\d{4}  largest -?\d+\.\d{4}  [\d,]+ examples/s  \d+:\d\d:\d\d left  \d+\.\d GiB"
    for line in lines_of_steps:
        assert re.fullmatch(pattern, line), line
        assert len(line) < 100


def test_very_small_and_large_numbers_are_shown_in_powers_of_ten(capsys):
    def step(state, batch):
        return state, {"loss": 2e-6, "largest": 3e12, "zero": 0.0}

    ft.fit(step, torch.zeros(()), batches(1), progress=True, evaluate=lambda state: {"accuracy": 2e-5})
    err = capsys.readouterr().err
    assert "  loss 2.000e-06  largest 3.000e+12  zero 0.0000  " in err
    assert "eval_accuracy 2.000e-05" in err


def test_a_rate_below_one_is_shown_with_decimals():
    assert progress.describe({}, {"images": 0.25}, None, 0) == "0.25 images/s  0.0 GiB"


def test_a_run_of_endless_steps_shows_no_time_left(capsys, monkeypatch):
    """`sys.maxsize` steps take longer than a timedelta can hold."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    fit(make_step(), batches(1), steps=sys.maxsize, progress=True, log_every=1, stop=lambda history: "enough")
    err = capsys.readouterr().err
    assert f"step 1/{sys.maxsize}  loss " in err
    assert "left" not in err


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
    fit(make_step(), data(), progress=True, evaluate=evaluate, evaluate_every=2, **options)
    lines = [line for line in capsys.readouterr().err.splitlines() if "examples/s" in line]
    # A batch of 4 examples takes a second.
    assert all("  4 examples/s  " in line for line in lines)
    seconds_left = [re.search(r"0:00:(\d\d) left", line).group(1) for line in lines]
    assert seconds_left == ["03", "02", "01", "00"]


def test_progress_without_a_known_end_shows_no_time_left(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    fit(make_step(), iter(batches()), progress=True, log_every=1)
    err = capsys.readouterr().err
    assert "step 1  loss " in err
    assert "left" not in err
    # Only a bar returns to the beginning of its line.
    assert "\r" not in err


def test_epochs_of_data_with_a_length_have_a_known_end(capsys):
    fit(make_step(), batches(20), epochs=2, progress=True, log_every=1)
    shown_steps = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert shown_steps == [f"{step}/40" for step in range(4, 41, 4)]


@pytest.mark.parametrize(
    ("steps", "epochs", "position", "expected"),
    [
        (None, 3, {"step": 10, "epoch": 1, "batches": 2}, 16),
        (12, 3, {"step": 10, "epoch": 1, "batches": 2}, 12),
        (None, None, {"step": 7, "epoch": 0, "batches": 0}, 11),
        (9, None, {"step": 7, "epoch": 0, "batches": 0}, 9),
    ],
)
def test_the_end_is_known_if_a_run_resumes_within_an_epoch(steps, epochs, position, expected):
    assert total_steps(steps, epochs, batches(4), **position) == expected


def test_the_end_of_epochs_of_an_iterator_is_not_known():
    assert total_steps(None, 2, iter(batches(4)), step=0, epoch=0, batches=0) is None


class MinimalStream:
    """A replacement of stderr with the two methods that `print` needs."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_is_printed_to_a_stderr_that_is_no_file(monkeypatch):
    stream = MinimalStream()
    monkeypatch.setattr("sys.stderr", stream)
    fit(make_step(), batches(), steps=3, progress=True)
    assert "loss" in stream.text


def test_progress_to_a_closed_file_does_not_end_a_run(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    assert len(fit(make_step(), batches(3), progress=True).history) == 3


def test_progress_without_a_console_is_not_shown(monkeypatch, capsys):
    """There Python has None as stderr."""
    monkeypatch.setattr("sys.stderr", None)
    _, history = fit(make_step(), batches(2), progress=True)
    assert len(history) == 2
    assert capsys.readouterr().out == ""


class FailingStream(MinimalStream):
    """A stream that raises an error when it is written to: a closed terminal, or a pipe whose reader has ended."""

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "closed"), ValueError("closed file")])
def test_progress_that_cannot_be_written_does_not_end_a_run(error, monkeypatch):
    monkeypatch.setattr("sys.stderr", FailingStream(error))
    assert len(fit(make_step(), batches(3), progress=True).history) == 3


class Terminal(io.StringIO):
    def isatty(self):
        return True


def set_terminal(monkeypatch):
    """Set stderr to a terminal in which `rich` draws a bar, and return it.

    No fixture can do so: pytest sets stderr again when the test begins.
    """
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def test_progress_in_a_terminal_is_a_bar(capsys, monkeypatch):
    terminal = set_terminal(monkeypatch)
    fit(make_step(), batches(), steps=4, progress=True, log_every=1)
    assert capsys.readouterr().out == ""
    assert "4/4" in terminal.getvalue()
    assert "step 1/4" not in terminal.getvalue()


def test_progress_in_a_terminal_that_cannot_move_the_cursor_is_lines(monkeypatch):
    terminal = set_terminal(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    fit(make_step(), batches(), steps=4, progress=True, log_every=1)
    assert "step 1/4" in terminal.getvalue()
    assert "step 4/4" in terminal.getvalue()


def test_a_bar_in_a_narrow_terminal_shows_the_step(monkeypatch):
    terminal = set_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")
    fit(make_step(), batches(), steps=4, progress=True, log_every=1)
    assert "4/4  loss " in terminal.getvalue()
    assert "GiB" not in terminal.getvalue()


def print_step(record):
    print("record", record["step"])  # noqa: T201


def test_what_a_program_prints_to_a_terminal_is_shown_above_the_bar(monkeypatch):
    """The bar would overwrite it otherwise."""
    terminal = set_terminal(monkeypatch)
    stdout = Terminal()
    monkeypatch.setattr("sys.stdout", stdout)
    fit(make_step(), batches(), progress=True, log_every=1, loggers=[print_step])
    assert "record 4" in terminal.getvalue()
    assert "record" not in stdout.getvalue()


def test_what_a_program_prints_to_a_file_is_not_redirected_by_the_bar(monkeypatch):
    terminal = set_terminal(monkeypatch)
    stdout = io.StringIO()
    monkeypatch.setattr("sys.stdout", stdout)
    fit(make_step(), batches(), progress=True, log_every=1, loggers=[print_step])
    assert "record 4" in stdout.getvalue()
    assert "record" not in terminal.getvalue()


def test_square_brackets_of_an_evaluation_are_shown_above_the_bar(monkeypatch):
    """`rich` would take them for markup."""
    terminal = set_terminal(monkeypatch)
    values = {"classes": "[red]", "[/test] acc": 0.5}
    fit(make_step(), batches(), progress=True, log_every=1, evaluate=lambda state: values)
    assert "eval_classes [red]  eval_[/test] acc 0.5000" in terminal.getvalue()


def test_square_brackets_of_a_metric_are_shown_in_the_bar(monkeypatch):
    terminal = set_terminal(monkeypatch)

    def loss(params, batch):
        return squares(params, batch)[0], {"[/a]": batch[1].max()}

    fit(make_step(loss=loss), batches(), progress=True)
    assert "[/a]" in terminal.getvalue()


def test_progress_can_be_turned_off(capsys):
    fit(make_step(), batches(), progress=False, evaluate=lambda state: {"accuracy": 1.0})
    assert capsys.readouterr() == ("", "")
