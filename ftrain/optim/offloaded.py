"""An optimizer whose state lives on the host or in files, and visits the device some leaves at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.backends import Copier
from ftrain.backends.transfers import copier_of, in_file, is_abstract, is_in_file, on_host
from ftrain.optim.partial_update import Apart, by_size, shares
from ftrain.types import Hyper, Optimizer, PyTree

TOGETHER = 1 << 26
"""Bytes of parameters that are updated together: enough for a copy at full speed, and few beside a model."""


@dataclass(frozen=True)
class Home:
    """Where the leaves of a state live.

    Args:
        directory: of their files; None for host memory.
        least: bytes below which a leaf stays where the parameters are.
    """

    directory: Path | None
    least: int

    def takes(self, leaf: Tensor, device: torch.device) -> bool:
        """Whether a leaf of the state of parameters on a device lives here."""
        return self.is_large(leaf) and (self.directory is not None or device != tree.HOST)

    def is_large(self, leaf: Tensor) -> bool:
        """Whether a leaf is worth to be sent for; numbers of no axes are not, of which some belong to the host."""
        return leaf.ndim > 0 and leaf.nbytes >= max(self.least, 1)

    def holds(self, leaf: Tensor) -> bool:
        """Whether a leaf is where it should be."""
        return leaf.device == tree.HOST and (self.directory is None or is_in_file(leaf))

    def place(self, leaf: Tensor, device: torch.device) -> Tensor:
        """Return an empty tensor in which a leaf can live."""
        if self.directory is not None:
            return in_file(leaf, self.directory)
        return on_host(leaf, backends.of(device).pinned_memory)


def away(function: str, optimizer: Optimizer, home: Home) -> Optimizer:
    """Return the optimizer that computes the same, to the bit, with a state that lives somewhere else.

    Args:
        function: who asks, for messages.
        optimizer: which can update parameters a few at a time.
        home: where the state lives.

    Raises:
        ComposeError: when it cannot.
    """
    group = _together
    apart = Apart(function, optimizer, group)

    def init(params: PyTree) -> PyTree:
        leaves = tree.leaves(params)
        if any(map(is_abstract, leaves)):
            return tree.map(lambda leaf: _elsewhere(leaf) if home.is_large(leaf) else leaf, optimizer.init(params))
        hollow = optimizer.init(tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), params))
        found, spec = tree.flatten(hollow)
        device = tree.device_of(params)
        copier = copier_of(device)
        for share in shares(function, optimizer, params, hollow, group(leaves)):
            own = share.optimizer.init(dict(zip(share.names, [leaves[p] for p in share.places], strict=True)))
            for place, leaf in zip(share.held, tree.leaves(own), strict=True):
                found[place] = _stored(home, copier, None, leaf, device)
        copier.wait()
        return tree.unflatten(spec, found)

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        made, gradients = apart.begin(params, opt_state, hyper, donate=donate), tree.leaves(grads)
        device = tree.device_of(params)
        copier = copier_of(device)
        coming: list[Callable[[], Tensor]] | None = None
        for share, following in zip(made.shares, [*made.shares[1:], None], strict=True):
            old = made.state_of(share)
            here = coming if coming is not None else _fetched(home, copier, old, device)
            # The next one is under way while this one is computed.
            coming = _fetched(home, copier, made.state_of(following), device) if copier.ahead and following else None
            new = made.make(share, [gradients[place] for place in share.places], [get() for get in here])
            made.keep(share, _all_stored(home, copier, old if donate else None, new, device))
        copier.wait()
        return made.finish()

    def parts(params: PyTree, wanted: Sequence[Sequence[int]]) -> list[Optimizer]:
        return [_visiting(each, home) for each in optimizer.apart(params, wanted)] if optimizer.apart else []

    return dataclasses.replace(optimizer, init=init, update=update, apart=parts, offloaded=True)


def _visiting(optimizer: Optimizer, home: Home) -> Optimizer:
    """Return an optimizer whose whole state visits the device at once."""

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        (old, spec), device = tree.flatten(opt_state), tree.device_of(params)
        copier = copier_of(device)
        here = tree.unflatten(spec, [get() for get in _fetched(home, copier, old, device)])
        new_params, new = optimizer.update(grads, here, params, hyper, donate=donate)
        found = _all_stored(home, copier, old if donate else None, tree.leaves(new), device)
        copier.wait()
        return new_params, tree.unflatten(spec, found)

    return dataclasses.replace(optimizer, update=update)


def _together(leaves: Sequence[Tensor]) -> list[list[int]]:
    return by_size(leaves, TOGETHER)


def _fetched(home: Home, copier: Copier, state: Sequence[Tensor], device: torch.device) -> list[Callable[[], Tensor]]:
    return [_fetch(home, copier, leaf, device) for leaf in state]


def _fetch(home: Home, copier: Copier, leaf: Tensor, device: torch.device) -> Callable[[], Tensor]:
    if is_abstract(leaf) and home.directory is None and home.is_large(leaf):
        # Where the host is told from the device by nothing else, the copy is still one.
        return lambda: torch.empty_like(leaf)
    if leaf.device == device or leaf.ndim == 0:
        return lambda: leaf
    return copier.back(leaf, device)


def _all_stored(
    home: Home, copier: Copier, old: Sequence[Tensor] | None, new: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    places = old if old is not None else [None] * len(new)
    return [_stored(home, copier, place, leaf, device) for place, leaf in zip(places, new, strict=True)]


def _stored(home: Home, copier: Copier, place: Tensor | None, leaf: Tensor, device: torch.device) -> Tensor:
    """Return a leaf where it lives: in `place`, if that may be written and is there."""
    if is_abstract(leaf) and home.is_large(leaf):
        return _elsewhere(leaf) if place is None else place
    if not home.takes(leaf, device) or (leaf is place and home.holds(leaf)):
        return leaf
    if place is None or not home.holds(place) or place.stride() != leaf.stride():
        place = home.place(leaf, device)
    copier.out(leaf, place)
    return place


def _elsewhere(leaf: Tensor) -> Tensor:
    """A tensor without values, of that shape, and without its memory, which is not the device's."""
    return leaf.new_empty(()).expand_as(leaf)
