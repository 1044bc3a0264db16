"""Collectives of torch that are traced like any other operation.

Each starts a collective and returns its result before it is complete; `wait` returns it when it is. These are the
operations themselves, whose schemas are the same in all versions; the functions around them change their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ftrain import _torch
from ftrain._torch import private_names


class Counter(Protocol):
    """Learns of each collective that a rank starts, and may leave it out."""

    def leaves_out(self) -> bool:
        """Return whether to leave out the next one: its result has the shape of the true one, and no meaning."""
        ...

    def has_started(self) -> None:
        """Count one that was started, and not one that has failed to, for want of memory for its result."""
        ...


COUNTERS: dict[Any, Counter] = {}
"""The default process group of a rank -> what counts its collectives."""


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
    """Return the result of a collective, or what stands in for that of one that is left out."""
    counter = COUNTERS.get(torch.distributed.group.WORLD) if COUNTERS and not _torch.is_capturing() else None
    if counter is None:
        return start()
    if counter.leaves_out():
        return stand_in()
    result = start()
    counter.has_started()
    return result


@contextmanager
def uncounted() -> Iterator[None]:
    """Context of collectives that are not counted: those of the first step alone."""
    world = torch.distributed.group.WORLD if COUNTERS else None
    counter = COUNTERS.pop(world, None)
    try:
        yield
    finally:
        if counter is not None:
            COUNTERS[world] = counter


def store_of_one_rank() -> Any:
    """Return the store with which a process that is the only rank joins."""
    with private_names():
        from torch._C._distributed_c10d import HashStore
    return HashStore()


def all_reduce_(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Start to combine a tensor of each rank, which is overwritten unless a graph is captured.

    `operation` is ``"sum"``, ``"max"`` or ``"min"``.
    """
    function = _operations().all_reduce if _torch.is_capturing() else _operations().all_reduce_
    return _started(lambda: function(tensor, operation, group), lambda: tensor)


def all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """Start to join the tensors of `size` ranks along their first axis, in the order of ranks."""
    function, shape = _operations().all_gather_into_tensor, (size * tensor.shape[0], *tensor.shape[1:])
    return _started(lambda: function(tensor, size, group), lambda: tensor.new_zeros(shape))


def reduce_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """Start to sum a tensor over `size` ranks; each rank gets its equal part of the first axis."""
    function, shape = _operations().reduce_scatter_tensor, (tensor.shape[0] // size, *tensor.shape[1:])
    return _started(lambda: function(tensor, "sum", size, group), lambda: tensor.new_zeros(shape))


def broadcast_(tensor: Tensor, source: int, group: str) -> Tensor:
    """Start to give every rank the tensor of rank `source`, which replaces its own unless a graph is captured."""
    function = _operations().broadcast if _torch.is_capturing() else _operations().broadcast_
    return _started(lambda: function(tensor, source, group), lambda: tensor)


def all_to_all(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Start to send ``sent[r]`` rows of the first axis to each rank r, and to join ``received[r]`` rows of each."""
    function, shape = _operations().all_to_all_single, (sum(received), *tensor.shape[1:])
    return _started(lambda: function(tensor, received, sent, group), lambda: tensor.new_zeros(shape))


def wait(tensor: Tensor) -> Tensor:
    """Return the result of a collective when it is complete; on a GPU, its stream waits and not the host."""
    return _operations().wait_tensor(tensor)  # type: ignore[no-any-return]
