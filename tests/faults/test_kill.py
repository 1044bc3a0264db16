"""SIGKILL at random moments of saves, and of runs that are resumed until they are done.

Children are forked from this process, so that thousands of them can be killed. The moments are drawn from a seed, and
lie between the messages that a child sends of its progress.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.checkpoint import Checkpoints, load, save
from tests.faults.figures import tally, times
from tests.faults.forks import Child, quiet_forks
from tests.faults.saves import FROZEN, bits, checkpoints, newest, require_whole, temporary, tree

# Saves

BLOCK, KEEP = 4, 2
MODES = {"sync": {"async_": False}, "async": {"async_": True}, "rotation": {"async_": False, "keep": 1}}


def saving(send, directory, first, options):
    """Save some steps; send a message when the save of a step begins, and another when it is on the disk."""
    with checkpoints(directory, **{"keep": KEEP, **options}) as writer:
        send(["saved", first - 1])
        for step in range(first, first + BLOCK):
            send(["begun", step])
            # All but one have frozen parameters, whose file the later ones share.
            writer.save(step, tree(step, FROZEN if step % BLOCK else None))
            # In the background, `save` waits for the save before, which is then on the disk.
            send(["saved", step - writer.async_])
        writer.wait()
        send(["saved", step])


def remaining_messages(child):
    """Return the remaining messages of a child that has ended."""
    messages = []
    while (message := child.receive()) is not None:
        messages.append(message)
    return messages


def last_step(messages, event, default):
    """Return the last step of the messages about an event."""
    return max((step for name, step in messages if name == event), default=default)


@quiet_forks
@pytest.mark.parametrize("mode", MODES)
def test_after_a_kill_during_saves_the_last_saved_checkpoint_is_whole(mode, ram_path):
    draw, directory, options = random.Random(mode), ram_path / "run", MODES[mode]
    num_interrupted = num_leftovers = 0
    count = times(3400, 4)
    span = seconds_of_saves(directory, options)
    known = newest(directory)
    with tally(f"SIGKILL in a save, {mode}") as tries:
        for number in range(count):
            with tries.attempt(number):
                child = Child(saving, directory, known + 1, options)
                assert child.receive() == ["saved", known]
                time.sleep(draw.random() * span)
                child.signal(signal.SIGKILL)
                messages = remaining_messages(child)
                child.wait()
                num_leftovers += bool(temporary(directory))
                before, known = known, newest(directory)
                saved, begun = (last_step(messages, event, default=before) for event in ("saved", "begun"))
                assert saved <= known <= begun, (known, messages)
                num_interrupted += known < before + BLOCK
                require_whole(directory)
        tries.note = f"{num_leftovers} of them left a temporary directory"
        # Many kills come before the last save has ended; only checked with many kills, because of chance.
        assert num_interrupted > count // 4 or count < 1000
        assert num_leftovers > count // 50 or count < 1000


def seconds_of_saves(directory, options):
    """Return the seconds that the saves take when no signal comes."""
    child = Child(saving, directory, 1, options)
    child.receive()
    start = time.perf_counter()
    remaining_messages(child)
    assert child.wait() == 0
    return time.perf_counter() - start


# Runs

STEPS, SAMPLES, BATCH = 20, 33, 4
MAX_STEPS_BEFORE_A_KILL = times(8, 14)
"""More than two intervals between checkpoints."""
DATA = {
    "list": lambda: [
        torch.utils.data.default_collate(samples()[start : start + BATCH]) for start in range(0, 28, BATCH)
    ],
    "loader": lambda: ft.data.loader(samples(), BATCH, seed=5),
    "workers": lambda: ft.data.loader(samples(), BATCH, seed=5, num_workers=2, context="fork"),
}


def samples():
    draw = torch.Generator().manual_seed(0)
    return [{"id": number, "x": torch.randn(4, generator=draw)} for number in range(SAMPLES)]


def squares(model, batch):
    return model(batch["x"]).square().mean()


@ft.wrapper
def named_batches():
    """Report the ids of the samples of a batch as metrics."""

    def wrap(grad):
        def naming(state, batch, rng):
            gradients = grad(state, batch, rng)
            ids = {f"id{index}": value for index, value in enumerate(batch["id"].unbind())}
            return replace(gradients, metrics={**gradients.metrics, **ids})

        return naming

    return ft.Wrapper("named_batches", grad=ft.OnGrad(wrap))


def make_step():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
    step = ft.train_step(ft.from_module(module, squares), ft.optim.adamw(0.05))
    return ft.compose(step, ft.with_amp("fp16"), ft.accumulate(2), ft.ema(0.9), ft.skip_nonfinite(), named_batches)


class Reporting(Checkpoints):
    """Sends a message after each step."""

    def __init__(self, send, directory, **options):
        super().__init__(directory, **options)
        self._send = send

    def check(self):
        super().check()
        self._send("step")


def training(send, directory, data):
    """Train with everything that a run can resume, and save the result next to the run."""
    step = make_step()
    send("begun")
    state, history = ft.fit(
        step,
        step.init(seed=3),
        DATA[data](),
        steps=STEPS,
        checkpoints=Reporting(send, directory / "run", every=3, keep=2),
        evaluate=lambda state: {"norm": sum(leaf.double().square().sum() for leaf in state.params.values())},
        evaluate_every=5,
        log_every=2,
        loggers=[ft.loggers.jsonl(directory / "log.jsonl")],
        progress=False,
    )
    records = [{name: value for name, value in record.items() if name != "seconds"} for record in history]
    # An earlier process may have been killed after it saved the result.
    if not (directory / "done").exists():
        save(directory / "done", {"state": state, "records": records})
    send("done")


def outcome(directory):
    """Return the state, the history and the log of a run, without times."""
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return bits(load(directory / "done")), [{**line, "seconds": None} for line in lines]


def training_in_a_group(send, directory, data):
    os.setpgid(0, 0)
    training(send, directory, data)


def kill_workers(child):
    """Kill the workers of a killed process, which would end by themselves some seconds later."""
    if child is not None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def run_until_done(directory, data, draw, span):
    """Run until it is done, with kills at random moments; return the numbers of kills and of resumed processes.

    A kill comes some steps after the start, and not some seconds, so that a slow machine makes progress too. `span` is
    the seconds that a step takes.
    """
    kills, resumed, before = 0, 0, None
    while True:
        resumed += bool(newest_step(directory))
        child = Child(training_in_a_group, directory, data)
        assert child.receive() == "begun"
        # Workers of the killed process ran until now, next to the new process.
        kill_workers(before)
        for _ in range(draw.randint(0, MAX_STEPS_BEFORE_A_KILL)):
            if child.receive() != "step":
                break
        time.sleep(draw.random() * span)
        with suppress(ProcessLookupError):
            child.signal(signal.SIGKILL)
        code, before = child.wait(), child
        if code == 0:
            kill_workers(before)
            return kills, resumed
        assert code == -signal.SIGKILL
        kills += 1


def newest_step(directory):
    steps = Checkpoints(directory / "run", every=1).steps()
    return steps[-1] if steps else 0


@pytest.fixture
def sockets(ram_path, monkeypatch):  # After `ram_path`, whose folder pytest makes.
    """Workers put their sockets into a folder of the test, since killed workers do not remove them."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@quiet_forks
