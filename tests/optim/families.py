"""The optimizers for which the laws of an update hold, their scheduled values, and the elements of a tree."""

import pytest
import torch

import ftrain as ft
from ftrain import tree
from ftrain.optim import adamw, partition, sgd
from tests.laws.optimizers import MATRICES_ONLY, OPTIMIZERS

F64 = torch.float64

FAMILIES = {
    "sgd": lambda **more: sgd(0.1, **more),
    "momentum": lambda **more: sgd(0.1, momentum=0.9, **more),
    "nesterov": lambda **more: sgd(0.1, momentum=0.9, nesterov=True, **more),
    "adamw": lambda **more: adamw(0.1, **more),
    "partition": lambda **more: partition({"all": adamw(0.1, **more)}, lambda name, leaf: "all"),
}

FAMILIES |= {name: make for name, make in OPTIMIZERS.items() if name not in {*FAMILIES, *MATRICES_ONLY}}
"""Name -> function of the options of the factory, which returns the optimizer."""

families = pytest.mark.parametrize("family", FAMILIES)


def rates(optimizer, *, tensors=False):
    """Return the scheduled values of step 0, and a key if the optimizer draws.

    With `tensors` the values are tensors, as in a graph; then no fused kernel updates the parameters.
    """
    hyper = {name: schedule(0) for name, schedule in optimizer.schedules.items()}
    if tensors:
        hyper = {name: torch.tensor(value, dtype=F64) for name, value in hyper.items()}
    if optimizer.needs_rng:
        hyper["rng"] = ft.random.key(0)
    return hyper


def elements(values):
    """Return the dtype and the elements of each leaf."""
    return [(leaf.dtype, leaf.tolist()) for leaf in tree.leaves(values)]
