"""What tests of fifty steps in float64 share: the tolerance, and gradients that depend on the step alone."""

import functools

import torch

STEPS = 50
F64 = torch.float64
# The absolute part is for parameters that cross zero: a few units in the last place of numbers about 1.
TIGHT = {"rtol": 1e-12, "atol": 1e-14}


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def make_grads(params, step):
    """Return the gradients of a step, by the name of the parameter."""
    return {name: make_grad(leaf.shape, step, index) for index, (name, leaf) in enumerate(params.items())}


@functools.cache
def make_grad(shape, step, index):
    """Return a gradient of a scale that differs from step to step, and is 0 in step 3."""
    size = 0.0 if step == 3 else 2.0 ** (step % 5 - 2)
    return size * randn(shape, 100 * step + index)