@pytest.mark.usefixtures("sockets")
@pytest.mark.parametrize("data", DATA)
def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_one_that_is_not(data, ram_path):
    draw, kills, resumed, runs = random.Random(data), 0, 0, 0
    (ram_path / "whole").mkdir()
    child = Child(training, ram_path / "whole", data)
    assert [child.receive(), child.receive()] == ["begun", "step"]
    start = time.perf_counter()
    assert child.wait() == 0
    span = (time.perf_counter() - start) / STEPS
    whole = outcome(ram_path / "whole")
    assert [line["step"] for line in whole[1] if "loss" in line] == list(range(1, STEPS + 1))
    assert {line.get("skipped") for line in whole[1] if "loss" in line} == {0.0, 1.0}
    with tally(f"SIGKILL in a run, {data}") as tries:
        while kills + len(tries.failures) < times(200, 2):
            directory = ram_path / str(runs)
            directory.mkdir()
            runs += 1
            with tries.attempt(f"run {runs}"):
                killed, num_resumed = run_until_done(directory, data, draw, span)
                kills, resumed = kills + killed, resumed + num_resumed
                assert outcome(directory) == whole
            shutil.rmtree(directory)
            # The figure counts kills, not runs.
            tries.runs, tries.note = kills, f"{runs} runs, {resumed} times gone on"
        assert resumed > runs // 4


def test_a_run_that_starts_again_keeps_the_lines_of_other_runs_in_the_log(ram_path):
    """A run removes only lines of its own directory from the log."""
    log, step = ft.loggers.jsonl(ram_path / "log.jsonl"), make_step()

    def run(name, steps):
        checkpoints = Checkpoints(ram_path / name, every=100)
        ft.fit(
            step, step.init(seed=3), DATA["list"](), steps=steps, checkpoints=checkpoints, loggers=[log], progress=False
        )
        return [json.loads(line)["step"] for line in (ram_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]

    assert run("a", 3) == [1, 2, 3]
    assert run("b", 2) == [1, 2, 3, 1, 2]
