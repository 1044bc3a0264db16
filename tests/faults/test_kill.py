"""SIGKILL at random moments: of saves, and of whole runs, which go on until they are done.

Children are forked from this process, so that thousands of them can be killed. The moments are drawn from a seed, and
are spread over the time that the same work takes undisturbed, counted from what a child says it has done.
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
from tests.faults.saves import FROZEN, bits, checkpoints, fast, newest, require_whole, temporary, tree

__all__ = ["fast"]


# Saves

BLOCK, KEEP = 4, 2
MODES = {"sync": {"async_": False}, "async": {"async_": True}, "rotation": {"async_": False, "keep": 1}}


def saving(tell, directory, first, options):
    """Save some steps, and say of each that it begins, and later that it is on the disk."""
    with checkpoints(directory, **{"keep": KEEP, **options}) as writing:
        tell(["saved", first - 1])
        for step in range(first, first + BLOCK):
            tell(["begun", step])
            # Some have frozen parameters, whose file the next ones share.
            writing.save(step, tree(step, FROZEN if step % BLOCK else None))
            # In the background, saving the next one waits for it.
            tell(["saved", step - writing.async_])
        writing.wait()
        tell(["saved", step])


def heard(child):
    """All that a child that is no more has said."""
    said = []
    while (word := child.hear()) is not None:
        said.append(word)
    return said


@quiet_forks
@pytest.mark.parametrize("mode", MODES)
def test_a_process_is_killed_while_it_saves(mode, fast):
    draw, directory, options, within, left = random.Random(mode), fast / "run", MODES[mode], 0, 0
    count = times(3400, 4)
    span = took(directory, options)
    known = newest(directory)
    with tally(f"SIGKILL in a save, {mode}") as tries:
        for number in range(count):
            with tries.one(number):
                child = Child(saving, directory, known + 1, options)
                assert child.hear() == ["saved", known]
                time.sleep(draw.random() * span)
                child.signal(signal.SIGKILL)
                said = heard(child)
                child.end()
                left += bool(temporary(directory))
                before, known = known, newest(directory)
                saved, begun = (
                    max((step for what, step in said if what == name), default=before) for name in ("saved", "begun")
                )
                assert saved <= known <= begun, (known, said)
                within += known < before + BLOCK
                require_whole(directory)
        tries.note = f"{left} of them left a temporary directory"
        # That kills strike in the midst of it, of which few on a busy machine say little.
        assert within > count // 4 or count < 1000
        assert left > count // 50 or count < 1000


def took(directory, options):
    """Seconds that saving takes when nobody disturbs."""
    child = Child(saving, directory, 1, options)
    child.hear()
    start = time.perf_counter()
    heard(child)
    assert child.end() == 0
    return time.perf_counter() - start


# Runs

STEPS, SAMPLES, BATCH = 20, 33, 4
LATEST = times(8, 14)
"""Steps of a process before it is killed at most: more than twice as many as between checkpoints."""
DATA = {
    "list": lambda: [torch.utils.data.default_collate(samples()[at : at + BATCH]) for at in range(0, 28, BATCH)],
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
    """Put the ids of a batch into the record of its step."""

    def wrap(grad):
        def naming(state, batch, rng):
            actual = grad(state, batch, rng)
            places = enumerate(batch["id"].unbind())
            return replace(actual, metrics={**actual.metrics, **{f"id{place}": value for place, value in places}})

        return naming

    return ft.Wrapper("named_batches", grad=ft.OnGrad(wrap))


def built():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
    step = ft.train_step(ft.from_module(module, squares), ft.optim.adamw(0.05))
    return ft.compose(step, ft.with_amp("fp16"), ft.accumulate(2), ft.ema(0.9), ft.skip_nonfinite(), named_batches)


class Telling(Checkpoints):
    """Says after each step that there was one."""

    def __init__(self, tell, directory, **options):
        super().__init__(directory, **options)
        self._tell = tell

    def check(self):
        super().check()
        self._tell("step")


def training(tell, directory, data):
    """A run with everything that there is to resume; its result is saved beside it."""
    step = built()
    tell("begun")
    state, history = ft.fit(
        step,
        step.init(seed=3),
        DATA[data](),
        steps=STEPS,
        checkpoints=Telling(tell, directory / "run", every=3, keep=2),
        evaluate=lambda state: {"norm": sum(leaf.double().square().sum() for leaf in state.params.values())},
        evaluate_every=5,
        log_every=2,
        loggers=[ft.loggers.jsonl(directory / "log.jsonl")],
        progress=False,
    )
    records = [{name: value for name, value in made.items() if name != "seconds"} for made in history]
    # It may have been killed when all was done.
    if not (directory / "done").exists():
        save(directory / "done", {"state": state, "records": records})
    tell("done")


def outcome(directory):
    """The state, the history and the log of a run, times aside."""
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return bits(load(directory / "done")), [{**line, "seconds": None} for line in lines]


def grouped(tell, directory, data):
    os.setpgid(0, 0)
    training(tell, directory, data)


def let_go(child):
    """End the workers that a killed process has left, which else do so seconds later."""
    if child is not None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def went_on(directory, data, draw, span):
    """Run until it is done, killed at random moments; return how often, and how often it went on from a checkpoint.

    Steps are counted and not seconds, so that the run goes further however slow the machine is; `span` is that of one.
    """
    kills, resumed, before = 0, 0, None
    while True:
        resumed += bool(newest_step(directory))
        child = Child(grouped, directory, data)
        assert child.hear() == "begun"
        # Its workers have lived on until here, beside the new ones.
        let_go(before)
        for _ in range(draw.randint(0, LATEST)):
            if child.hear() != "step":
                break
        time.sleep(draw.random() * span)
        with suppress(ProcessLookupError):
            child.signal(signal.SIGKILL)
        code, before = child.end(), child
        if code == 0:
            let_go(before)
            return kills, resumed
        assert code == -signal.SIGKILL
        kills += 1


def newest_step(directory):
    steps = Checkpoints(directory / "run", every=1).steps()
    return steps[-1] if steps else 0


@pytest.fixture
def sockets(fast, monkeypatch):  # After `fast`, whose folder pytest makes.
    """Workers put their sockets into a folder of the test, for those that are killed leave them behind."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@quiet_forks
