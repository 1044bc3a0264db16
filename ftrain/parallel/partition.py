"""How tensors are divided over the ranks of a group, and collectives that send many of them in flat buffers."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ftrain.backends import widest
from ftrain.checkpoint.lazy_safetensors import StoredTensor
from ftrain.parallel.mesh import Group, Result

BUCKET_BYTES = 32 << 20
"""Tensors are sent together in buffers of about this many bytes: large enough for the full bandwidth."""


@dataclass(frozen=True)
class Part:
    """How one tensor is divided: into blocks of equal length along one axis. The last blocks may be shorter or empty.

    This is DTensor's ``Shard(axis)``; the blocks that are not empty are those of `torch.chunk`. `shape` is the shape of
    the whole tensor, and `size` the number of ranks.
    """

    shape: tuple[int, ...]
    axis: int
    size: int

    @classmethod
    def of(cls, shape: Sequence[int], size: int) -> Part:
        """Return how to divide a tensor with one or more axes.

        It is divided along the first axis, or along the longest if the first is shorter than `size`.
        """
        axis = 0 if shape[0] >= size else max(range(len(shape)), key=lambda axis: shape[axis])
        return cls(tuple(shape), axis, size)

    @functools.cached_property
    def block(self) -> int:
        """Length of a full block."""
        return (self.shape[self.axis] + self.size - 1) // self.size

    @functools.cached_property
    def other_lengths(self) -> tuple[int, ...]:
        """The lengths of the other axes."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @functools.cached_property
    def padded(self) -> int:
        """Number of elements of a full block, which each rank has in a buffer."""
        return self.block * math.prod(self.other_lengths)

    def range(self, rank: int) -> tuple[int, int]:
        """Return start and length of the block of a rank."""
        total = self.shape[self.axis]
        start = min(rank * self.block, total)
        return start, min(self.block, total - start)

    def shape_of(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the block of a rank; that of the first rank is full."""
        return (*self.shape[: self.axis], self.range(rank)[1], *self.shape[self.axis + 1 :])

    def take(self, whole: Tensor | StoredTensor, rank: int) -> Tensor:
        """Return the block of a rank: a view of the tensor, or a tensor that is read from a file."""
        return whole.narrow(self.axis, *self.range(rank))

    def rows(self, whole: Tensor) -> Tensor:
        """Return a whole tensor as a matrix with the padded block of each rank as a row: (size, padded)."""
        return self._padded(whole, self.size * self.block).reshape(self.size, self.padded)

    def row(self, local: Tensor) -> Tensor:
        """Return the block of one rank as a padded row: (padded,)."""
        return self._padded(local, self.block).reshape(self.padded)

    def _padded(self, tensor: Tensor, length: int) -> Tensor:
        """Return a tensor with the divided axis in front, padded with zeros to this length."""
        moved = tensor.movedim(self.axis, 0) if self.axis else tensor
        missing = length - moved.shape[0]
        return torch.cat([moved, moved.new_zeros((missing, *self.other_lengths))]) if missing else moved

    def whole(self, rows: Tensor) -> Tensor:
        """Return the whole tensor, contiguous, from a matrix as `rows` returns; it may be a view of the matrix."""
        return self._cut(rows, self.size * self.block, self.shape[self.axis])

    def local(self, row: Tensor, rank: int) -> Tensor:
        """Return the block of a rank from its padded row."""
        return self._cut(row, self.block, self.range(rank)[1])

    def _cut(self, padded: Tensor, padded_length: int, length: int) -> Tensor:
        """Return a tensor without its padding, and with the divided axis in its place: the inverse of `_padded`."""
        moved = padded.reshape(padded_length, *self.other_lengths)[:length]
        return moved.movedim(0, self.axis).contiguous() if self.axis else moved


def buckets(tensors: Sequence[Tensor], sizes: Sequence[int], limit: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Yield the indices of tensors that are sent together: of one dtype, and of at least `limit` bytes if there are.

    `sizes` are the numbers of elements that they have in a buffer.
    """
    waiting: dict[torch.dtype, list[int]] = {}
    nbytes: Counter[torch.dtype] = Counter()
    for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        dtype = tensor.dtype
        waiting.setdefault(dtype, []).append(index)
        nbytes[dtype] += size * dtype.itemsize
        if nbytes[dtype] >= limit:
            yield waiting.pop(dtype)
            del nbytes[dtype]
    yield from waiting.values()


Results: TypeAlias = Callable[[], list[Tensor]]
"""Waits for collectives, and returns a result for each tensor."""


def start_sum_all(group: Group, tensors: Sequence[Tensor]) -> Results:
    """Start to sum whole tensors over the ranks."""
    return _start_in_buckets(group, tensors, group.start_sum_)


def start_sum_all_wide(group: Group, tensors: Sequence[Tensor]) -> Results:
    """Start to sum a few numbers over the ranks, in the most precise dtype of the device; each sum keeps its dtype.

    If ranks had numbers of different dtypes, they would send different numbers of bytes, for which gloo ends the
    process of another rank.
    """
    if group.size == 1:
        return partial(list, tensors)
    results = start_sum_all(group, [tensor.to(widest(tensor.device)) for tensor in tensors])
    return lambda: [total.to(tensor.dtype) for total, tensor in zip(results(), tensors, strict=True)]


def broadcast_all(group: Group, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of the first rank."""
    return _start_in_buckets(group, tensors, group.start_broadcast_)()


def _start_in_buckets(group: Group, tensors: Sequence[Tensor], start: Callable[[Tensor], Result]) -> Results:
    """Start a collective that keeps shapes, on buffers of whole tensors."""
    if group.size == 1:
        return partial(list, tensors)
    shapes, sizes = [tensor.shape for tensor in tensors], [tensor.numel() for tensor in tensors]
    started = [
        (members, start(torch.cat([tensors[index].reshape(-1) for index in members])))
        for members in buckets(tensors, sizes)
    ]

    def results() -> list[Tensor]:
        by_index: dict[int, Tensor] = {}
        for members, wait in started:
            parts = wait().split_with_sizes([sizes[index] for index in members])
            by_index.update((index, part.view(shapes[index])) for index, part in zip(members, parts, strict=True))
        return [by_index[index] for index in range(len(shapes))]

    return results


def start_gather_all(group: Group, locals_: Sequence[Tensor], parts: Sequence[Part | None]) -> Results:
    """Start to gather whole tensors. Each rank has a block of each; those without a part are whole already."""
    if group.size == 1:
        return partial(list, locals_)
    started = [
        (bucket, group.start_gather([part.row(locals_[index]) for index, part in bucket]))
        for bucket in _divided_buckets(locals_, parts)
    ]

    def results() -> list[Tensor]:
        wholes = dict(enumerate(locals_))
        for bucket, wait in started:
            wholes.update((index, part.whole(rows)) for (index, part), rows in zip(bucket, wait(), strict=True))
        return [wholes[index] for index in range(len(locals_))]

    return results


def start_scatter_all(group: Group, wholes: Sequence[Tensor], parts: Sequence[Part | None]) -> Results:
    """Start to sum whole tensors over the ranks. Each rank gets its block of a sum, or all of it without a part."""
    if group.size == 1:
        return partial(list, wholes)
    undivided = [index for index, part in enumerate(parts) if part is None]
    started = [
        (bucket, group.start_scatter([part.rows(wholes[index]) for index, part in bucket]))
        for bucket in _divided_buckets(wholes, parts)
    ]
    undivided_sums = start_sum_all(group, [wholes[index] for index in undivided])

    def results() -> list[Tensor]:
        sums = dict(zip(undivided, undivided_sums(), strict=True))
        for bucket, wait in started:
            sums.update((index, part.local(row, group.rank)) for (index, part), row in zip(bucket, wait(), strict=True))
        return [sums[index] for index in range(len(parts))]

    return results


def _divided_buckets(tensors: Sequence[Tensor], parts: Sequence[Part | None]) -> Iterator[list[tuple[int, Part]]]:
    """Yield the tensors of each bucket that are divided: their indices and parts."""
    divided = [(index, part) for index, part in enumerate(parts) if part is not None]
    for members in buckets([tensors[index] for index, _ in divided], [part.padded for _, part in divided]):
        yield [divided[member] for member in members]
