"""Let a rank that runs out of memory take part in the remaining collectives, so that no rank waits for it.

All ranks start the same collectives in the same order, so this rank sends tensors of the shapes that the others wait
for. Their values are not valid: the ranks must agree to discard the result (`ftrain.training.oom_retry`).

In an eager step the rank computes the gradient again, on one example of each microbatch, without the collectives that
it had started before. The graph of a compiled step says which collectives remain: the rank starts them without
computing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, fx

from ftrain import _torch, tree
from ftrain._context import setting
from ftrain._torch.collectives import COUNTERS, wait
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import DeviceError
from ftrain.parallel.agreement import Agreement
from ftrain.parallel.batch_rows import Rows
from ftrain.step.microbatch import take_examples, with_example_lists
from ftrain.step.traffic import collectives_of, is_collective

Run: TypeAlias = Callable[..., Sequence[Tensor]]


class GradientStandIn:
    """Counts the collectives of a gradient, so that this rank can take part in the remaining ones. A context."""

    def __init__(self) -> None:
        self._started = self._to_leave_out = 0
        self._is_counting = False
        self.is_active = False
        """Whether this rank computes a gradient again, for which it has had no memory."""
        self._world: Any = None

    def __enter__(self) -> None:
        self._world, self._started = dist.group.WORLD, 0
        COUNTERS[self._world] = self

    def __exit__(self, *error: object) -> None:
        del COUNTERS[self._world]
        self._is_counting = False

    def begin(self) -> None:
        """Count the collectives from now on: those of a gradient."""
        self._started, self._is_counting = 0, True

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the gradient that has failed is computed again."""
        self._to_leave_out, self.is_active, self._is_counting = self._started, True, False
        try:
            yield
        finally:
            self._to_leave_out, self.is_active = 0, False

    def leaves_out(self) -> bool:
        """Return whether the next collective was started before the gradient failed, and is left out now."""
        if not self._is_counting or not self._to_leave_out:
            return False
        self._to_leave_out -= 1
        return True

    def has_started(self) -> None:
        """Count a collective that was started."""
        self._started += self._is_counting


def without_examples(rows: Rows) -> Rows:
    """Return rows with no examples: they keep one example of each microbatch, with a weight of 0."""
    with with_example_lists(rows.lists):
        return replace(rows, batch=take_examples(rows.batch, slice(rows.microbatches)), length=0)


class OutOfMemoryOnRankError(DeviceError):
    """Memory ran out on at least one rank, and all ranks know it."""


def run_graph(agreement: Agreement, run: Run, captured: fx.GraphModule, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run a graph, compiled from `captured`, on all ranks, and return its outputs. The hosts wait for each other.

    If it fails, some of its inputs may have been overwritten.

    Raises:
        OutOfMemoryOnRankError: on every rank, when one had no memory for it.
        DeviceError: when there is no memory for a collective either; or if a compiler has changed which
            collectives there are, as some options of Inductor allow.
    """
    collectives, started = collectives_of(captured), _Started()
    outputs = None
    memory_error = None
    try:
        with started:
            outputs = run(*inputs)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        memory_error = error
    else:
        _require_all(started.count, len(collectives))
    if memory_error is not None:
        release(memory_error, inputs[0].device)
        for node in collectives[started.count :]:
            _run_with_zeros(node)
    if agreement.largest(int(outputs is None)) or outputs is None:
        raise OutOfMemoryOnRankError("fit: memory ran out on a rank") from memory_error
    return outputs


_graph_runner: ContextVar[Callable[..., Sequence[Tensor]] | None] = ContextVar("ftrain_graph_runner", default=None)


graph_runner = _graph_runner.get
"""``() -> function | None``: the function that runs compiled graphs, `run_graph`; None if they are simply called."""


def running_graphs(agreement: Agreement) -> AbstractContextManager[None]:
    """Return the context in which compiled graphs run on all ranks, or on none."""
    return setting(_graph_runner, partial(run_graph, agreement))


class _Started(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that have been started."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # A collective without memory for its result is not started.
        self.count += is_collective(function)
        return result


def _require_all(started: int, captured: int) -> None:
    # A replayed CUDA graph starts no collective from the host.
    if started not in (0, captured):
        raise DeviceError(
            f"fit: on_oom='split' needs to know the collectives of a compiled step: {captured} were captured, and the "
            f"compiler made {started} of them; leave out options of compiled() that join or remove collectives"
        )


def _run_with_zeros(node: fx.Node) -> None:
    """Run a collective of a captured graph with zeros, and wait for it. Raises a DeviceError without memory for it."""

    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        value: Tensor = leaf.meta["val"]
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)

    target: Any = node.target
    try:
        wait(target(*tree.map(zeros, node.args), **tree.map(zeros, node.kwargs)))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(
            "fit: memory ran out on this rank, which has none for what it must send to the others; use ft.remat(), a "
            "higher level of ft.sharded or smaller batches"
        ) from error
