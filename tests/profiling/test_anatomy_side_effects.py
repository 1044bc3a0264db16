"""A run on fake tensors leaves no fake tensor in the model, and no mode and no profiler of torch active."""

import contextlib
import functools
import itertools
import signal
import threading

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import optim, tree
from ftrain._torch import FakeTensorMode, active_modes
from ftrain._torch.fake import uninterrupted
from ftrain.errors import OptionError
from ftrain.profiling.hints.calls import record_calls
from ftrain.profiling.module_path import RunningModule
from tests.profiling import problem
from tests.profiling.models import build


class WithCache(nn.Module):
    """Computes a table in its first run, and keeps it in an attribute, a list or a dict."""

    def __init__(self, place):
        super().__init__()
        self.inner, self.place = nn.Linear(4, 4), place
        self.table, self.tables_list, self.tables_dict = None, [], {}

    def forward(self, x):
        cached = [*self.tables_list, *self.tables_dict]
        table = cached[0] if cached else self.table
        if table is None:
            table = torch.arange(4.0).cos()
            if self.place == "list":
                self.tables_list.append(table)
            elif self.place == "dict":
                self.tables_dict[table] = table
            else:
                self.table = table
        return self.inner(x) * table


# What runs a model on fake tensors.
RUNS = {
    "predicted": lambda step, state, batch: ft.anatomy(step, state, batch, measure=False),
    "without a state": lambda step, state, batch: ft.anatomy(step, None, batch),
    "predicted with remat": lambda step, state, batch: ft.anatomy(ft.remat()(step), state, batch, measure=False),
    "seen by hints": record_calls,
    "budget": lambda step, state, batch: ft.remat(budget=0.5)(step)(state, batch),
    "captured": lambda step, state, batch: ft.compiled(backend="eager")(ft.remat()(step))(state, batch),
}

PLACES = ["attribute", "list", "dict"]
"""Where a module keeps the tensor that it computes in its first run."""


@pytest.mark.parametrize(
    ("run", "place"),
    [
        # `make test` runs each place with one run, and each run with one place.
        pytest.param(run, place, marks=[] if run == "predicted" or place == "list" else pytest.mark.exhaustive)
        for run in RUNS
        for place in PLACES
    ],
)
def test_no_fake_tensor_stays_in_the_model(run, place):
    """The next real run would compute with a fake tensor that a module has kept."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(WithCache(place)) for _ in range(2)))
    step = ft.train_step(ft.from_module(model, lambda model, batch: model(batch).square().mean()), optim.sgd(0.1))
    state, batch = step.init(), torch.ones(2, 4)
    RUNS[run](step, state, batch)
    new_state, metrics = step(state, batch)
    assert {type(leaf) for leaf in tree.leaves((new_state, metrics))} <= {torch.Tensor, float}
    caches = [module for module in model.modules() if isinstance(module, WithCache)]
    assert {type(module.table) for module in caches} <= {type(None), torch.Tensor}


def test_a_step_is_predicted_under_anomaly_detection():
    step, batch = problem.make(), problem.batch(4)
    with torch.autograd.set_detect_anomaly(True):
        assert ft.anatomy(step, step.init(), batch, measure=False).peak > 0
        assert torch.is_anomaly_enabled()


@pytest.mark.parametrize("starts_before", [True, False])
def test_a_module_that_another_thread_runs_is_not_tracked(starts_before):
    """Torch calls the global module hooks in all threads."""
    inside, finish, errors = threading.Event(), threading.Event(), []

    class Waiting(nn.Module):
        def forward(self):
            inside.set()
            finish.wait(60)

    def run():
        try:
            model[0]()
        except Exception as error:
            errors.append(error)

    model = nn.Sequential(Waiting())
    # A module with a hook of its own looks for global hooks after its forward too.
    model[0].register_forward_hook(lambda *arguments: None)
    thread, running = threading.Thread(target=run), RunningModule(model)
    if starts_before:
        thread.start()
        inside.wait(60)
    with running.tracked():
        if not starts_before:
            thread.start()
            inside.wait(60)
        assert running.name == ""
        finish.set()
        thread.join()
    assert not errors


def test_a_profiler_that_already_runs_is_not_stopped():
    step, batch = problem.make(), problem.batch(4)
    state = step.init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        with pytest.raises(OptionError, match=r"^anatomy, ladder, tune: .* torch's profiler, and it runs already"):
            ft.anatomy(step, state, batch)
        ft.anatomy(step, state, batch, measure=False)
    assert any(event.key == "aten::mm" for event in profiler.key_averages())


@contextlib.contextmanager
def default_handler_of_interrupts():
    """Context in which SIGINT raises KeyboardInterrupt; asserts that nothing in it leaves another handler."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("moment", ["__enter__", "__exit__"])
@pytest.mark.parametrize(
    ("run", "number"),
    [
        (functools.partial(ft.anatomy, measure=False), 0),
        (functools.partial(ft.anatomy, measure=False), 10),
        (record_calls, 10),
        (lambda step, state, batch: ft.compose(step, ft.remat(budget=0.5))(state, batch), 1),
        (lambda step, state, batch: ft.compose(step, ft.compiled(backend="eager"))(state, batch), 1),
    ],
    ids=["anatomy begins", "anatomy", "hints", "budget", "compiled"],
)
def test_an_interrupt_within_a_mode_of_torch_leaves_no_mode_active(run, number, moment, monkeypatch):
    """Torch enters its fake tensor mode again for many operations, and an error there may abort the process.

    The interrupt comes in the call of `moment` with this number.
    """
    step, batch = problem.make(), problem.batch(4)
    state, method = step.init(), getattr(FakeTensorMode, moment)
    calls, events = itertools.count(), []

    def interrupt_once():
        if next(calls) == number:
            signal.raise_signal(signal.SIGINT)
            events.append("continued")

    def interrupted(mode, *error):
        # After the mode is entered, or before it is left.
        if moment == "__exit__":
            interrupt_once()
            return method(mode, *error)
        entered = method(mode)
        interrupt_once()
        return entered

    with monkeypatch.context() as patched, default_handler_of_interrupts():
        patched.setattr(FakeTensorMode, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(step, state, batch)
    # The mode was entered or left before the interrupt became an error.
    assert events == ["continued"]
    assert not active_modes()
    assert not torch._C._only_lift_cpu_tensors()
    step(state, batch)


def test_the_third_interrupt_acts_at_once():
    interrupts = []

    def interrupt_repeatedly():
        with uninterrupted():
            for number in range(4):
                interrupts.append(number)
                signal.raise_signal(signal.SIGINT)

    with default_handler_of_interrupts(), pytest.raises(KeyboardInterrupt):
        interrupt_repeatedly()
    assert interrupts == [0, 1, 2]


@pytest.mark.parametrize("moment", ["__enter__", "__exit__"])
def test_an_interrupt_while_torch_starts_or_stops_its_profiler_does_not_leave_it_on(moment, monkeypatch):
    step, batch = build("gpt", "plain")
    state, start_profiler = step.init(), torch.profiler.profile.__enter__

    def interrupted(profiler, *error):
        if moment == "__enter__":
            start_profiler(profiler)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.profiler.profile, moment, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ft.anatomy(step, state, batch)
    assert not torch.autograd._profiler_enabled()
    assert ft.anatomy(step, state, batch).measured_ratio == pytest.approx(1, abs=0.05)
