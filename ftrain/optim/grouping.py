"""Group the leaves of parameters: which of them decay, and which an optimizer updates together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ftrain import _torch, backends, tree
from ftrain.errors import StructureError
from ftrain.optim.partial_update import by_size
from ftrain.optim.structure_cache import common_spec
from ftrain.tree import sharding
from ftrain.tree.name_patterns import Select
from ftrain.types import PyTree

Group: TypeAlias = tuple[list[int], bool]
"""Indices of leaves of one dtype and device, and whether they decay."""

BLOCK = 1 << 18
"""Elements that a formula takes at once on a device without a caching allocator, such as a CPU.

Intermediate results then stay in the CPU's caches. With all at once, an update of 148 matrices of 256 x 256 took up to
1.6 times as long.
"""

CACHED_BLOCK = BLOCK << 6
"""The same on a device with a caching allocator, where it only limits the memory of intermediate results."""

PREDICTED_VECTORS = 256
"""About the largest number of vectors of fake tensors.

An operation on a fake tensor takes the same time for any size, so a prediction for billions of parameters in vectors of
`BLOCK` elements would take hours. The intermediate results of the larger vectors add 1% to the predicted peak.
"""


class VectorLayout(NamedTuple):
    """Elements that are joined into one vector, from one leaf or several of one dtype and device."""

    windows: list[tuple[int, int, int]]
    """Index of a leaf, and start and stop of its elements in row-major order."""
    decay: bool
    offset: int
    """Index of the first element of the vector among those of all leaves, counted group after group."""


@dataclass(frozen=True)
class Plan:
    """How the leaves of parameters, gradients and moments are grouped for an update; does not depend on their values.

    Args:
        spec: the structure of the parameters, and of each moment.
        singles: the leaves one by one, as graphs take them.
        groups: the leaves as fused kernels take them.
        blocks: the leaves as formulas take them: groups, cut by shape if the formula asks for that, and by size if the
            device does not cache memory.
        fusible: whether torch's fused kernels can update the leaves.
        refusable: whether these kernels also take a tensor that says whether to update (`found_inf`).
        aligned: whether the gradients have the strides of their parameters, which fused kernels need.
        writable: whether no leaf that could be donated has two elements at the same address.
        vectors: the leaves as vectors, joined and cut; empty if the planner has no `align`.
        leaf_vectors: each leaf as one vector; empty if the planner has no `align`.
        size: number of elements of all leaves.
    """

    spec: optree.PyTreeSpec
    singles: list[Group]
    groups: list[Group]
    blocks: list[Group]
    fusible: bool
    refusable: bool
    aligned: bool
    writable: bool
    vectors: list[VectorLayout]
    leaf_vectors: list[VectorLayout]
    size: int


@dataclass(frozen=True)
class Planner:
    """Makes plans for trees of any structure.

    Args:
        mask: which leaves decay.
        fused_in_16_bits: whether the fused kernels are correct for leaves of 16 bits.
        align: vectors are cut at multiples of this many elements; no vectors if it is 0.
        by_shape: whether a group has leaves of one shape only.
        initial_values: the functions ``leaf -> initial value`` of the moments, to check their shapes; empty if the
            moments are stored in another form.
        offsets: if plans are for some of the leaves of a tree, name -> offset of each leaf in the whole tree. `size`
            and `fusible` are then those of the whole tree too.
    """

    mask: Select
    fused_in_16_bits: bool = True
    align: int = 0
    by_shape: bool = False
    initial_values: Sequence[Callable[[Tensor], Tensor]] = ()
    offsets: Mapping[str, int] | None = None
    size: int = 0
    fusible: bool = True

    def of_parts(self, params: PyTree) -> Planner:
        """Return a planner for parts of a tree, whose plans treat a leaf as the plan for the whole tree does."""
        names, leaves = tree.leaf_names(params), tree.leaves(params)
        offsets, size = _offsets(self._groups(names, leaves), leaves)
        offset_of = dict(zip(names, offsets, strict=True))
        return replace(self, offsets=offset_of, size=size, fusible=self._is_fusible(leaves))

    def plan(self, specs: Sequence[optree.PyTreeSpec], columns: list[list[Tensor]]) -> Plan:
        """Return the plan for parameters, gradients and moments: their structures and leaves, in this order."""
        spec, (leaves, grads, *moments) = common_spec(specs), columns
        names = tree.leaf_names(tree.unflatten(spec, leaves))
        _require_gradients(names, leaves, grads)
        if self.initial_values:
            for initial_value, column in zip(self.initial_values, moments, strict=True):
                _require_moments(names, leaves, column, initial_value)
        fusible = self.fusible and self._is_fusible(leaves, *moments)
        writable = not any(map(_is_expanded, itertools.chain(leaves, *moments)))
        groups = self._groups(names, leaves)
        singles = [([index], decay) for indices, decay in groups for index in indices]
        blocks = [(block, decay) for indices, decay in groups for block in self._blocks(indices, leaves)]
        offsets, size = _offsets(groups, leaves)
        if self.offsets is not None:
            offsets, size = [self.offsets[name] for name in names], self.size
        vectors = leaf_vectors = list[VectorLayout]()
        if self.align:
            # A window is cut from a view as a vector, which a leaf has only if its memory is in row-major order.
            rows = enumerate(zip(leaves, *moments, strict=True))
            uncut = {index for index, row in rows if not all(map(Tensor.is_contiguous, row))}
            vectors = list(_vectors(groups, leaves, offsets, uncut, self.align))
            leaf_vectors = list(_vectors(singles, leaves, offsets, {*range(len(leaves))}, self.align))
        refusable = fusible and all(backends.of(device).fused_found_inf for device in {leaf.device for leaf in leaves})
        aligned = _aligned(leaves, grads)
        return Plan(spec, singles, groups, blocks, fusible, refusable, aligned, writable, vectors, leaf_vectors, size)

    def _groups(self, names: list[str], leaves: list[Tensor]) -> list[Group]:
        groups: dict[tuple[Any, ...], Group] = {}
        decays = map(self.mask, names, sharding.wholes(names, leaves))
        for index, (leaf, decay) in enumerate(zip(leaves, map(bool, decays), strict=True)):
            key = leaf.dtype, leaf.device, decay, leaf.shape if self.by_shape else None
            groups.setdefault(key, ([], decay))[0].append(index)
        return list(groups.values())

    def _blocks(self, indices: list[int], leaves: list[Tensor]) -> list[list[int]]:
        members = [leaves[index] for index in indices]
        cached = backends.of(members[0].device).caches_memory
        if cached and not self.by_shape:
            return [indices]
        max_bytes = (CACHED_BLOCK if cached else BLOCK) * members[0].itemsize
        return [[indices[position] for position in block] for block in by_size(members, max_bytes)]

    def _is_fusible(self, leaves: list[Tensor], *moments: list[Tensor]) -> bool:
        if not all(backends.of(device).fused_optimizers for device in {leaf.device for leaf in leaves}):
            return False
        if self.align:
            return True  # Kernels get dense vectors of float32 or float64.
        wide = self.fused_in_16_bits or all(leaf.dtype.itemsize >= 4 for leaf in leaves)
        # Leaves must be dense, and moments have their strides.
        return wide and all(map(_is_dense, leaves)) and all(_aligned(leaves, column) for column in moments)


def _require_gradients(names: list[str], leaves: list[Tensor], grads: list[Tensor]) -> None:
    # Of a gradient with fewer elements than the parameter, fused kernels would read beyond the end.
    for name, leaf, grad in zip(names, leaves, grads, strict=True):
        if not isinstance(grad, Tensor) or (grad.shape, grad.dtype) != (leaf.shape, leaf.dtype):
            raise StructureError(
                f"optimizer: the gradient of {name or 'params'} is {tree.describe(grad)}, needs the shape and dtype of "
                f"the parameter, {tree.describe(leaf)}; correct the wrapper or the GradientTransform that returned it"
            )


def _require_moments(
    names: list[str], leaves: list[Tensor], moments: list[Tensor], initial_value: Callable[[Tensor], Tensor]
) -> None:
    # Of a moment with fewer elements than the parameter, fused kernels would write beyond the end. This check is not
    # left to the step, which does not check a state that it has returned.
    for name, leaf, moment in zip(names, leaves, moments, strict=True):
        if moment.shape == leaf.shape:
            continue
        with _torch.without_modes():
            if moment.shape != initial_value(_torch.on_meta(leaf)).shape:
                raise StructureError(
                    f"optimizer: the parameter {name or 'params'} is {tree.describe(leaf)}, and its state is "
                    f"{tree.describe(moment)}, of another parameter; for other parameters make another state, with "
                    "step.init(params)"
                )


def _offsets(groups: list[Group], leaves: list[Tensor]) -> tuple[list[int], int]:
    """Return the index of the first element of each leaf, counted group after group, and the number of elements."""
    offsets, size = [0] * len(leaves), 0
    for indices, _ in groups:
        for index in indices:
            offsets[index] = size
            size += leaves[index].numel()
    return offsets, size


def _vectors(
    groups: list[Group], leaves: list[Tensor], offsets: list[int], uncut: set[int], align: int
) -> Iterator[VectorLayout]:
    """Yield vectors of the joined and cut leaves of each group; leaves in `uncut` are not cut."""
    for indices, decay in groups:
        max_size = _vector_size([leaves[index] for index in indices], align)
        windows: list[tuple[int, int, int]] = []
        offset = size = 0
        for index in indices:
            count = leaves[index].numel()
            step = max(count, 1) if index in uncut else max_size
            for start in range(0, count, step):
                stop, first = min(start + step, count), offsets[index] + start
                if windows and (size + stop - start > max_size or first != offset + size):
                    yield VectorLayout(windows, decay, offset)
                    windows, size = [], 0
                offset = offset if windows else first
                windows.append((index, start, stop))
                size += stop - start
        if windows:
            yield VectorLayout(windows, decay, offset)


def _vector_size(leaves: list[Tensor], align: int) -> int:
    """Return the largest number of elements of a vector of a group."""
    max_size = CACHED_BLOCK if backends.of(leaves[0].device).caches_memory else BLOCK
    if _torch.is_fake(leaves[0]):
        max_size = max(max_size, sum(map(Tensor.numel, leaves)) // PREDICTED_VECTORS)
    return max(align, max_size // align * align)


def _aligned(leaves: list[Tensor], others: list[Tensor]) -> bool:
    return all(leaf.stride() == other.stride() for leaf, other in zip(leaves, others, strict=True))


def _is_dense(leaf: Tensor) -> bool:
    return leaf.is_contiguous() or leaf.stride() == torch.empty_like(leaf).stride()


def _is_expanded(leaf: Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
