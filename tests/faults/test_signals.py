"""Signals at any moment of a run with checkpoints: saved after a step, with the documented exit code, and no harm."""

import functools
import os
import random
import signal
import time

import pytest
import torch

import ftrain as ft
from tests.exhaustive import exhaustive_rows
from tests.faults.figures import FULL, tally, times
from tests.faults.forks import FOREVER, Child, quiet_forks
from tests.faults.problem import make
from tests.faults.specimens import same

pytestmark = quiet_forks

STEPS, EVERY, EVALUATE, LOG = 40, 6, 9, 4
ENDED, OUTSIDE, INTERRUPTED = 0, 90, 91
SIGNALS = {"SIGTERM": (signal.SIGTERM, 143), "SIGINT": (signal.SIGINT, 130)}
signals = pytest.mark.parametrize("name", SIGNALS)


def noisy(params, batch, rng):
    kept = ft.random.dropout(rng, batch["x"], 0.2)
    return ((kept @ params["w"] - batch["y"]) ** 2).mean()


def problem():
    draw = torch.Generator().manual_seed(0)
    data = ft.data.arrays({"x": torch.randn(64, 3, generator=draw), "y": torch.randn(64, generator=draw)})
    step = make(noisy, ft.ema(0.9))
    return step, step.init({"w": torch.ones(3)}, seed=1), ft.data.loader(data, 5, seed=2)


def measured(state):
    return {"norm": ft.tree.global_norm(state.params)}


def train(directory=None, **options):
    step, state, data = problem()
    checkpoints = None if directory is None else ft.Checkpoints(directory, every=EVERY, keep=2)
    options = {"evaluate": measured, "evaluate_every": EVALUATE, "log_every": LOG, "progress": False, **options}
    return ft.fit(step, state, data, steps=STEPS, checkpoints=checkpoints, **options)


