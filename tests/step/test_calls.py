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
# The largest allowed number of calls, and of files.
LIMITS_OF_PURE_FUNCTION = (67, 17)
LIMITS_OF_MODULE = (78, 19)


def calls(step, state, batch):
    """Return the (file, name) of each call of a function of the package in the third step."""
    for _ in range(2):
        state, _ = step(state, batch)
    recorded = []

    def record(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            recorded.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name))

    sys.setprofile(record)
    try:
        step(state, batch)
    finally:
        sys.setprofile(None)
    return recorded


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


@pytest.mark.parametrize(
    ("make", "limits"), [(of_pure_function, LIMITS_OF_PURE_FUNCTION), (of_module, LIMITS_OF_MODULE)]
)
def test_an_eager_step_calls_few_functions_however_many_leaves_there_are(make, limits):
    called = calls(*make(2))
    assert called == calls(*make(20))
    most_calls, most_files = limits
    listing = "\n".join(f"{file}: {name}" for file, name in called)
    assert len(called) <= most_calls, listing
    assert len({file for file, _ in called}) <= most_files, listing
