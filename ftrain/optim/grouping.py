"""How an optimizer groups the leaves of its trees: which decay, and which are updated together."""

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
from ftrain.tree.name_patterns import Select
from ftrain.types import PyTree

Group: TypeAlias = tuple[list[int], bool]
"""Indices of leaves of one dtype and device, and whether they decay."""

BLOCK = 1 << 18
"""Elements that formulas take together if memory is not cached, so that intermediate results stay in CPU caches.

Uncut, a step of 148 x 256 x 256 took up to 1.6 times as long.
"""

PREDICTED_VECTORS = 256
"""About the largest number of vectors of fake tensors: operations on these take as long whatever their size, and a
prediction of billions of parameters would take hours. Intermediate results of such a vector add 1% to its peak."""


class VectorLayout(NamedTuple):
    """Elements that are joined into one vector, from one leaf or several of one dtype and device."""

    windows: list[tuple[int, int, int]]
    """Index of a leaf, and start and stop of its elements in row-major order."""
    decay: bool
    offset: int
    """Index of the first element of the vector among those of all leaves, counted group after group."""


@dataclass(frozen=True)
class Plan:
    """How the leaves of parameters, gradients and moments are updated; does not depend on their values.

    Args:
        spec: the structure of the parameters, and of each moment.
        singles: the leaves one by one, as graphs take them.
        groups: the leaves as fused kernels take them.
        blocks: the leaves as formulas take them: groups, cut by shape if the formula asks for that, and by size if the
            device does not cache memory.
        fusible: whether torch's fused kernels run on them at all.
        refusable: whether these kernels can also be told, by a tensor, to do nothing.
        aligned: whether the gradients have the strides of their parameters, which fused kernels need.
        writable: whether no leaf that could be donated has two elements at the same address.
        vectors: the leaves as vectors, joined and cut, if the planner has an `align`.
        leaf_vectors: each leaf as one vector, if it has.
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
    """Makes plans, with weight decay for the leaves of a mask.

    Args:
        half: whether the fused kernels are correct in 16 bits.
        align: lay leaves out as vectors, cut at multiples of this many elements; no vectors if it is 0.
        alike: group leaves of one shape.
        begins: the functions ``leaf -> initial value`` of the moments, whose shapes are then checked.
        offsets: of all leaves by name, if plans are for some of them; then `size` and `fusible` are those of all, too.
    """

    mask: Select
    half: bool = True
    align: int = 0
    alike: bool = False
    begins: Sequence[Callable[[Tensor], Tensor]] = ()
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
        _require_alike(names, leaves, grads)
        for begin, column in zip(self.begins, moments, strict=False):
            _require_moments(names, leaves, column, begin)
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
            columns_of_leaves = enumerate(zip(leaves, *moments, strict=True))
            uncut = {i for i, each in columns_of_leaves if not all(map(Tensor.is_contiguous, each))}
            vectors = list(_vectors(groups, leaves, offsets, uncut, self.align))
            leaf_vectors = list(_vectors(singles, leaves, offsets, {*range(len(leaves))}, self.align))
        refusable = fusible and all(backends.of(device).fused_found_inf for device in {leaf.device for leaf in leaves})
        aligned = _aligned(leaves, grads)
        return Plan(spec, singles, groups, blocks, fusible, refusable, aligned, writable, vectors, leaf_vectors, size)

    def _groups(self, names: list[str], leaves: list[Tensor]) -> list[Group]:
        groups: dict[tuple[Any, ...], Group] = {}
        for index, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            decay = bool(self.mask(name, leaf))
            kind = leaf.dtype, leaf.device, decay, leaf.shape if self.alike else None
            groups.setdefault(kind, ([], decay))[0].append(index)
        return list(groups.values())

    def _blocks(self, indices: list[int], leaves: list[Tensor]) -> list[list[int]]:
        members = [leaves[index] for index in indices]
        cached = backends.of(members[0].device).caches_memory
        if cached and not self.alike:
            return [indices]
        most = BLOCK << 6 if cached else BLOCK
        return [[indices[place] for place in part] for part in by_size(members, most * members[0].itemsize)]

    def _is_fusible(self, leaves: list[Tensor], *moments: list[Tensor]) -> bool:
        if not all(backends.of(device).fused_optimizers for device in {leaf.device for leaf in leaves}):
            return False
        if self.align:
            # Kernels then get vectors of at least float32.
            return True
        wide = self.half or all(leaf.dtype.itemsize >= 4 for leaf in leaves)
        # Leaves must be dense, and moments have their strides.
        return wide and all(map(_is_dense, leaves)) and all(_aligned(leaves, column) for column in moments)


def _require_alike(names: list[str], leaves: list[Tensor], grads: list[Tensor]) -> None:
    # Fused kernels read as many elements as the parameter has, beyond the end of a smaller gradient.
    for name, leaf, grad in zip(names, leaves, grads, strict=True):
        if not isinstance(grad, Tensor) or (grad.shape, grad.dtype) != (leaf.shape, leaf.dtype):
            raise StructureError(
                f"optimizer: the gradient of {name or 'params'} is {tree.describe(grad)}, needs the shape and dtype of "
                f"the parameter, {tree.describe(leaf)}; correct the wrapper or the GradientTransform that returned it"
            )


def _require_moments(
    names: list[str], leaves: list[Tensor], moments: list[Tensor], begin: Callable[[Tensor], Tensor]
) -> None:
    # Fused kernels write beyond the end of a smaller one. A step does not check a state again that it has returned.
    for name, leaf, moment in zip(names, leaves, moments, strict=True):
        if moment.shape == leaf.shape:
            continue
        with _torch.without_modes():
            if moment.shape != begin(_torch.on_meta(leaf)).shape:
                raise StructureError(
                    f"optimizer: the parameter {name or 'params'} is {tree.describe(leaf)}, and its state is "
                    f"{tree.describe(moment)}, of another parameter; for other parameters make another state, with "
                    "step.init(params)"
                )


def _offsets(groups: list[Group], leaves: list[Tensor]) -> tuple[list[int], int]:
    """Return the index of the first element of each leaf, counted group after group, and the number of elements."""
    offsets, size = [0] * len(leaves), 0
    for index in (index for indices, _ in groups for index in indices):
        offsets[index] = size
        size += leaves[index].numel()
    return offsets, size


def _vectors(
    groups: list[Group], leaves: list[Tensor], offsets: list[int], uncut: set[int], align: int
) -> Iterator[VectorLayout]:
    """Join and cut the leaves of each group, but do not cut those in `uncut`."""
    for indices, decay in groups:
        most = _vector_size([leaves[index] for index in indices], align)
        windows: list[tuple[int, int, int]] = []
        offset = size = 0
        for index in indices:
            count = leaves[index].numel()
            step = max(count, 1) if index in uncut else most
            for start in range(0, count, step):
                stop, first = min(start + step, count), offsets[index] + start
                if windows and (size + stop - start > most or first != offset + size):
                    yield VectorLayout(windows, decay, offset)
                    windows, size = [], 0
                offset = offset if windows else first
                windows.append((index, start, stop))
                size += stop - start
        if windows:
            yield VectorLayout(windows, decay, offset)


def _vector_size(leaves: list[Tensor], align: int) -> int:
    """Return the largest number of elements of a vector of a group."""
    most = BLOCK << 6 if backends.of(leaves[0].device).caches_memory else BLOCK
    if _torch.is_fake(leaves[0]):
        most = max(most, sum(map(Tensor.numel, leaves)) // PREDICTED_VECTORS)
    return max(align, most // align * align)


def _aligned(leaves: list[Tensor], others: list[Tensor]) -> bool:
    return all(leaf.stride() == other.stride() for leaf, other in zip(leaves, others, strict=True))


def _is_dense(leaf: Tensor) -> bool:
    return leaf.is_contiguous() or leaf.stride() == torch.empty_like(leaf).stride()


def _is_expanded(leaf: Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
