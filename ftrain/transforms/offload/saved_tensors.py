"""Keep the tensors that autograd saves for the backward pass in host memory until they are needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ftrain import _torch, backends
from ftrain.backends.transfers import copier_of, is_abstract, on_host
from ftrain.errors import LossError, TraceError

AHEAD = 4
"""Storages that are fetched ahead of the one that the backward pass needs."""

PLAIN = Tensor, nn.Parameter, _torch.FakeTensor
"""Tensor classes without behaviour of their own; tensors of other subclasses stay on the device."""


class _Held(NamedTuple):
    """A tensor that stays on the device, and its version when it was saved."""

    tensor: Tensor
    version: int


class _Piece:
    """One storage, on the host."""

    def __init__(self, flat: Tensor, place: int, device: torch.device) -> None:
        self.size, self.dtype, self.device, self.place = flat.numel(), flat.dtype, device, place
        self.host: Tensor | None = None
        self._coming: Callable[[], Tensor] | None = None
        self._flat: Tensor | None = None

    def fetch(self, back: Callable[[Tensor, torch.device], Callable[[], Tensor]]) -> None:
        """Start to copy it to the device."""
        if self._coming is None and self._flat is None and self.host is not None:
            self._coming = back(self.host, self.device)

    def get(self) -> Tensor:
        """Return it on the device, where it stays as long as a saved tensor needs it."""
        if self._flat is None:
            if self._coming is None:
                # Fake tensors have no values to copy.
                return torch.empty(self.size, dtype=self.dtype, device=self.device)
            self._flat, self._coming, self.host = self._coming(), None, None
        return self._flat


class _Sent(NamedTuple):
    """A tensor whose storage is on the host: its view of the storage, and a tensor that shares its version count."""

    piece: _Piece
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    shadow: Tensor
    version: int


class ActivationOffloader:
    """Copies saved tensors to the host in the forward pass, each storage once, and back in the backward pass.

    Args:
        device: the device of the step.
        known: tensors that stay on the device, such as parameters.
        least: storages of fewer bytes stay on the device.
    """

    def __init__(self, device: torch.device, known: Iterable[Any], least: int) -> None:
        self._device, self._least = device, max(least, 1)
        self._known = {_torch.storage_id(leaf) for leaf in known if isinstance(leaf, Tensor)}
        self._copier, self._pinned = copier_of(device), backends.of(device).pinned_memory
        # A weak reference to a storage keeps its address from being reused.
        self._pieces: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, weakref.ref[_Piece]]] = {}
        self._order: list[weakref.ref[_Piece]] = []

    def pack(self, tensor: Tensor) -> _Held | _Sent:
        """Save a tensor.

        Raises:
            TraceError: while a graph is captured.
        """
        if _torch.is_capturing():
            raise TraceError("offload: activations go to the host between operations, and a whole graph is one")
        memory = tensor.untyped_storage()
        if not self._goes(tensor, memory):
            return _Held(tensor.detach(), _torch.version_of(tensor))
        shadow = tensor.detach()
        shadow.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        piece, offset = self._piece(tensor, memory), int(tensor.storage_offset())
        return _Sent(piece, tensor.shape, tensor.stride(), offset, shadow, _torch.version_of(tensor))

    def _goes(self, tensor: Tensor, memory: torch.UntypedStorage) -> bool:
        if type(tensor) not in PLAIN or tensor.device != self._device or tensor.layout != torch.strided:
            return False
        size = memory.nbytes()
        if size < self._least or size % tensor.itemsize or _torch.storage_id(tensor) in self._known:
            return False
        return not (tensor.is_conj() or tensor.is_neg())

    def _piece(self, tensor: Tensor, memory: torch.UntypedStorage) -> _Piece:
        key = _torch.storage_id(tensor), _torch.version_of(tensor), tensor.dtype
        found = self._pieces.get(key)
        piece = found[1]() if found is not None else None
        if piece is not None:
            return piece
        flat = tensor.detach().as_strided((memory.nbytes() // tensor.itemsize,), (1,), 0)
        piece = _Piece(flat, len(self._order), tensor.device)
        if not is_abstract(flat):
            piece.host = on_host(flat, self._pinned)
            self._copier.out(flat, piece.host)
        self._pieces[key] = StorageWeakRef(memory), weakref.ref(piece)  # type: ignore[no-untyped-call]
        self._order.append(weakref.ref(piece))
        return piece

    def unpack(self, kept: _Held | _Sent) -> Tensor:
        """Return a saved tensor.

        Raises:
            LossError: when it was written in place after it was saved.
        """
        if _torch.version_of(kept.tensor if isinstance(kept, _Held) else kept.shadow) != kept.version:
            raise LossError(
                "offload: a tensor that a gradient needs was changed in place after it was computed; take the "
                "operation that is not in place (x = x.add(1) and not x.add_(1))"
            )
        if isinstance(kept, _Held):
            return kept.tensor
        kept.piece.fetch(self._copier.back)
        flat = kept.piece.get()
        if self._copier.ahead:
            # The backward pass needs the storages in reverse order.
            for reference in self._order[max(kept.piece.place - AHEAD, 0) : kept.piece.place][::-1]:
                piece = reference()
                if piece is not None:
                    piece.fetch(self._copier.back)
        return flat.as_strided(kept.shape, kept.stride, kept.offset)
