"""What every optimizer does with the leaves of its trees: mask them, group them, keep or reuse them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.errors import StructureError
from ftrain.tree.fast_flatten import Flattener
from ftrain.tree.guards import Guard
from ftrain.tree.name_patterns import Select
from ftrain.types import PyTree

Group: TypeAlias = tuple[list[int], bool]
"""Indices of leaves that one fused kernel can take together, and whether they decay."""


REDUCED = 16
"""As many elements as Inductor does not unroll in a reduction."""

BLOCK = 1 << 18
"""Elements that formulas take together where memory is not cached: what they make in between then stays in caches."""


class Stretch(NamedTuple):
    """Elements that are joined to one vector, from one leaf or several of one dtype and device.

    Args:
        windows: index of a leaf, and from which to which of its elements in row-major order.
        decay: whether weight decay applies.
        place: of its first element among those of all leaves, taken stretch after stretch.
    """

    windows: list[tuple[int, int, int]]
    decay: bool
    place: int


@dataclass(frozen=True)
class Plan:
    """What an optimizer knows of its leaves before it sees their values.

    Args:
        decays: of each leaf, whether weight decay applies.
        groups: the leaves as fused kernels take them.
        blocks: the leaves as formulas take them: the groups, cut where new memory is paid for page by page, and parted
            by shape where the formula asks for that.
        fusible: whether torch's fused kernels run on them at all.
        aligned: whether the gradients lie in memory as their leaves do, which fused kernels take for granted.
        writable: whether no element of what could be donated lies where another does.
        stretches: the leaves as vectors, joined and cut; empty unless asked for.
        wholes: each leaf as one vector; empty unless asked for.
        size: elements of all leaves.
    """

    decays: list[bool]
    groups: list[Group]
    blocks: list[Group]
    fusible: bool
    aligned: bool
    writable: bool
    stretches: list[Stretch]
    wholes: list[Stretch]
    size: int


class Among(NamedTuple):
    """Where leaves lie among others.

    Args:
        places: name of a leaf -> place of its first element among those of all leaves, as stretches count them.
        size: elements of all leaves.
        fusible: whether torch's fused kernels run on all of them.
    """

    places: Mapping[str, int]
    size: int
    fusible: bool


class Planner:
    """Makes plans, and keeps the last one, since the next tree is most often like it.

    Args:
        mask: which leaves decay.
        half: whether the fused kernels are right in 16 bits.
        align: make stretches of leaves, parted at multiples of so many elements; none, when it is 0.
        alike: make blocks of leaves of one shape.
        among: where the leaves lie among others, when these are updated apart.
    """

    def __init__(
        self, mask: Select, *, half: bool = True, align: int = 0, alike: bool = False, among: Among | None = None
    ) -> None:
        self._mask, self._half, self._align, self._alike, self._among = mask, half, align, alike, among
        self._flatten = Flattener()
        self._last: tuple[optree.PyTreeSpec, Guard, Plan] | None = None

    def among(self, params: PyTree, parts: int) -> list[Planner]:
        """Return planners for parts of a tree, whose plans do with a leaf what that for the whole tree does."""
        names, leaves = tree.leaf_names(params), tree.leaves(params)
        decays = [bool(self._mask(name, leaf)) for name, leaf in zip(names, leaves, strict=True)]
        places, size = _places(_groups(decays, leaves), leaves), sum(leaf.numel() for leaf in leaves)
        found = Among(dict(zip(names, places, strict=True)), size, self._is_fusible(leaves))
        planner = partial(Planner, self._mask, half=self._half, align=self._align, alike=self._alike, among=found)
        return [planner() for _ in range(parts)]

    def columns(self, *trees: PyTree) -> tuple[list[list[Tensor]], optree.PyTreeSpec]:
        """`columns` of trees that mostly have the structure of those before."""
        return columns(self._flatten, *trees)

    def of(self, spec: optree.PyTreeSpec, leaves: list[Tensor], grads: list[Tensor], *moments: list[Tensor]) -> Plan:
        """Return the plan for leaves, their gradients and the moments beside them; `spec` is of all of these."""
        tensors = [*leaves, *grads, *itertools.chain(*moments)]
        last = self._last
        if last is None or last[0] is not spec or not last[1](tensors):
            last = self._last = spec, Guard(tensors), self._make(spec, leaves, grads, moments)
        return last[2]

    def _make(
        self, spec: optree.PyTreeSpec, leaves: list[Tensor], grads: list[Tensor], moments: tuple[list[Tensor], ...]
    ) -> Plan:
        params = tree.unflatten(require_alike(spec), leaves)
        decays = tree.leaves(tree.map_named(lambda name, leaf: bool(self._mask(name, leaf)), params))
        fusible = self._is_fusible(leaves, *moments)
        writable = not any(map(_is_expanded, itertools.chain(leaves, *moments)))
        groups = _groups(decays, leaves)
        blocks = [(block, decay) for indices, decay in groups for block in self._blocks(indices, leaves)]
        places, size = _places(groups, leaves), sum(leaf.numel() for leaf in leaves)
        if self._among is not None:
            places, size = [self._among.places[name] for name in tree.leaf_names(params)], self._among.size
            fusible = fusible and self._among.fusible
        stretches = wholes = list[Stretch]()
        if self._align:
            rigid = {i for i, beside in enumerate(zip(leaves, *moments, strict=True)) if not all(map(_is_flat, beside))}
            stretches = list(_stretches(groups, leaves, places, rigid, self._align))
            wholes = list(_stretches(groups, leaves, places, rigid, 0))
        return Plan(decays, groups, blocks, fusible, _aligned(leaves, grads), writable, stretches, wholes, size)

    def _blocks(self, indices: list[int], leaves: list[Tensor]) -> Iterator[list[int]]:
        cached = backends.of(leaves[indices[0]].device).caches_memory
        if not self._alike:
            return iter([indices]) if cached else _blocks(indices, leaves, BLOCK)
        shapes: dict[torch.Size, list[int]] = {}
        for index in indices:
            shapes.setdefault(leaves[index].shape, []).append(index)
        most = BLOCK << 6 if cached else BLOCK
        return itertools.chain.from_iterable(_blocks(each, leaves, most) for each in shapes.values())

    def _is_fusible(self, leaves: list[Tensor], *moments: list[Tensor]) -> bool:
        if not all(backends.of(device).fused_optimizers for device in {leaf.device for leaf in leaves}):
            return False
        # Stretches are float32 vectors of their own.
        wide = self._half or all(leaf.dtype.itemsize >= 4 for leaf in leaves)
        return self._align > 0 or (wide and same_layout(leaves, *moments))


def columns(
    flatten: Callable[[PyTree], tuple[list[Any], optree.PyTreeSpec]], *trees: PyTree
) -> tuple[list[list[Tensor]], optree.PyTreeSpec]:
    """Return the leaves of each of several trees of one structure, and the structure of the tuple of them."""
    found, spec = flatten(trees)
    count = len(found) // len(trees)
    return [found[i * count : (i + 1) * count] for i in range(len(trees))], spec


def require_alike(spec: optree.PyTreeSpec) -> optree.PyTreeSpec:
    """Return the structure of each tree in a tuple of trees, from that of the tuple.

    Raises:
        StructureError: when they have not all the same.
    """
    first, *others = spec.children()
    if any(other != first for other in others):
        raise StructureError(
            "optimizer: the trees of parameters, gradients and moments differ in structure; gradients and "
            "optimizer state must be like the parameters"
        )
    return first


def _groups(decays: list[bool], leaves: list[Tensor]) -> list[Group]:
    found: dict[tuple[Any, ...], Group] = {}
    for index, (leaf, decay) in enumerate(zip(leaves, decays, strict=True)):
        found.setdefault((leaf.dtype, leaf.device, decay), ([], decay))[0].append(index)
    return list(found.values())


def _blocks(indices: list[int], leaves: list[Tensor], most: int) -> Iterator[list[int]]:
    """Cut a group of at least one leaf; without these, a step of 148 x 256 x 256 took up to 1.6 times as long."""
    block: list[int] = []
    size = 0
    for index in indices:
        if block and size + leaves[index].numel() > most:
            yield block
            block, size = [], 0
        block.append(index)
        size += leaves[index].numel()
    yield block


def _places(groups: list[Group], leaves: list[Tensor]) -> list[int]:
    """Place of the first element of each leaf, when those of one group follow those of another."""
    order = [index for indices, _ in groups for index in indices]
    starts = itertools.accumulate((leaves[index].numel() for index in order), initial=0)
    found = dict(zip(order, starts, strict=False))
    return [found[index] for index in range(len(leaves))]


def _stretches(
    groups: list[Group], leaves: list[Tensor], places: list[int], rigid: set[int], align: int
) -> Iterator[Stretch]:
    """Join and cut the leaves of each group, those in `rigid` not cut; neither join nor cut, when `align` is 0."""
    for indices, decay in groups:
        cached = backends.of(leaves[indices[0]].device).caches_memory
        most = max(align, (BLOCK << 6 if cached else BLOCK) // align * align) if align else 0
        windows: list[tuple[int, int, int]] = []
        place = size = 0
        for index in indices:
            count = leaves[index].numel()
            step = most if most and index not in rigid else max(count, 1)
            for start in range(0, count, step):
                stop, here = min(start + step, count), places[index] + start
                if windows and (size + stop - start > most or here != place + size):
                    yield Stretch(windows, decay, place)
                    windows, size = [], 0
                place = place if windows else here
                windows.append((index, start, stop))
                size += stop - start
        if windows:
            yield Stretch(windows, decay, place)


def _is_flat(leaf: Tensor) -> bool:
    return leaf.is_contiguous()


def same_layout(leaves: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether leaves are dense and those beside them lie in memory as they do, which fused kernels take for granted."""
    return all(map(_is_dense, leaves)) and all(_aligned(leaves, column) for column in others)


def _aligned(leaves: list[Tensor], others: list[Tensor]) -> bool:
    return all(leaf.stride() == other.stride() for leaf, other in zip(leaves, others, strict=True))


def _is_dense(leaf: Tensor) -> bool:
    return leaf.is_contiguous() or leaf.stride() == torch.empty_like(leaf).stride()


def _is_expanded(leaf: Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))


def copies(leaves: list[Tensor]) -> list[Tensor]:
    """Return tensors that may be written."""
    return [leaf.clone() for leaf in leaves]


def like(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Return gradients in the memory layout of their parameters, which fused kernels take for granted."""
    return [
        grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
        for grad, param in zip(grads, params, strict=True)
    ]


def settled(*scalars: Tensor) -> tuple[Tensor, ...]:
    """Keep a compiler from working 0-d tensors out again for every element that they are used on.

    Inductor puts cheap operations into the kernels that use them, and counts powers among these: an update
    of 8 million parameters took 6.5 ms instead of 3.0. The result of a reduction it always stores.
    """
    return torch.stack(scalars).expand(REDUCED, len(scalars)).amax(0).unbind()


def pick(indices: list[int], leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves at `indices`."""
    return [leaves[index] for index in indices]
