"""Collectives of torch that are traced like any other operation.

Each starts a collective and returns its result before it is complete; `wait` returns it when it is. These are the
operations themselves, whose schemas are the same in all versions; the functions around them change their names.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ftrain import _torch
from ftrain._torch import private_names


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
    return function(tensor, operation, group)  # type: ignore[no-any-return]


def all_gather(tensor: Tensor, size: int, group: str) -> Tensor:
    """Start to join the tensors of `size` ranks along their first axis, in the order of ranks."""
    return _operations().all_gather_into_tensor(tensor, size, group)  # type: ignore[no-any-return]


def reduce_scatter(tensor: Tensor, size: int, group: str) -> Tensor:
    """Start to sum a tensor over `size` ranks; each rank gets its equal part of the first axis."""
    return _operations().reduce_scatter_tensor(tensor, "sum", size, group)  # type: ignore[no-any-return]


def broadcast_(tensor: Tensor, source: int, group: str) -> Tensor:
    """Start to give every rank the tensor of rank `source`, which replaces its own unless a graph is captured."""
    function = _operations().broadcast if _torch.is_capturing() else _operations().broadcast_
    return function(tensor, source, group)  # type: ignore[no-any-return]


def all_to_all(tensor: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Start to send ``sent[r]`` rows of the first axis to each rank r, and to join ``received[r]`` rows of each."""
    return _operations().all_to_all_single(tensor, received, sent, group)  # type: ignore[no-any-return]


def wait(tensor: Tensor) -> Tensor:
    """Return the result of a collective when it is complete; on a GPU, its stream waits and not the host."""
    return _operations().wait_tensor(tensor)  # type: ignore[no-any-return]