def records(history):
    """What of a history is no time."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


@functools.cache
def whole():
    """A run that nobody interrupts: how it ends, its history, and the state after each step."""
    step, state, data = problem()
    states = {made.step: ft.tree.clone(made.state) for made in ft.iterate(step, state, data, steps=STEPS)}
    result = train()
    assert same(result.state, states[STEPS])
    return result.state, records(result.history), states


def interrupted(tell, directory, default):
    """Train and tell of every step; signals outside of `fit` have an exit code of their own, or end the process."""
    if not default:
        for number, _ in SIGNALS.values():
            signal.signal(number, lambda *_: os._exit(OUTSIDE))
    count = 0

    def told(batch):
        nonlocal count
        count += 1
        tell(count)
        return 1

    try:
        train(directory, throughput={"steps": told})
    except KeyboardInterrupt:
        return INTERRUPTED
    return ENDED


def signalled(directory, number, after, delays, default=False):
    """Send a signal a little after a number of steps, and others later; return the exit code and the steps made."""
    child = Child(interrupted, directory, default)
    steps = 0
    while steps < after and (said := child.hear()) is not None:
        steps = said
    for delay in delays:
        time.sleep(delay)
        child.signal(number)
    while (said := child.hear()) is not None:
        steps = said
    return child.end(), steps


def step_length(directory):
    """Seconds that a step takes."""
    child = Child(interrupted, directory, False)
    child.hear()
    began = time.monotonic()
    assert child.end() == ENDED
    return (time.monotonic() - began) / STEPS


def goes_on(directory):
    """The run goes on to the same end as one that nobody has interrupted."""
    result = train(directory)
    state, history, _ = whole()
    return same(result.state, state) and records(result.history) == history


@signals
def test_a_signal_at_any_moment_saves_after_the_step(name, tmp_path):
    number, code = SIGNALS[name]
    count, draw = times(150, 3), random.Random(name)
    states, takes = whole()[2], step_length(tmp_path / "first")
    saved = 0
    with tally(f"signals: {name}") as tries:
        while tries.runs < count:
            directory, before = tmp_path / str(tries.runs), 0
            # Some runs are interrupted more than once.
            for _ in range(draw.randint(1, 2)):
                actual, steps = signalled(
                    directory, number, draw.randint(1, STEPS - before), [draw.uniform(0, 2 * takes)]
                )
                tries.runs += 1
                latest = ft.Checkpoints(directory, every=EVERY).latest({"state": states[1]})
                at = None if latest is None else latest.step
                saved += actual == code
                right = at is not None and same(latest.parts["state"], states[at])
                # After the fit, which has then done all that it had to.
                right &= at == before + steps if actual == code else actual in (ENDED, OUTSIDE) and at == STEPS
                if not right:
                    tries.failures.append((tries.runs, actual, before, steps, at))
                before = at or 0
                if before == STEPS:
                    break
            if not goes_on(directory):
                tries.failures.append((tries.runs, "goes on otherwise"))
        tries.note = f"{saved} within fit, exit code {code}"
        # Else nothing was tried.
        assert saved


@signals
def test_a_second_signal_at_any_moment_does_no_harm(name, tmp_path):
    number, code = SIGNALS[name]
    stopped = -number if number == signal.SIGTERM else INTERRUPTED
    draw, at_once = random.Random(name), 0
    states, takes = whole()[2], step_length(tmp_path / "first")
    with tally(f"signals: {name} twice") as tries:
        for tried in range(1, times(150, 2) + 1):
            tries.runs = tried
            directory = tmp_path / str(tried)
            moments = [draw.uniform(0, takes), draw.choice([0.0, draw.uniform(0, 0.01)])]
            actual, _ = signalled(directory, number, draw.randint(1, STEPS), moments, default=True)
            at_once += actual == stopped
            # The first may have come after the fit, or the second after what the first has asked for.
            if actual not in (stopped, code, ENDED, -number):
                tries.failures.append((tried, actual, moments))
            latest = ft.Checkpoints(directory, every=EVERY).latest({"state": states[1]})
            if latest is not None and not same(latest.parts["state"], states[latest.step]):
                tries.failures.append((tried, actual, latest.step))
            if not goes_on(directory):
                tries.failures.append((tried, actual, "goes on otherwise"))
        tries.note = f"{at_once} stopped at once"
        # When the second one comes is a matter of luck, and a few may all miss what the first has begun.
        assert at_once or not FULL


def stuck(tell, directory):
    count = 0

    def waiting(batch):
        nonlocal count
        count += 1
        if count == EVERY + 2:
            tell("waits")
            until = time.monotonic() + FOREVER
            while time.monotonic() < until:
                time.sleep(0.02)
                tell(time.monotonic())
        return 1

    try:
        train(directory, throughput={"steps": waiting})
    except KeyboardInterrupt:
        return INTERRUPTED
    return ENDED


@signals
def test_a_second_signal_stops_at_once(name, tmp_path):
    """Where the step after which the first would have been heard never comes."""
    number, _ = SIGNALS[name]
    child = Child(stuck, tmp_path)
    assert child.hear() == "waits"
    child.signal(number)
    sent = time.monotonic()
    # Signals of a kind are one until the first is heard, and a busy machine may be late with that.
    while (told := child.hear()) is not None and told < sent + 0.2:
        pass
    assert os.waitpid(child.pid, os.WNOHANG) == (0, 0), "the first one must not stop it"
    child.signal(number)
    actual = child.end()
    assert actual == (-number if number == signal.SIGTERM else INTERRUPTED)
    assert ft.Checkpoints(tmp_path, every=EVERY).steps() == [EVERY]
    assert goes_on(tmp_path)


@signals
def test_a_signal_says_where_the_run_was_saved(name, tmp_path, capsys):
    number, code = SIGNALS[name]

    def raising(batch):
        signal.raise_signal(number)
        return 1

    with pytest.raises(SystemExit) as caught:
        train(tmp_path, throughput={"steps": raising})
    assert caught.value.code == code
    path = ft.Checkpoints(tmp_path, every=EVERY).path(1)
    assert path.is_dir()
    assert capsys.readouterr().err == f"fit: ended by {name}, saved in {path}; the same call continues from there\n"


def test_a_signal_does_not_change_when_a_run_stops_by_itself(tmp_path):
    """`stop` is asked at the same steps by a run that goes on, though it has more history when it begins."""

    def stop(history):
        return "enough" if len(history) >= 2 * LOG + 1 else ""

    def raising(batch):
        seen.append(batch)
        if len(seen) == 2 * LOG + 1:
            signal.raise_signal(signal.SIGTERM)
        return 1

    seen, options = [], {"stop": stop, "evaluate": None, "evaluate_every": None}
    expected = train(**options)
    assert len(expected.history) == 3 * LOG
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, throughput={"steps": raising}, **options)
    assert caught.value.code == 143
    assert ft.Checkpoints(tmp_path, every=EVERY).steps()[-1] == 2 * LOG + 1
    actual = train(tmp_path, **options)
    assert actual.history.stopped == "enough"
    assert records(actual.history) == records(expected.history)
    assert same(actual.state, expected.state)


# While a step is compiled


def plainly(params, batch):
    return ft.Mean(((batch["x"] @ params["w"] - batch["y"]) ** 2).sum(), torch.tensor(float(len(batch["y"]))))


def compiling(lowering, backend):
    """A run whose batches are of two lengths, the second one the fifth: two graphs of the loss, or of the step."""
    draw = torch.Generator().manual_seed(0)
    data = ft.data.arrays({"x": torch.randn(23, 3, generator=draw), "y": torch.randn(23, generator=draw)})
    step = ft.compose(ft.train_step(plainly, ft.optim.adamw(0.1)), ft.compiled(lowering=lowering, backend=backend))
    return step, step.init({"w": torch.ones(3)}, seed=1), ft.data.loader(data, 5, seed=2, drop_last=False)


def sleeping(tell, directory, lowering, at):
    """Train; the compilation of graph number `at` takes long."""
    count = 0

    @torch._dynamo.register_backend(name="sleeping")
    def sleep(graph, inputs):
        nonlocal count
        count += 1
        if count == at:
            tell("compiles")
            time.sleep(FOREVER)
        return graph.forward

    there = None if directory is None else ft.Checkpoints(directory, every=100)
    step, state, data = compiling(lowering, "sleeping")
    try:
        result = ft.fit(step, state, data, epochs=2, checkpoints=there, progress=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    tell([result.history.stopped, len(result.history), int(result.state.step)])
    return ENDED


@functools.cache
def undisturbed(lowering):
    step, state, data = compiling(lowering, "eager")
    return ft.fit(step, state, data, epochs=2, progress=False)


@pytest.mark.parametrize(
    ("lowering", "at", "steps"),
    [("whole", 1, 0), ("split", 2, 0), ("split", 3, 4), *exhaustive_rows([("whole", 2, 4), ("split", 1, 0)])],
)
def test_a_step_that_is_being_compiled_is_not_waited_for(lowering, at, steps, tmp_path):
    child = Child(sleeping, tmp_path, lowering, at)
    assert child.hear() == "compiles"
    child.signal(signal.SIGTERM)
    assert child.end() == 143
    assert ft.Checkpoints(tmp_path, every=100).steps() == ([steps] if steps else [])
    step, state, data = compiling(lowering, "eager")
    actual = ft.fit(step, state, data, epochs=2, checkpoints=ft.Checkpoints(tmp_path, every=100), progress=False)
    expected = undisturbed(lowering)
    assert same(actual.state, expected.state)
    assert records(actual.history) == records(expected.history)


def test_without_checkpoints_what_was_trained_is_returned():
    child = Child(sleeping, None, "whole", 2)
    assert child.hear() == "compiles"
    child.signal(signal.SIGINT)
    assert child.hear() == ["interrupt", 4, 4]
    assert child.end() == ENDED


@signals
def test_a_second_signal_stops_a_compilation_that_does_not_hear_the_first(name, tmp_path):
    """One in a thread of the compiler, say, or below Python: here, what swallows every error."""
    number, _ = SIGNALS[name]
    child = Child(deaf, tmp_path)
    assert child.hear() == "compiles"
    child.signal(number)
    assert child.hear() == "swallowed"
    child.signal(number)
    assert child.end() == (-number if number == signal.SIGTERM else INTERRUPTED)


def deaf(tell, directory):
    @torch._dynamo.register_backend(name="deaf")
    def sleep(graph, inputs):
        try:
            tell("compiles")
            time.sleep(FOREVER)
        except BaseException:
            tell("swallowed")
        time.sleep(FOREVER)
        return graph.forward

    step, state, data = compiling("whole", "deaf")
    try:
        ft.fit(step, state, data, checkpoints=ft.Checkpoints(directory, every=100), progress=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    return ENDED
