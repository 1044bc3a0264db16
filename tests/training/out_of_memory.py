"""Steps that run out of memory on purpose, at an operation or with too many examples, and the problem that they train.

The problem is a regression in float64, so that a step in pieces equals the whole step closely.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import ftrain as ft
from ftrain.step.step import Step
from ftrain.training.oom_retry import split_step
from ftrain.transforms.compile import capture as capturing


def params():
    draw = torch.Generator().manual_seed(0)
    shapes = {"w1": (3, 4), "w2": (4,)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def batches(count, length=6, dtype=torch.float64):
    """Return the same random batches in each call; `weight` has those of the examples."""
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(length, 3, generator=draw, dtype=dtype),
            "y": torch.randn(length, generator=draw, dtype=dtype),
            "weight": torch.randint(1, 4, (length,), generator=draw).to(dtype),
            "scale": torch.tensor(1.0),
        }
        for _ in range(count)
    ]


def loss(params, batch, rng):
    """Return the weighted mean of the squared errors, and the largest as a metric; with dropout if there is a key."""
    hidden = torch.tanh(batch["x"] @ params["w1"])
    if rng is not None:
        hidden = ft.random.dropout(rng, hidden, 0.2)
    errors = (hidden @ params["w2"] - batch["y"]).square() * batch["weight"]
    return ft.Mean(errors.sum(), batch["weight"].sum()), {"worst": errors.detach().max()}


def loss_without_dropout(params, batch):
    return loss(params, batch, None)


def unweighted_loss(params, batch):
    return (batch["x"] @ params["w1"]).square().mean(), {"mean": batch["y"].mean()}


def loss_that_fits(examples, loss=loss_without_dropout, lengths=None):
    """Return a loss that runs out of memory with more than `examples` examples.

    It appends the number of examples of each call to `lengths`.
    """

    def fitting_loss(params, batch):
        length = len(batch["x"])
        if lengths is not None:
            lengths.append(length)
        if length > examples:
            raise torch.OutOfMemoryError("out of memory: too many examples")
        return loss(params, batch)

    return fitting_loss


def make_step(*wrappers, loss=loss, optimizer=None):
    return ft.compose(ft.train_step(loss, optimizer or ft.optim.adamw(0.1)), *wrappers)


def fit(step, data, state=None, **options):
    """Call `ft.fit` with `on_oom="split"`, from the first state of the step unless another is passed."""
    state = state if state is not None else step.init(params())
    return ft.fit(step, state, data, **{"progress": False, "on_oom": "split", "log_every": 1, **options})


def train_by_hand(step, data, split_from=None, split=None):
    """Return the state after a step with each batch.

    From the index `split_from` on, these are steps of `split`, which is the same step in two pieces by default.
    """
    state, split = step.init(params()), split or split_step(step, 2)
    for index, batch in enumerate(data):
        is_split = split_from is not None and index >= split_from
        state, _ = (split if is_split else step)(state, batch)
    return state


def splits(history):
    """Return the steps at which the run was split, with the number of pieces: {step: pieces}."""
    return {record["step"]: record["split"] for record in history if "split" in record}


def assert_close(actual, expected, tolerance=1e-12):
    for a, b in zip(ft.tree.leaves(actual), ft.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class OutOfMemoryAt(TorchDispatchMode):
    """Raises an out-of-memory error `times` times, before or after the operation with this index."""

    def __init__(self, index, *, after=False, times=1):
        super().__init__()
        self._index, self._after = index, after
        self.remaining = times
        """How often it will still raise the error."""
        self.operation_count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fails = self.operation_count == self._index and self.remaining > 0
        self.operation_count += 1
        if fails and not self._after:
            self._run_out()
        result = func(*args, **(kwargs or {}))
        if fails:
            self._run_out()
        return result

    def _run_out(self):
        self.remaining -= 1
        raise torch.OutOfMemoryError("out of memory, on purpose")


@contextmanager
def out_of_memory_at(step_index, index, **options):
    """Let the step with the index `step_index` run out of memory at its operation `index`; yields the mode."""
    mode, call_step = OutOfMemoryAt(index, **options), Step.__call__

    def call_step_with_mode(self, state, batch):
        if int(state.step) != step_index:
            return call_step(self, state, batch)
        mode.operation_count = 0
        with mode:
            return call_step(self, state, batch)

    def without_mode(function):
        def wrapped(*args, **kwargs):
            with _disable_current_modes():
                return function(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", call_step_with_mode)
        # Operations of a capture are only recorded, and take no memory.
        patch.setattr(capturing, "capture", without_mode(capturing.capture))
        patch.setattr(capturing, "compile_graph", without_mode(capturing.compile_graph))
        yield mode


def count_operations(step, step_index, **options):
    """Return the number of operations of the step with this index."""
    with out_of_memory_at(step_index, -1) as mode:
        fit(step, batches(step_index + 1), **options)
    return mode.operation_count
