"""Parameters and buffers that share memory in the module; in a state they cannot."""

import warnings

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError, StructureError
from tests.faults.problem import failing

WHOLE = ft.compiled(backend="eager", lowering="whole")


class Views(nn.Module):
    """A module with buffers that are views of another buffer."""

    def __init__(self, write):
        super().__init__()
        self.inner, self.write = nn.Linear(3, 3), write
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("first", self.table[:2])
        self.register_buffer("rest", self.table[2:])

    def forward(self, x):
        self.write(self)
        return self.inner(x) * self.first.sum() * self.rest.sum()


def in_place(module):
    module.table.add_(1)


def in_place_of_the_view(module):
    module.rest.mul_(2)


def by_assignment(module):
    module.table = module.table + 1


def not_at_all(module):
    pass


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)

    def forward(self, x):
        return x * self.first.sum() * self.second.sum()


def step_of(module, *wrappers, **options):
    loss = ft.from_module(module, lambda model, x: model(x).square().mean())
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1), **options), *wrappers)


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2),), (WHOLE,)], ids=["plain", "accumulate", "whole"])
@pytest.mark.parametrize(("write", "names"), [(in_place, "table was"), (in_place_of_the_view, "rest was")])
def test_a_buffer_that_is_changed_in_place_and_shares_memory_is_an_error(write, names, wrappers):
    step = step_of(Views(write), *wrappers)
    with failing(LossError, "share memory", f"{names} changed in place", "compute the view"):
        step(step.init(), torch.ones(2, 3))


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_split_step_logs_buffers_that_share_memory(offloaded, caplog, tmp_path):
    in_files = [ft.offload("opt_state", directory=tmp_path)] if offloaded else []
    step = step_of(Views(not_at_all), *in_files, ft.compiled(lowering="split", backend="eager"))
    step(step.init(), torch.ones(2, 3))
    assert [record for record in caplog.records if "table and rest have memory in common" in record.getMessage()]


@pytest.mark.parametrize("write", [by_assignment, not_at_all])
def test_buffers_that_share_memory_and_are_not_changed_in_place_are_those_of_torch(write):
    module = Views(write)
    state, _ = step_of(module)(step_of(module).init(), torch.ones(2, 3))
    module(torch.ones(2, 3))
    for name, buffer in module.named_buffers():
        assert torch.equal(state.buffers[name], buffer)


WEIGHT = torch.ones(4, 4)
OVERLAPPING = {
    "all": (WEIGHT, WEIGHT),
    "a part": (WEIGHT[1:3], WEIGHT[2:]),
    "a corner": (WEIGHT[:3, :3], WEIGHT[2:, 2:]),
    "an element": (WEIGHT[0], WEIGHT[:, 0]),
}
APART = {
    "halves": (WEIGHT[:2], WEIGHT[2:]),
    "columns": (WEIGHT[:, :2], WEIGHT[:, 2:]),
    "nothing": (WEIGHT[:0], WEIGHT),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_trained_parameters_that_overlap_in_memory_are_an_error(name):
    step = step_of(Pair(*OVERLAPPING[name]))
    with failing(StructureError, "Step.init", "first and second of Pair", "share memory", "clone"):
        step.init()


@pytest.mark.parametrize("name", APART)
def test_trained_parameters_in_separate_parts_of_one_memory_are_allowed(name):
    step = step_of(Pair(*APART[name]))
    step(step.init(), torch.ones(2))


def test_frozen_parameters_may_share_memory():
    module = nn.ModuleList([Pair(WEIGHT, WEIGHT).requires_grad_(False), nn.Linear(1, 1)])
    loss = ft.from_module(module, lambda model, x: model[1](model[0](x)[:, None]).square().mean())
    step = ft.train_step(loss, ft.optim.sgd(0.1))
    step(step.init(), torch.ones(2))


def test_a_buffer_that_is_a_view_of_a_parameter_is_an_error():
    module = nn.Linear(3, 3)
    module.register_buffer("row", module.weight.detach()[0])
    with failing(StructureError, "Step.init", "weight and row of Linear", "share memory"):
        step_of(module).init()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 3))])
def test_a_scripted_module_is_an_error(make, nested):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that torch.jit is deprecated.
        module = make(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with failing(LossError, "from_module", "inner is" if nested else "the module is", "torch.jit", "original nn"):
        ft.from_module(nn.ModuleDict({"inner": module}) if nested else module, lambda model, x: model(x).sum())
