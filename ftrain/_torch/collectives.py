"""Collectives of torch that are traced like any other operation.

Each starts a collective and returns its result before it is complete; `wait` returns it when it is. These are the
operations themselves, whose schemas are the same in all versions; the functions around them change their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ftrain import _torch
from ftrain._torch import private_names

ARE_LEFT_OUT: dict[Any, Callable[[], bool]] = {}
"""The default process group of a rank -> whether it leaves out the collective that is next; called for each.

The result of such a one has the shape of the true one, and no meaning.
"""


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


def _is_left_out() -> bool:
    if not ARE_LEFT_OUT or _torch.is_capturing():
        return False
    left_out = ARE_LEFT_OUT.get(torch.distributed.group.WORLD)
    return left_out is not None and left_out()


@contextmanager
def uncounted() -> Iterator[None]:
    """Context of collectives of which `ARE_LEFT_OUT` learns nothing: those of the first step alone."""
    world = torch.distributed.group.WORLD if ARE_LEFT_OUT else None
    left_out = ARE_LEFT_OUT.pop(world, None)
    try:
        yield
    finally:
        if left_out is not None:
            ARE_LEFT_OUT[world] = left_out


def store_of_one_rank() -> Any:
    """Return the store with which a process that is the only rank joins."""
    with private_names():
        from torch._C._distributed_c10d import HashStore
    return HashStore()


def all_reduce_(tensor: Tensor, operation: str, group: str) -> Tensor:
    """Start to combine a tensor of each rank, which is overwritten unless a graph is captured.

    `operation` is ``"sum"``, ``"max"`` or ``"min"``.
    """
    if _is_left_out():
        return tensor
    function = _operations().all_reduce if _torch.is_capturing() else _operations().all_reduce_
    return function(tensor, operation, group)  # type: ignore[no-any-return]


def all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """Start to join the tensors of `size` ranks along their first axis, in the order of ranks."""
    if _is_left_out():
        return tensor.new_zeros((size * tensor.shape[0], *tensor.shape[1:]))
    return _operations().all_gather_into_tensor(tensor, size, group)  # type: ignore[no-any-return]


def reduce_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """Start to sum a tensor over `size` ranks; each rank gets its equal part of the first axis."""
    if _is_left_out():
        return tensor.new_zeros((tensor.shape[0] // size, *tensor.shape[1:]))
    return _operations().reduce_scatter_tensor(tensor, "sum", size, group)  # type: ignore[no-any-return]


def broadcast_(tensor: Tensor, source: int, group: str) -> Tensor:
    """Start to give every rank the tensor of rank `source`, which replaces its own unless a graph is captured."""
    if _is_left_out():
        return tensor
    function = _operations().broadcast if _torch.is_capturing() else _operations().broadcast_
    return function(tensor, source, group)  # type: ignore[no-any-return]


def all_to_all(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Start to send ``sent[r]`` rows of the first axis to each rank r, and to join ``received[r]`` rows of each."""
    if _is_left_out():
        return tensor.new_zeros((sum(received), *tensor.shape[1:]))
    return _operations().all_to_all_single(tensor, received, sent, group)  # type: ignore[no-any-return]


def wait(tensor: Tensor) -> Tensor:
    """Return the result of a collective when it is complete; on a GPU, its stream waits and not the host."""
    return _operations().wait_tensor(tensor)  # type: ignore[no-any-return]
