"""An optimizer whose state is stored on the host or in files, and is copied to the device group by group."""

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
"""Bytes of parameters in a group: enough for copies at full bandwidth, and few compared with a model."""


@dataclass(frozen=True)
class OffloadTarget:
    """Where the leaves of an optimizer state are stored.

    Args:
        directory: directory of their files; None for host memory.
        min_bytes: smallest leaves to store; smaller ones stay on the device of the parameters.
    """

    directory: Path | None
    min_bytes: int

    def takes(self, leaf: Tensor, device: torch.device) -> bool:
        """Whether a leaf of the state of parameters on `device` is stored here."""
        return self.is_large(leaf) and (self.directory is not None or device != tree.HOST)

    def is_large(self, leaf: Tensor) -> bool:
        """Whether a leaf is large enough to offload. Never a 0-d tensor: some of these belong to the host."""
        return leaf.ndim > 0 and leaf.nbytes >= max(self.min_bytes, 1)

    def holds(self, leaf: Tensor) -> bool:
        """Whether a leaf is already stored here."""
        return leaf.device == tree.HOST and (self.directory is None or is_in_file(leaf))

    def place(self, leaf: Tensor, device: torch.device) -> Tensor:
        """Return an empty tensor of the shape and dtype of a leaf, in host memory or in a new file."""
        if self.directory is not None:
            return in_file(leaf, self.directory)
        return on_host(leaf, backends.of(device).pinned_memory)


def offload_state(function: str, optimizer: Optimizer, target: OffloadTarget) -> Optimizer:
    """Return an optimizer that computes the same, to the bit, and stores its state elsewhere.

    While one group of parameters is updated, the state of the next one is copied, if the device can do both.

    Args:
        function: name of the caller, for error messages.
        optimizer: one that has a `split`.
        target: where the state is stored.

    Raises:
        ComposeError: the optimizer has no `split`.
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
        device = tree.device_of(params)
        copier = copier_of(device)
        for group in param_groups(function, optimizer, params, on_meta, _groups(leaves)):
            group_params = dict(zip(group.names, [leaves[place] for place in group.places], strict=True))
            group_state = tree.leaves(group.optimizer.init(group_params))
            for place, leaf in zip(group.state_places, group_state, strict=True):
                state[place] = _stored(target, copier, None, leaf, device)
        copier.wait()
        return tree.unflatten(spec, state)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        grouped = splitter.begin(params, opt_state, hyper, donate=donate)
        gradients, device = tree.leaves(grads), tree.device_of(params)
        copier = copier_of(device)
        prefetched: list[Callable[[], Tensor]] | None = None
        for group, following in zip(grouped.groups, [*grouped.groups[1:], None], strict=True):
            old = grouped.state_of(group)
            fetched = prefetched if prefetched is not None else _fetched(target, copier, old, device)
            # The copy of the next group overlaps with the update of this one.
            prefetched = None
            if copier.ahead and following is not None:
                prefetched = _fetched(target, copier, grouped.state_of(following), device)
            new = grouped.make(group, [gradients[place] for place in group.places], [get() for get in fetched])
            grouped.keep(group, _all_stored(target, copier, old if donate else None, new, device))
        copier.wait()
        return grouped.finish()

    split = wrap_split(optimizer, lambda each: _at_once(each, target))

    def around(transform: Callable[[Optimizer], Optimizer]) -> Optimizer:
        return offload_state(function, transform(optimizer), target)

    return dataclasses.replace(optimizer, init=init, update=update, split=split, offloaded=around)


def _at_once(optimizer: Optimizer, target: OffloadTarget) -> Optimizer:
    """Return an optimizer whose whole state is copied to the device for an update, and back."""

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        (old, spec), device = tree.flatten(opt_state), tree.device_of(params)
        copier = copier_of(device)
        on_device = tree.unflatten(spec, [get() for get in _fetched(target, copier, old, device)])
        new_params, new = optimizer.update(grads, on_device, params, hyper, donate=donate)
        stored = _all_stored(target, copier, old if donate else None, tree.leaves(new), device)
        copier.wait()
        return new_params, tree.unflatten(spec, stored)

    return dataclasses.replace(optimizer, update=update)


def _groups(leaves: Sequence[Tensor]) -> list[list[int]]:
    return by_size(leaves, GROUP_BYTES)


def _fetched(
    target: OffloadTarget, copier: Copier, state: Sequence[Tensor], device: torch.device
) -> list[Callable[[], Tensor]]:
    return [_fetch(target, copier, leaf, device) for leaf in state]


def _fetch(target: OffloadTarget, copier: Copier, leaf: Tensor, device: torch.device) -> Callable[[], Tensor]:
    if is_abstract(leaf) and target.directory is None and target.is_large(leaf):
        # Abstract tensors may have one device for both, and the copy still takes memory.
        return lambda: torch.empty_like(leaf)
    if leaf.device == device or leaf.ndim == 0:
        return lambda: leaf
    return copier.back(leaf, device)


def _all_stored(
    target: OffloadTarget, copier: Copier, old: Sequence[Tensor] | None, new: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    places = old if old is not None else [None] * len(new)
    return [_stored(target, copier, place, leaf, device) for place, leaf in zip(places, new, strict=True)]


def _stored(target: OffloadTarget, copier: Copier, place: Tensor | None, leaf: Tensor, device: torch.device) -> Tensor:
    """Return the stored copy of a leaf: in `place`, if that is given and fits, else in new memory or a new file."""
    if dtensor.is_dtensor(leaf):
        return dtensor.with_local_part(leaf, _stored(target, copier, place, dtensor.local_part(leaf), device))
    if is_abstract(leaf) and target.is_large(leaf):
        return _abstract_copy(leaf) if place is None else place
    if not target.takes(leaf, device) or (leaf is place and target.holds(leaf)):
        return leaf
    if place is None or not target.holds(place) or place.stride() != leaf.stride():
        place = target.place(leaf, device)
    copier.out(leaf, place)
    return place


def _abstract_copy(leaf: Tensor) -> Tensor:
    """Return an abstract tensor of the same shape, without memory on the device."""
    return leaf.new_empty(()).expand_as(leaf)
