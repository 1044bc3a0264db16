"""Send the parts of divided tensors to their owners and back: in between, each owner has its tensors whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain.parallel.mesh import Group
from ftrain.parallel.partition import Part

Key: TypeAlias = tuple[str, int]
"""A leaf: the name of a tree, and its index among the leaves."""


class Moved(NamedTuple):
    """How a tensor that is sent to its owner is divided, and the rank of the owner."""

    part: Part
    owner: int


def to_owners(group: Group, leaves: Mapping[Key, Tensor], moved: Mapping[Key, Moved]) -> dict[Key, Tensor]:
    """Send the blocks of each tensor of `moved` to its owner; return the whole tensors that this rank owns."""
    started = []
    for like, keys_by_owner in _by_dtype(group, leaves, moved):
        owned = keys_by_owner[group.rank]
        blocks_to_send = [[leaves[key] for key in keys] for keys in keys_by_owner]
        shapes = [[moved[key].part.shape_of(rank) for key in owned] for rank in range(group.size)]
        started.append((owned, _start(group, like, blocks_to_send, shapes)))
    wholes: dict[Key, Tensor] = {}
    for owned, wait in started:
        blocks_by_rank = wait()
        for index, key in enumerate(owned):
            wholes[key] = torch.cat([blocks[index] for blocks in blocks_by_rank], moved[key].part.axis)
    return wholes


def from_owners(
    group: Group, wholes: Mapping[Key, Tensor], moved: Mapping[Key, Moved], like: Mapping[Key, Tensor]
) -> dict[Key, Tensor]:
    """Return this rank's blocks of tensors that are whole on their owners: the inverse of `to_owners`.

    Some blocks share memory. `like` are blocks with the dtypes and devices of the results.
    """
    started = []
    for like_block, keys_by_owner in _by_dtype(group, like, moved):
        owned = keys_by_owner[group.rank]
        blocks_to_send = [[moved[key].part.take(wholes[key], rank) for key in owned] for rank in range(group.size)]
        shapes = [[moved[key].part.shape_of(group.rank) for key in keys] for keys in keys_by_owner]
        started.append((keys_by_owner, _start(group, like_block, blocks_to_send, shapes)))
    blocks: dict[Key, Tensor] = {}
    for keys_by_owner, wait in started:
        for keys, received in zip(keys_by_owner, wait(), strict=True):
            blocks.update(zip(keys, received, strict=True))
    return blocks


def _by_dtype(
    group: Group, leaves: Mapping[Key, Tensor], moved: Mapping[Key, Moved]
) -> list[tuple[Tensor, list[list[Key]]]]:
    """Return for each dtype a tensor of it, and the keys by their owner. Tensors of a dtype are sent together."""
    by_dtype: dict[torch.dtype, tuple[Tensor, list[list[Key]]]] = {}
    for key, (_, owner) in moved.items():
        leaf = leaves[key]
        _, keys_by_owner = by_dtype.setdefault(leaf.dtype, (leaf, [[] for _ in range(group.size)]))
        keys_by_owner[owner].append(key)
    return list(by_dtype.values())


def _start(
    group: Group, like: Tensor, to_send: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
) -> Callable[[], list[list[Tensor]]]:
    """Start to send tensors of the dtype of `like` to each rank, and to receive tensors of these shapes from each."""
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in to_send for tensor in tensors)])
    sent_counts = [sum(tensor.numel() for tensor in tensors) for tensors in to_send]
    # Numbers of elements, by the rank that sends them.
    lengths = [[math.prod(shape) for shape in shapes_of_rank] for shapes_of_rank in shapes]
    wait = group.start_exchange(flat, sent_counts, [sum(lengths_of_rank) for lengths_of_rank in lengths])

    def received() -> list[list[Tensor]]:
        pieces = iter(wait().split_with_sizes([*itertools.chain.from_iterable(lengths)]))
        return [[next(pieces).view(*shape) for shape in shapes_of_rank] for shapes_of_rank in shapes]

    return received
