"""Send the parts of divided tensors to their owners and back: in between, each owner has its tensors whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part


def to_owners(
    group: Group, blocks: Sequence[Tensor], parts: Sequence[Part], owners: Sequence[int]
) -> dict[int, Tensor]:
    """Join divided tensors, each on its owner.

    Args:
        group: the ranks, each with a block of every tensor.
        blocks: blocks of this rank.
        parts: how each tensor is divided.
        owners: the rank that gets each tensor whole.

    Returns:
        dict of whole tensors: those that this rank owns, by their place among the arguments.
    """
    started = []
    for members in _by_dtype(blocks):
        owned_by = {rank: [index for index in members if owners[index] == rank] for rank in range(group.size)}
        mine = owned_by[group.rank]
        flat = torch.cat([blocks[index].reshape(-1) for indices in owned_by.values() for index in indices])
        counts = [sum(blocks[index].numel() for index in indices) for indices in owned_by.values()]
        lengths = [[_count(parts[index], source) for index in mine] for source in range(group.size)]
        started.append((mine, lengths, group.start_exchange(flat, counts, [*map(sum, lengths)])))
    wholes: dict[int, Tensor] = {}
    for mine, lengths, wait in started:
        pieces = iter(wait().split_with_sizes([length for each in lengths for length in each]))
        received = [[next(pieces) for _ in mine] for _ in lengths]
        for number, index in enumerate(mine):
            part = parts[index]
            of_ranks = [row[number].view(_shape(part, rank)) for rank, row in enumerate(received)]
            wholes[index] = torch.cat(of_ranks, part.axis)
    return wholes


def from_owners(
    group: Group, wholes: Mapping[int, Tensor], parts: Sequence[Part], owners: Sequence[int], like: Sequence[Tensor]
) -> list[Tensor]:
    """Divide tensors that are whole on their owners: the inverse of `to_owners`.

    Args:
        group: the ranks.
        wholes: those that this rank owns, by their place.
        parts: how each tensor is to be divided.
        owners: the rank that has each tensor whole.
        like: tensors of the dtypes and devices of the results.

    Returns:
        list of the blocks of this rank, some of which share memory.
    """
    started = []
    for members in _by_dtype(like):
        mine = [index for index in members if owners[index] == group.rank]
        cut = [[parts[index].take(wholes[index], rank).reshape(-1) for index in mine] for rank in range(group.size)]
        flat = torch.cat([like[members[0]].new_empty(0), *(block for blocks in cut for block in blocks)])
        received = [index for rank in range(group.size) for index in members if owners[index] == rank]
        lengths = {index: _count(parts[index], group.rank) for index in received}
        counts = [sum(lengths[index] for index in members if owners[index] == rank) for rank in range(group.size)]
        sent_counts = [sum(block.numel() for block in blocks) for blocks in cut]
        started.append((lengths, group.start_exchange(flat, sent_counts, counts)))
    blocks: dict[int, Tensor] = {}
    for lengths, wait in started:
        pieces = wait().split_with_sizes([*lengths.values()])
        for index, piece in zip(lengths, pieces, strict=True):
            blocks[index] = piece.view(_shape(parts[index], group.rank))
    return [blocks[index] for index in range(len(like))]


def _by_dtype(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of tensors that are sent together; on all ranks in the same order."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    yield from by_dtype.values()


def _shape(part: Part, rank: int) -> tuple[int, ...]:
    return (*part.shape[: part.axis], part.range(rank)[1], *part.shape[part.axis + 1 :])


def _count(part: Part, rank: int) -> int:
    return math.prod(_shape(part, rank))
