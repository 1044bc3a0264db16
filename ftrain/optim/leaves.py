"""What every optimizer does with the leaves of its trees: mask them, group them, keep or reuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from ftrain import backends, tree

DecayMask: TypeAlias = Callable[[str, Tensor], bool]
"""``(name, leaf) -> bool``: whether weight decay applies to the leaf of that name."""

Group: TypeAlias = tuple[list[int], bool]
"""Indices of leaves that one fused kernel can take together, and whether they decay."""


def matrices(name: str, leaf: Tensor) -> bool:
    """The usual decay mask: decay what has two axes or more, so neither biases nor norms."""
    return leaf.ndim >= 2


def everything(name: str, leaf: Tensor) -> bool:
    """The decay mask of `torch.optim`: decay every parameter."""
    return True


class DecayGroups:
    """Applies a decay mask to lists of leaves, once for each tree that comes by."""

    def __init__(self, mask: DecayMask) -> None:
        self._mask = mask
        self._known: dict[optree.PyTreeSpec, tuple[list[Any], list[bool], list[Group]]] = {}

    def of(self, spec: optree.PyTreeSpec, leaves: list[Tensor]) -> tuple[list[bool], list[Group]]:
        """Return for each leaf whether it decays, and the groups for the fused kernels."""
        kinds = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        known = self._known.get(spec)
        if known is None or known[0] != kinds:
            decays = self._decays(spec, leaves)
            known = self._known[spec] = kinds, decays, _groups(decays, leaves)
        return known[1], known[2]

    def _decays(self, spec: optree.PyTreeSpec, leaves: list[Tensor]) -> list[bool]:
        named = tree.map_named(lambda name, leaf: bool(self._mask(name, leaf)), tree.unflatten(spec, leaves))
        return tree.leaves(named)


def _groups(decays: list[bool], leaves: list[Tensor]) -> list[Group]:
    found: dict[tuple[Any, ...], Group] = {}
    for index, (leaf, decay) in enumerate(zip(leaves, decays, strict=True)):
        found.setdefault((leaf.dtype, leaf.device, decay), ([], decay))[0].append(index)
    return list(found.values())


def can_fuse(leaves: list[Tensor], *moments: list[Tensor], half: bool = True) -> bool:
    """Whether torch's fused optimizer kernels take these leaves, those of 16 bits included if `half`."""
    dtypes = {leaf.dtype for leaf in leaves}
    if not half and any(dtype.itemsize < 4 for dtype in dtypes):
        return False
    fused = all(backends.of(device).fused_optimizers for device in {leaf.device for leaf in leaves})
    return fused and same_layout(leaves, *moments)


def same_layout(leaves: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether leaves are dense and those beside them lie in memory as they do, which fused kernels take for granted."""
    return all(map(_is_dense, leaves)) and all(
        leaf.stride() == other.stride() for column in others for leaf, other in zip(leaves, column, strict=True)
    )


def _is_dense(leaf: Tensor) -> bool:
    return leaf.is_contiguous() or leaf.stride() == torch.empty_like(leaf).stride()


def own(leaves: list[Tensor], donate: bool) -> list[Tensor]:
    """Return tensors that may be written: the leaves themselves when donated, else copies."""
    return leaves if donate else [leaf.clone() for leaf in leaves]


def like(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Return gradients in the memory layout of their parameters, which fused kernels take for granted."""
    return [
        grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
        for grad, param in zip(grads, params, strict=True)
    ]


def pick(indices: list[int], leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves at `indices`."""
    return [leaves[index] for index in indices]
