"""A small model of blocks whose activations are larger than its state, and stand-ins for races and predictions."""

import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.backends.transfers import is_in_file


class Block(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def model(width=16, drop=0.0, blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, drop) for _ in range(blocks)))


def squares(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def make(*wrappers, optimizer=None, width=16, drop=0.0, blocks=2, criterion=squares):
    loss = ft.from_module(model(width, drop, blocks), criterion)
    return ft.compose(ft.train_step(loss, optimizer or ft.optim.adamw(1e-3)), *wrappers)


def batch(length=64, width=16):
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randn(length, width, generator=draw) for name in ("x", "y")}


def assert_unchanged(state, inputs, before):
    """Assert that both have the same bits as in `before`, an earlier copy of `(state, inputs)`."""
    for a, b in zip(tree.leaves((state, inputs)), tree.leaves(before), strict=True):
        assert torch.equal(a, b)


PREDICTIONS = {}
"""The predictions of `with_cache`, by the text of the step, the shapes of state and batch, and what is in files."""


def with_cache(anatomy):
    """Return `anatomy` with a cache for predictions, which depend only on the step, the shapes and the files."""

    def cached(step, state, batch, *, measure=True):
        if measure:
            return anatomy(step, state, batch)
        shapes = None if state is None else tree.signature((state.params, state.opt_state))
        in_files = [is_in_file(leaf) for leaf in tree.leaves(state)]
        key = repr(step), repr((shapes, tree.signature(batch), in_files))
        if key not in PREDICTIONS:
            PREDICTIONS[key] = anatomy(step, state, batch, measure=False)
        return PREDICTIONS[key]

    return cached


def scripted(times):
    """Return a stand-in for `race` with fixed results.

    `times` maps a name to seconds, to the seconds of each round, or to an error; other names take one second. It may
    also be a function of the name and the racer.
    """

    def race(racers, rounds, *, is_result):
        results = {}
        for key, racer in racers.items():
            name = getattr(key, "name", key)  # The keys of the ladder are techniques.
            result = times(name, racer) if callable(times) else times.get(name, 1.0)
            if isinstance(result, Exception) and not is_result(key, result):
                raise result
            results[key] = result if isinstance(result, list | Exception) else [float(result)] * rounds
        return results

    return race
