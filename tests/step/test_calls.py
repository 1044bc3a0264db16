"""The number of functions of the package that an eager step calls, and the number of files that define them.

The calls take most of the time of a step of a small model. The files are those that a reader of a step must read.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ftrain as ft

PACKAGE = str(Path(ft.__file__).parent)
# The largest number of calls, and of files.
PURE, MODULE = (67, 17), (78, 19)


def calls(step, state, batch):
    """The files and names of the package's functions that a step calls, after two steps to warm up."""
    for _ in range(2):
        state, _ = step(state, batch)
    names = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            names.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        step(state, batch)
    finally:
        sys.setprofile(None)
    return names


def of_pure_function(leaves):
    def loss_fn(params, batch):
        return sum((batch * leaf).square().mean() for leaf in params.values())

    step = ft.compose(ft.train_step(loss_fn, ft.optim.adamw(1e-3)), ft.clip(1.0))
    return step, step.init({f"w{index}": torch.ones(3) for index in range(leaves)}), torch.ones(3)


def of_module(layers):
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    loss_fn = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss_fn, ft.optim.adamw(1e-3)), ft.clip(1.0), ft.donated())
    return step, step.init(seed=0), torch.ones(2, 3)


@pytest.mark.parametrize(("make", "most"), [(of_pure_function, PURE), (of_module, MODULE)])
def test_an_eager_step_calls_few_functions_however_many_leaves_there_are(make, most):
    few, many = calls(*make(2)), calls(*make(20))
    assert few == many
    most_calls, most_files = most
    assert len(few) <= most_calls, "\n".join(map(": ".join, few))
    assert len({file for file, _ in few}) <= most_files, "\n".join(map(": ".join, few))
