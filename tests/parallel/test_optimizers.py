"""Every optimizer on many ranks: with divided leaves the same bits as with whole ones."""

import importlib

import pytest
import torch

import ftrain as ft
from ftrain.optim import offloaded
from ftrain.parallel import ownership
from tests.laws.optimizers import COMBINED, MATRICES_ONLY, OPTIMIZERS
from tests.parallel.ranks import run

sharded = importlib.import_module("ftrain.parallel.sharded")
update_in_backward = importlib.import_module("ftrain.transforms.update_in_backward")

EVERY = {**OPTIMIZERS, **COMBINED}


SOME = ["adamw", "stochastic", "adamw_8bit", "lamb", "adafactor", "muon", "noisy", "nested"]
"""Those whose leaves differ in what they need whole."""

REST = [pytest.param(name, marks=pytest.mark.exhaustive) for name in EVERY if name not in SOME]


def params_of(name, dtype=torch.float32):
    """Return parameters that two and three ranks cannot divide evenly; sizes are none of vectors of a CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 3), "b": (2, 5), "c": (1, 4), "d": (7, 3), "e": (19, 33)}
    if name not in MATRICES_ONLY:
        shapes |= {"f": (5,), "g": (), "h": (3, 2, 5), "i": (1,)}
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes.items()}


def linear(params, batch):
    """A loss whose gradient is the mean of the batch: exact, in any order, for small whole numbers."""
    return sum((params[key] * batch[key].mean(0)).sum() for key in params)


def batch_of(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randint(-8, 9, (8, *leaf.shape), generator=generator).to(leaf.dtype) for key, leaf in params.items()
    }


def trained(size, level, name, *wrappers, after=None, steps=3, dtype=torch.float32):
    """Return the whole states of all ranks after some steps, as pairs of parameters and optimizer state.

    Args:
        size: the number of ranks.
        level: of `sharded`.
        name: of the optimizer.
        wrappers: factories of further wrappers.
        after: one of a wrapper that goes around `sharded`.
        steps: how many.
        dtype: of the parameters.
    """

    def rank(_):
        params = params_of(name, dtype)
        step = ft.compose(
            ft.train_step(linear, EVERY[name]()),
            *(make() for make in wrappers),
            ft.sharded(ft.parallel.mesh(), level),
            *([after()] if after else []),
        )
        state = step.init(params, seed=4)
        for seed in range(steps):
            state, _ = step(state, batch_of(params, seed))
        return ft.parallel.whole((state.params, state.opt_state))

    return run(size, rank)


def assert_equal(results, reference, tolerance=0.0):
    for result in results:
        torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance)


def tolerance_of(name):
    """Return a dtype, and how far from one rank: no bit where ranks update whole leaves.

    Of parts of leaves, kernels may round the last elements otherwise.
    """
    return (torch.float64, 1e-14) if EVERY[name]().by_element else (torch.float32, 0.0)


@pytest.fixture
def small(monkeypatch):
    """Few bytes in each group, for there to be several groups and rounds of small leaves."""
    for module, constant in ((ownership, "ROUND_BYTES"), (offloaded, "GROUP_BYTES"), (sharded, "STREAM_BYTES")):
        monkeypatch.setattr(module, constant, 100)
    monkeypatch.setattr(update_in_backward, "TOGETHER", 150)


@pytest.mark.parametrize("name", EVERY)
def test_each_optimizer_on_ranks_equals_one(name):
    dtype, tolerance = tolerance_of(name)
    (reference,) = trained(1, 0, name, dtype=dtype)
    for size, level in ((2, 1), (3, 3)):
        assert_equal(trained(size, level, name, dtype=dtype), reference, tolerance)


@pytest.mark.parametrize("name", [*SOME, *REST])
def test_update_in_backward_on_ranks_equals_one_rank(name, small):
    dtype, tolerance = tolerance_of(name)
    (reference,) = trained(1, 0, name, dtype=dtype)
    for size, level in ((2, 0), (3, 1), (2, 3)):
        assert_equal(trained(size, level, name, ft.update_in_backward, dtype=dtype), reference, tolerance)


@pytest.mark.parametrize("name", [*SOME, *REST])
def test_an_offloaded_state_on_ranks_equals_one_rank(name, small, tmp_path):
    def offload():
        return ft.offload("opt_state", directory=tmp_path, min_bytes=8)

    dtype, tolerance = tolerance_of(name)
    (reference,) = trained(1, 0, name, dtype=dtype)
    assert_equal(trained(3, 3, name, offload, dtype=dtype), reference, tolerance)
    assert_equal(trained(2, 1, name, after=offload, dtype=dtype), reference, tolerance)
