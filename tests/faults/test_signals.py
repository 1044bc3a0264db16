"""Signals at any moment of a run: it is saved after a step, ends with the documented exit code, and can be resumed."""

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
from tests.faults.specimens import have_same_bits

pytestmark = quiet_forks

STEPS, EVERY, EVALUATE, LOG = 40, 6, 9, 4
ENDED, OUTSIDE, INTERRUPTED = 0, 90, 91
SIGNALS = {"SIGTERM": (signal.SIGTERM, 143), "SIGINT": (signal.SIGINT, 130)}
signals = pytest.mark.parametrize("name", SIGNALS)


def noisy(params, batch, rng):
    x = ft.random.dropout(rng, batch["x"], 0.2)
    return ((x @ params["w"] - batch["y"]) ** 2).mean()


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
    """Return the records of a history without times."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


@functools.cache
def undisturbed_run():
    """Return the final state, the history and the state after each step of a run without signals."""
    step, state, data = problem()
    states = {new.step: ft.tree.clone(new.state) for new in ft.iterate(step, state, data, steps=STEPS)}
    result = train()
    assert have_same_bits(result.state, states[STEPS])
    return result.state, records(result.history), states


def train_and_report(send, directory, default):
    """Train, and send the number of each step; a signal outside of `fit` exits with OUTSIDE, or ends the process."""
    if not default:
        for number, _ in SIGNALS.values():
            signal.signal(number, lambda *_: os._exit(OUTSIDE))
    count = 0

    def report_step(batch):
        nonlocal count
        count += 1
        send(count)
        return 1

    try:
        train(directory, throughput={"steps": report_step})
    except KeyboardInterrupt:
        return INTERRUPTED
    return ENDED


def run_with_signals(directory, number, after, delays, default=False):
    """Send a signal a little after a number of steps, and others later; return the exit code and the steps made."""
    child = Child(train_and_report, directory, default)
    steps = 0
    while steps < after and (step_number := child.receive()) is not None:
        steps = step_number
    for delay in delays:
        time.sleep(delay)
        child.signal(number)
    while (step_number := child.receive()) is not None:
        steps = step_number
    return child.wait(), steps


def step_length(directory):
    """Return the seconds that a step takes."""
    child = Child(train_and_report, directory, False)
    child.receive()
    start = time.monotonic()
    assert child.wait() == ENDED
    return (time.monotonic() - start) / STEPS


def ends_like_undisturbed_run(directory):
    """Resume a run, and return whether it ends like one without signals."""
    result = train(directory)
    state, history, _ = undisturbed_run()
    return have_same_bits(result.state, state) and records(result.history) == history


@signals
def test_a_signal_at_any_moment_saves_after_the_step(name, tmp_path):
    number, code = SIGNALS[name]
    count, draw = times(150, 3), random.Random(name)
    states, seconds_per_step = undisturbed_run()[2], step_length(tmp_path / "first")
    saved = 0
    with tally(f"signals: {name}") as tries:
        while tries.runs < count:
            directory, before = tmp_path / str(tries.runs), 0
            # Some runs are interrupted more than once.
            for _ in range(draw.randint(1, 2)):
                exit_code, steps = run_with_signals(
                    directory, number, draw.randint(1, STEPS - before), [draw.uniform(0, 2 * seconds_per_step)]
                )
                tries.runs += 1
                latest = ft.Checkpoints(directory, every=EVERY).latest({"state": states[1]})
                saved_step = None if latest is None else latest.step
                saved += exit_code == code
                is_right = saved_step is not None and have_same_bits(latest.parts["state"], states[saved_step])
                if exit_code == code:
                    is_right &= saved_step == before + steps
                else:
                    # A signal that comes after `fit` has ended changes nothing.
                    is_right &= exit_code in (ENDED, OUTSIDE) and saved_step == STEPS
                if not is_right:
                    tries.failures.append((tries.runs, exit_code, before, steps, saved_step))
                before = saved_step or 0
                if before == STEPS:
                    break
            if not ends_like_undisturbed_run(directory):
                tries.failures.append((tries.runs, "goes on otherwise"))
        tries.note = f"{saved} within fit, exit code {code}"
        # At least one signal came within `fit`.
        assert saved


@signals
def test_a_second_signal_at_any_moment_does_no_harm(name, tmp_path):
    number, code = SIGNALS[name]
    stopped = -number if number == signal.SIGTERM else INTERRUPTED
    draw, num_stopped = random.Random(name), 0
    states, seconds_per_step = undisturbed_run()[2], step_length(tmp_path / "first")
    with tally(f"signals: {name} twice") as tries:
        for tried in range(1, times(150, 2) + 1):
            tries.runs = tried
            directory = tmp_path / str(tried)
            moments = [draw.uniform(0, seconds_per_step), draw.choice([0.0, draw.uniform(0, 0.01)])]
            exit_code, _ = run_with_signals(directory, number, draw.randint(1, STEPS), moments, default=True)
            num_stopped += exit_code == stopped
            # The first may come after `fit`, or the second after the run has stopped for the first.
            if exit_code not in (stopped, code, ENDED, -number):
                tries.failures.append((tried, exit_code, moments))
            latest = ft.Checkpoints(directory, every=EVERY).latest({"state": states[1]})
            if latest is not None and not have_same_bits(latest.parts["state"], states[latest.step]):
                tries.failures.append((tried, exit_code, latest.step))
            if not ends_like_undisturbed_run(directory):
                tries.failures.append((tried, exit_code, "goes on otherwise"))
        tries.note = f"{num_stopped} stopped at once"
        # With few attempts, it may be that no second signal comes before the run has stopped for the first.
        assert num_stopped or not FULL


def training_with_an_endless_step(send, directory):
    """Train; a step soon after the first checkpoint does not end, and sends the time again and again."""
    count = 0

    def waiting(batch):
        nonlocal count
        count += 1
        if count == EVERY + 2:
            send("waits")
            until = time.monotonic() + FOREVER
            while time.monotonic() < until:
                time.sleep(0.02)
                send(time.monotonic())
        return 1

    try:
        train(directory, throughput={"steps": waiting})
    except KeyboardInterrupt:
        return INTERRUPTED
    return ENDED


@signals
def test_a_second_signal_stops_at_once(name, tmp_path):
    """The step in which the first signal comes never ends."""
    number, _ = SIGNALS[name]
    child = Child(training_with_an_endless_step, tmp_path)
    assert child.receive() == "waits"
    child.signal(number)
    sent_at = time.monotonic()
    # Two signals of a kind become one if the first is not handled yet, so wait until the child has run for a while.
    while (last_time := child.receive()) is not None and last_time < sent_at + 0.2:
        pass
    assert os.waitpid(child.pid, os.WNOHANG) == (0, 0), "the first one must not stop it"
    child.signal(number)
    exit_code = child.wait()
    assert exit_code == (-number if number == signal.SIGTERM else INTERRUPTED)
    assert ft.Checkpoints(tmp_path, every=EVERY).steps() == [EVERY]
    assert ends_like_undisturbed_run(tmp_path)


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
    """A resumed run calls `stop` at the same steps, although it starts with a history."""

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
    assert have_same_bits(actual.state, expected.state)


# While a step is compiled


def weighted_squares(params, batch):
    return ft.Mean(((batch["x"] @ params["w"] - batch["y"]) ** 2).sum(), torch.tensor(float(len(batch["y"]))))


def compiling(lowering, backend):
    """Return a step, a state and data with a shorter fifth batch, for which another graph is compiled."""
    draw = torch.Generator().manual_seed(0)
    data = ft.data.arrays({"x": torch.randn(23, 3, generator=draw), "y": torch.randn(23, generator=draw)})
    step = ft.compose(
        ft.train_step(weighted_squares, ft.optim.adamw(0.1)), ft.compiled(lowering=lowering, backend=backend)
    )
    return step, step.init({"w": torch.ones(3)}, seed=1), ft.data.loader(data, 5, seed=2, drop_last=False)


def sleeping(send, directory, lowering, at):
    """Train; the compilation of graph number `at` does not end."""
    count = 0

    @torch._dynamo.register_backend(name="sleeping")
    def sleep(graph, inputs):
        nonlocal count
        count += 1
        if count == at:
            send("compiles")
            time.sleep(FOREVER)
        return graph.forward

    checkpoints = None if directory is None else ft.Checkpoints(directory, every=100)
    step, state, data = compiling(lowering, "sleeping")
    try:
        result = ft.fit(step, state, data, epochs=2, checkpoints=checkpoints, progress=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    send([result.history.stopped, len(result.history), int(result.state.step)])
    return ENDED


@functools.cache
def undisturbed_compiled_run(lowering):
    step, state, data = compiling(lowering, "eager")
    return ft.fit(step, state, data, epochs=2, progress=False)


@pytest.mark.parametrize(
    ("lowering", "at", "steps"),
    [("whole", 1, 0), ("split", 2, 0), ("split", 3, 4), *exhaustive_rows([("whole", 2, 4), ("split", 1, 0)])],
)
def test_a_step_that_is_being_compiled_is_not_waited_for(lowering, at, steps, tmp_path):
    child = Child(sleeping, tmp_path, lowering, at)
    assert child.receive() == "compiles"
    child.signal(signal.SIGTERM)
    assert child.wait() == 143
    assert ft.Checkpoints(tmp_path, every=100).steps() == ([steps] if steps else [])
    step, state, data = compiling(lowering, "eager")
    actual = ft.fit(step, state, data, epochs=2, checkpoints=ft.Checkpoints(tmp_path, every=100), progress=False)
    expected = undisturbed_compiled_run(lowering)
    assert have_same_bits(actual.state, expected.state)
    assert records(actual.history) == records(expected.history)


def test_without_checkpoints_an_interrupted_fit_returns_the_trained_state():
    child = Child(sleeping, None, "whole", 2)
    assert child.receive() == "compiles"
    child.signal(signal.SIGINT)
    assert child.receive() == ["interrupt", 4, 4]
    assert child.wait() == ENDED


@signals
def test_a_second_signal_stops_a_compilation_that_the_first_cannot_interrupt(name, tmp_path):
    """For example one in C++, which Python cannot interrupt; here, code that catches every error."""
    number, _ = SIGNALS[name]
    child = Child(training_without_interrupts, tmp_path)
    assert child.receive() == "compiles"
    child.signal(number)
    assert child.receive() == "swallowed"
    child.signal(number)
    assert child.wait() == (-number if number == signal.SIGTERM else INTERRUPTED)


def training_without_interrupts(send, directory):
    """Train; the compilation catches every error, and does not end."""

    @torch._dynamo.register_backend(name="deaf")
    def sleep(graph, inputs):
        try:
            send("compiles")
            time.sleep(FOREVER)
        except BaseException:
            send("swallowed")
        time.sleep(FOREVER)
        return graph.forward

    step, state, data = compiling("whole", "deaf")
    try:
        ft.fit(step, state, data, checkpoints=ft.Checkpoints(directory, every=100), progress=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    return ENDED
