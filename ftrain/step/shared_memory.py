"""Find different tensors that share memory, and copy them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from ftrain import _torch, tree
from ftrain.types import PyTree


def overlaps(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of names whose tensors share elements, not only a storage as in `torch.nn.LSTM` on a GPU."""
    by_memory = defaultdict(list)
    for name, tensor in tensors.items():
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta:
            by_memory[_torch.storage_id(tensor)].append(name)
    pairs = (pair for names in by_memory.values() for pair in combinations(names, 2))
    return [(a, b) for a, b in pairs if _overlap(tensors[a], tensors[b])]


def _overlap(a: Tensor, b: Tensor) -> bool:
    if not (a.numel() and b.numel()):
        return False
    range_a, range_b = _range(a), _range(b)
    if range_a.stop <= range_b.start or range_b.stop <= range_a.start:
        return False
    if a.element_size() != b.element_size():
        return True
    # Two columns of a matrix, for example, overlap in range but share no element.
    positions = torch.arange(a.untyped_storage().nbytes() // a.element_size(), device=tree.HOST)
    first, second = (positions.as_strided(each.shape, each.stride(), each.storage_offset()) for each in (a, b))
    return bool(torch.isin(first.flatten(), second.flatten()).any())


def _range(tensor: Tensor) -> range:
    """Return the byte range from the first element to the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = tensor.storage_offset(), tensor.element_size()
    return range(start * size, (start + last + 1) * size)


def copy_shared(buffers: PyTree, overwritten: PyTree) -> PyTree:
    """Copy the buffers that share a storage with tensors that a donated update overwrites."""
    storages = {_torch.storage_id(leaf) for leaf in tree.leaves(overwritten)}
    return tree.map(lambda leaf: leaf.clone() if _torch.storage_id(leaf) in storages else leaf, buffers)