@pytest.mark.usefixtures("sockets")
@pytest.mark.parametrize("data", DATA)
def test_a_run_is_killed_again_and_again(data, fast):
    draw, kills, resumed, runs = random.Random(data), 0, 0, 0
    (fast / "whole").mkdir()
    child = Child(training, fast / "whole", data)
    assert [child.hear(), child.hear()] == ["begun", "step"]
    start = time.perf_counter()
    assert child.end() == 0
    span = (time.perf_counter() - start) / STEPS
    whole = outcome(fast / "whole")
    assert [line["step"] for line in whole[1] if "loss" in line] == list(range(1, STEPS + 1))
    assert {line.get("skipped") for line in whole[1] if "loss" in line} == {0.0, 1.0}
    with tally(f"SIGKILL in a run, {data}") as tries:
        while kills + len(tries.failures) < times(200, 2):
            directory = fast / str(runs)
            directory.mkdir()
            runs += 1
            with tries.one(f"run {runs}"):
                killed, past = went_on(directory, data, draw, span)
                kills, resumed = kills + killed, resumed + past
                assert outcome(directory) == whole
            shutil.rmtree(directory)
            # Counted are kills, of which there are several in a run.
            tries.runs, tries.note = kills, f"{runs} runs, {resumed} times gone on"
        assert resumed > runs // 4


def test_a_log_of_several_runs_keeps_those_that_are_not_gone_on(fast):
    """A run that begins anew takes back the lines of its own directory alone, where it was killed before a save."""
    log, step = ft.loggers.jsonl(fast / "log.jsonl"), built()

    def run(name, steps):
        kept = Checkpoints(fast / name, every=100)
        ft.fit(step, step.init(seed=3), DATA["list"](), steps=steps, checkpoints=kept, loggers=[log], progress=False)
        return [json.loads(line)["step"] for line in (fast / "log.jsonl").read_text(encoding="utf-8").splitlines()]

    assert run("a", 3) == [1, 2, 3]
    assert run("b", 2) == [1, 2, 3, 1, 2]
