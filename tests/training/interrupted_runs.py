"""A short run with dropout, its data, and how it is interrupted and compared."""

import pytest
import torch
from torch import nn

import ftrain as ft

STEPS, BATCHES, EVERY = 12, 5, 3


class KilledError(BaseException):
    """Stands for the end of the process. It is no Exception, because `fit` saves after one."""


def batches(count=BATCHES, length=4):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(length, 4, generator=draw) for _ in range(count)]


class Positioned:
    """Data that keeps its position, as torchdata's StatefulDataLoader does; `read` counts the batches it has given."""

    def __init__(self, batches):
        self.batches, self.at, self.resumed, self.read = batches, 0, False, 0

    def __iter__(self):
        self.at = self.at if self.resumed else 0
        self.resumed = False
        while self.at < len(self.batches):
            self.at += 1
            self.read += 1
            yield self.batches[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.resumed = state["at"], True


def squares(model, batch):
    return model(batch).square().mean()


def make(*wrappers, module=None, optimizer=None):
    """Return a step of the module, by default a net with running statistics and dropout, with the wrappers."""
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
    return ft.compose(ft.train_step(ft.from_module(module, squares), optimizer or ft.optim.adamw(0.05)), *wrappers)


def fit(step, data, state=None, **options):
    """Run `ft.fit` for `STEPS` steps, from a state of a fixed seed if none is passed, with a record of each step."""
    options = {"steps": STEPS, "progress": False, "log_every": 1, **options}
    return ft.fit(step, step.init(seed=3) if state is None else state, data, **options)


def fit_until_killed(step, data, at, **options):
    """Run `fit` until the record of step `at` is logged, where the process ends."""

    def kill(record):
        if record["step"] == at and "loss" in record:
            raise KilledError

    loggers = [*options.pop("loggers", []), kill]
    with pytest.raises(KilledError):
        fit(step, data, loggers=loggers, **options)


def without_times(history):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


def assert_results_equal(actual, expected):
    """Assert that two results of `fit` have the same state, to the bit, and the same history except for times."""
    for a, b in zip(ft.tree.leaves(actual.state), ft.tree.leaves(expected.state), strict=True):
        assert torch.equal(a, b)
    assert without_times(actual.history) == without_times(expected.history)
