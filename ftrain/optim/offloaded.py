"""Store the state of an optimizer on the host or in files, and copy it to the device group by group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ftrain import _torch, backends, tree
from ftrain._torch import dtensor
from ftrain.backends import Copier
from ftrain.backends.transfers import copier_of, in_file, is_abstract, is_in_file, on_host
from ftrain.optim.partial_update import UpdateSplitter, by_size, param_groups, wrap_split
from ftrain.types import Hyper, Optimizer, PyTree

GROUP_BYTES = 1 << 26
"""Bytes of parameters in a group: enough for copies at full bandwidth, and little compared with a model."""


@dataclass(frozen=True)
class OffloadTarget:
    """Where the leaves of an optimizer state are stored: in files of `directory`, or if it is None in host memory.

    Leaves of fewer than `min_bytes` stay on the device of the parameters.
    """

    directory: Path | None
    min_bytes: int

    def is_large(self, leaf: Tensor) -> bool:
        """Whether a leaf is large enough to offload. Never a 0-d tensor: some of these belong to the host."""
        return leaf.ndim > 0 and leaf.nbytes >= max(self.min_bytes, 1)

    def holds(self, leaf: Tensor) -> bool:
        """Whether a leaf is already stored here."""
        return leaf.device == tree.HOST and (self.directory is None or is_in_file(leaf))


def offload_state(function: str, optimizer: Optimizer, target: OffloadTarget) -> Optimizer:
    """Return an optimizer that computes the same bits and stores its state in `target`.

    While it updates a group of parameters, it copies the state of the next group, if the device can do both at once.
    Raises a ComposeError that names `function` if the optimizer has no `split`.
    """
    splitter = UpdateSplitter(function, optimizer, _groups)

    def init(params: PyTree) -> PyTree:
        leaves = tree.leaves(params)
        if any(map(is_abstract, leaves)):
            return tree.map(
                lambda leaf: _abstract_copy(leaf) if target.is_large(leaf) else leaf, optimizer.init(params)
            )
        on_meta = optimizer.init(tree.map(_torch.on_meta, params))
        state, spec = tree.flatten(on_meta)
        transfers = _Transfers.of(target, params)
        for group in param_groups(function, optimizer, params, on_meta, _groups(leaves)):
            group_params = dict(zip(group.names, [leaves[index] for index in group.indices], strict=True))
            group_state = tree.leaves(group.optimizer.init(group_params))
            for index, leaf in zip(group.state_indices, transfers.store(group_state, None), strict=True):
                state[index] = leaf
        transfers.copier.wait()
        return tree.unflatten(spec, state)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        grouped = splitter.begin(params, opt_state, hyper, donate=donate)
        gradients, transfers = tree.leaves(grads), _Transfers.of(target, params)
        prefetched: list[Callable[[], Tensor]] | None = None
        for group, following in zip(grouped.groups, [*grouped.groups[1:], None], strict=True):
            old = grouped.state_of(group)
            fetched = prefetched if prefetched is not None else [transfers.fetch(leaf) for leaf in old]
            # The copy of the next group overlaps with the update of this one.
            prefetched = None
            if transfers.copier.ahead and following is not None:
                prefetched = [transfers.fetch(leaf) for leaf in grouped.state_of(following)]
            group_grads = [gradients[index] for index in group.indices]
            new = grouped.update(group, group_grads, [get() for get in fetched])
            grouped.replace_state(group, transfers.store(new, old if donate else None))
        transfers.copier.wait()
        return grouped.finish()

    split = wrap_split(optimizer, lambda part: _offload_at_once(part, target))

    def offload_transformed(transform: Callable[[Optimizer], Optimizer]) -> Optimizer:
        return offload_state(function, transform(optimizer), target)

    return dataclasses.replace(optimizer, init=init, update=update, split=split, offloaded=offload_transformed)


def _offload_at_once(optimizer: Optimizer, target: OffloadTarget) -> Optimizer:
    """Return an optimizer that copies its whole state to the device for an update, and back to `target`."""

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        (old, spec), transfers = tree.flatten(opt_state), _Transfers.of(target, params)
        fetched = [transfers.fetch(leaf) for leaf in old]
        on_device = tree.unflatten(spec, [get() for get in fetched])
        new_params, new = optimizer.update(grads, on_device, params, hyper, donate=donate)
        stored = transfers.store(tree.leaves(new), old if donate else None)
        transfers.copier.wait()
        return new_params, tree.unflatten(spec, stored)

    return dataclasses.replace(optimizer, update=update)


def _groups(leaves: Sequence[Tensor]) -> list[list[int]]:
    return by_size(leaves, GROUP_BYTES)


@dataclass(frozen=True)
class _Transfers:
    """Copies of an optimizer state between the device of the parameters and its target."""

    target: OffloadTarget
    device: torch.device
    copier: Copier

    @classmethod
    def of(cls, target: OffloadTarget, params: PyTree) -> _Transfers:
        device = tree.device_of(params)
        return cls(target, device, copier_of(device))

    def fetch(self, leaf: Tensor) -> Callable[[], Tensor]:
        """Start to copy a leaf to the device, and return a function that returns the copy."""
        if is_abstract(leaf) and self.target.directory is None and self.target.is_large(leaf):
            # For abstract tensors both may be on the same device; a prediction of memory must count the copy.
            return lambda: torch.empty_like(leaf)
        if leaf.device == self.device or leaf.ndim == 0:
            return lambda: leaf
        return self.copier.back(leaf, self.device)

    def store(self, new: Sequence[Tensor], old: Sequence[Tensor] | None) -> list[Tensor]:
        """Start to copy leaves to the target, into the stored leaves `old` where these fit, and return the copies."""
        targets: Sequence[Tensor | None] = old if old is not None else [None] * len(new)
        return [self._store(leaf, into) for leaf, into in zip(new, targets, strict=True)]

    def _store(self, leaf: Tensor, into: Tensor | None) -> Tensor:
        target = self.target
        if dtensor.is_dtensor(leaf):
            return dtensor.with_local_part(leaf, self._store(dtensor.local_part(leaf), into))
        if is_abstract(leaf) and target.is_large(leaf):
            return _abstract_copy(leaf) if into is None else into
        stays = not target.is_large(leaf) or (target.directory is None and self.device == tree.HOST)
        if stays or (leaf is into and target.holds(leaf)):
            return leaf
        if into is None or not target.holds(into) or into.stride() != leaf.stride():
            pinned = backends.of(self.device).pinned_memory
            into = on_host(leaf, pinned) if target.directory is None else in_file(leaf, target.directory)
        self.copier.out(leaf, into)
        return into


def _abstract_copy(leaf: Tensor) -> Tensor:
    """Return an abstract tensor of the same shape, without memory on the device."""
    return leaf.new_empty(()).expand_as(leaf)
