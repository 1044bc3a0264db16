"""The block of a sharded tensor that each rank has, and where its elements are in the whole tensor.

A file holds whole tensors in row-major order, so nothing in it depends on how many ranks have written it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from torch import Tensor

from ftrain._torch.dtensor import axes_of, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Block(NamedTuple):
    """A block of a tensor: where it begins along each axis, and its lengths."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def has_many_ranks(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor of several ranks."""
    return is_dtensor(tensor) and tensor.device_mesh.size() > 1


def blocks_of_ranks(tensor: DTensor) -> dict[int, Block]:
    """Return the blocks of a tensor by the ranks that write them. They cover the tensor, and no two overlap.

    Ranks along a mesh axis that does not divide the tensor hold copies; the first of them writes.
    """
    mesh = tensor.device_mesh.mesh
    indices = [range(1 if axis is None else size) for size, axis in zip(mesh.shape, axes_of(tensor), strict=True)]
    return {int(mesh[index]): _block_at(tensor, index) for index in itertools.product(*indices)}


def block_of_this_rank(tensor: DTensor) -> Block:
    """Return the block of a tensor that this rank has."""
    return _block_at(tensor, [tensor.device_mesh.get_local_rank(axis) for axis in range(tensor.device_mesh.ndim)])


def _block_at(tensor: DTensor, mesh_index: Sequence[int]) -> Block:
    """Return the block of the rank at an index of the mesh: each axis is divided as by `torch.chunk`."""
    offset, shape = [0] * tensor.ndim, list(tensor.shape)
    for size, index, axis in zip(tensor.device_mesh.shape, mesh_index, axes_of(tensor), strict=True):
        if axis is not None:
            length = (shape[axis] + size - 1) // size
            start = min(index * length, shape[axis])
            offset[axis] += start
            shape[axis] = min(length, shape[axis] - start)
    return Block(tuple(offset), tuple(shape))


def runs(block: Block, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the contiguous runs of a block in a whole tensor of this shape: (start, length) in elements, in order."""
    if 0 in block.shape:
        return
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start_of_block = sum(index * stride for index, stride in zip(block.offset, strides, strict=True))
    # The axes after the last divided one are whole, so a run spans them and the block along that axis.
    axis = _last_divided_axis(block, shape)
    length = math.prod(block.shape[axis:])
    for outer_index in itertools.product(*map(range, block.shape[:axis])):
        start = sum(index * stride for index, stride in zip(outer_index, strides[:axis], strict=True))
        yield start_of_block + start, length


def contiguous_rows(local: Tensor, block: Block, shape: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield the start of each of `runs`, and its elements as a view of `local`, the tensor of this block."""
    if not local.numel():
        return
    rows = local.reshape(-1, *block.shape[_last_divided_axis(block, shape) :])
    for (start, _), row in zip(runs(block, shape), rows, strict=True):
        yield start, row


def _last_divided_axis(block: Block, shape: Sequence[int]) -> int:
    """Return the last axis along which a block is shorter than the whole tensor; 0 if there is none."""
    return max((axis for axis, length in enumerate(shape) if block.shape[axis] != length), default=0)
