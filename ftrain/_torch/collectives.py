"""Collectives of torch that are traced like any other operation.

Each function starts a collective and returns its result before it is complete; `wait` returns the complete result. They
call the operations of torch directly, whose schemas are the same in all versions; torch's Python functions change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from ftrain import _torch
from ftrain._torch import private_names


class Counter(Protocol):
    """Counts each collective that a rank starts, and may leave it out."""

    def leaves_out(self) -> bool:
        """Return whether to leave out the next collective: its result then has the right shape and arbitrary values."""

    def has_started(self) -> None:
        """Count a collective that was started; not one that failed because there was no memory for its result."""


COUNTERS: dict[Any, Counter] = {}
"""The default process group of a rank -> the object that counts its collectives."""

_unwaited: ContextVar[dict[int, Tensor] | None] = ContextVar("ftrain_unwaited", default=None)
"""The results for which nothing has waited yet, by their ids, in the order of their start."""


@functools.cache
def _operations() -> Any:
    # At first use, since some builds of torch have no torch.distributed.
    with private_names():
        import torch.distributed._functional_collectives  # Registers the operations.

        operations = torch.ops._c10d_functional
        _ = operations.all_reduce, operations.all_gather_into_tensor, operations.reduce_scatter_tensor
        _ = operations.all_to_all_single, operations.broadcast, operations.wait_tensor
        _ = operations.all_reduce_, operations.broadcast_
        return operations


def _started(start: Callable[[], Tensor], stand_in: Callable[[], Tensor]) -> Tensor:
    """Return the result of a collective, or a placeholder if it is left out."""
    if _torch.is_capturing():
        return start()
    counter = COUNTERS.get(torch.distributed.group.WORLD) if COUNTERS else None
    if counter is not None and counter.leaves_out():
        return stand_in()
    result, unwaited = start(), _unwaited.get()
    if counter is not None:
        counter.has_started()
    if unwaited is not None:
        unwaited[id(result)] = result
    return result


@contextmanager
def waiting_after(is_waited_for: Callable[[Exception], bool]) -> Iterator[None]:
    """Context that, after an error, waits for the collectives that were started in it.

    Torch keeps the memory of a collective until something waits for it. The other ranks start the same ones, unless
    they fail too: the wait then fails, at the latest after the timeout of the process group. `is_waited_for` returns
    whether to wait after an error. Raises the first error in both cases.
    """
    started: dict[int, Tensor] = {}
    token = _unwaited.set(started)
    try:
        yield
    except Exception as error:
        if is_waited_for(error):
            with suppress(RuntimeError):
                while started:
                    wait(next(iter(started.values())))
        raise
    finally:
        _unwaited.reset(token)
        started.clear()


@contextmanager
def uncounted() -> Iterator[None]:
    """Context of collectives that are not counted: those only in the first step."""
    world = torch.distributed.group.WORLD if COUNTERS else None
    counter = COUNTERS.pop(world, None)
    try:
        yield
    finally:
        if counter is not None:
            COUNTERS[world] = counter


def all_reduce_(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Start an all-reduce of a tensor, which is overwritten unless a graph is captured.

    `operation` is ``"sum"``, ``"max"`` or ``"min"``.
    """
    function = _operations().all_reduce if _torch.is_capturing() else _operations().all_reduce_
    return _started(lambda: function(tensor, operation, group), lambda: tensor)


def all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """Start an all-gather: join the tensors of `size` ranks along their first axis, in the order of ranks."""
    function, shape = _operations().all_gather_into_tensor, (size * tensor.shape[0], *tensor.shape[1:])
    return _started(lambda: function(tensor, size, group), lambda: tensor.new_zeros(shape))


def reduce_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """Start a reduce-scatter: sum over `size` ranks; each rank gets its equal part of the first axis."""
    function, shape = _operations().reduce_scatter_tensor, (tensor.shape[0] // size, *tensor.shape[1:])
    return _started(lambda: function(tensor, "sum", size, group), lambda: tensor.new_zeros(shape))


def broadcast_(tensor: Tensor, source: int, group: str) -> Tensor:
    """Start a broadcast of the tensor of rank `source`, which replaces that of each rank unless a graph is captured."""
    function = _operations().broadcast if _torch.is_capturing() else _operations().broadcast_
    return _started(lambda: function(tensor, source, group), lambda: tensor)


def all_to_all(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Start an all-to-all: send ``sent[r]`` rows of the first axis to each rank r, and join ``received[r]`` of each."""
    function, shape = _operations().all_to_all_single, (sum(received), *tensor.shape[1:])
    return _started(lambda: function(tensor, received, sent, group), lambda: tensor.new_zeros(shape))


def wait(tensor: Tensor) -> Tensor:
    """Return the result of a collective when it is complete; on a GPU its stream waits, not the host."""
    unwaited = _unwaited.get()
    if unwaited is not None:
        unwaited.pop(id(tensor), None)
    return _operations().wait_tensor(tensor)  # type: ignore[no-any-return]
