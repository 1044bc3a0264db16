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
"""Number of storages that are copied ahead of the one that the backward pass needs."""

PLAIN = Tensor, nn.Parameter, _torch.FakeTensor
"""Tensor classes without behaviour of their own; tensors of other subclasses stay on the device."""


class _Resident(NamedTuple):
    """A tensor that stays on the device, and its version when it was saved."""

    tensor: Tensor
    version: int


class _HostStorage:
    """One storage, on the host; `index` is its place in the order in which storages were saved."""

    def __init__(self, flat: Tensor, index: int, device: torch.device) -> None:
        self.size, self.dtype, self.device, self.index = flat.numel(), flat.dtype, device, index
        self.host: Tensor | None = None
        self._finish_copy: Callable[[], Tensor] | None = None
        self._on_device: Tensor | None = None

    def start_copy(self, back: Callable[[Tensor, torch.device], Callable[[], Tensor]]) -> None:
        """Start the copy to the device, unless it has been started."""
        if self._finish_copy is None and self._on_device is None and self.host is not None:
            self._finish_copy = back(self.host, self.device)

    def on_device(self) -> Tensor:
        """Return its elements on the device, where they stay as long as a saved tensor needs them."""
        if self._on_device is None:
            if self._finish_copy is None:
                # Fake tensors have no values to copy.
                return torch.empty(self.size, dtype=self.dtype, device=self.device)
            self._on_device, self._finish_copy, self.host = self._finish_copy(), None, None
        return self._on_device


class _Offloaded(NamedTuple):
    """A tensor whose storage is on the host: its view of the storage, and a tensor that shares its version count."""

    storage: _HostStorage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    shadow: Tensor
    version: int


class ActivationOffloader:
    """Copies saved tensors to the host in the forward pass, each storage once, and back in the backward pass.

    Args:
        device: the device of the step.
        resident: tensors that stay on the device, such as parameters.
        min_bytes: smaller storages stay on the device.
    """

    def __init__(self, device: torch.device, resident: Iterable[Any], min_bytes: int) -> None:
        self._device, self._min_bytes = device, max(min_bytes, 1)
        self._resident = {_torch.storage_id(leaf) for leaf in resident if isinstance(leaf, Tensor)}
        self._copier, self._pinned = copier_of(device), backends.of(device).pinned_memory
        # A weak reference to a storage keeps its address from being reused.
        self._storages: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, weakref.ref[_HostStorage]]] = {}
        self._order: list[weakref.ref[_HostStorage]] = []

    def pack(self, tensor: Tensor) -> _Resident | _Offloaded:
        """Save a tensor.

        Raises:
            TraceError: while a graph is captured.
        """
        if _torch.is_capturing():
            raise TraceError("offload: activations go to the host between operations, and a whole graph is one")
        memory = tensor.untyped_storage()
        if not self._is_offloaded(tensor, memory):
            return _Resident(tensor.detach(), _torch.version_of(tensor))
        shadow = tensor.detach()
        shadow.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage, offset = self._host_storage(tensor, memory), int(tensor.storage_offset())
        return _Offloaded(storage, tensor.shape, tensor.stride(), offset, shadow, _torch.version_of(tensor))

    def _is_offloaded(self, tensor: Tensor, memory: torch.UntypedStorage) -> bool:
        if type(tensor) not in PLAIN or tensor.device != self._device or tensor.layout != torch.strided:
            return False
        size = memory.nbytes()
        if size < self._min_bytes or size % tensor.itemsize or _torch.storage_id(tensor) in self._resident:
            return False
        return not (tensor.is_conj() or tensor.is_neg())

    def _host_storage(self, tensor: Tensor, memory: torch.UntypedStorage) -> _HostStorage:
        key = _torch.storage_id(tensor), _torch.version_of(tensor), tensor.dtype
        storage = self._storages[key][1]() if key in self._storages else None
        if storage is not None:
            return storage
        flat = tensor.detach().as_strided((memory.nbytes() // tensor.itemsize,), (1,), 0)
        storage = _HostStorage(flat, len(self._order), tensor.device)
        if not is_abstract(flat):
            storage.host = on_host(flat, self._pinned)
            self._copier.out(flat, storage.host)
        self._storages[key] = StorageWeakRef(memory), weakref.ref(storage)  # type: ignore[no-untyped-call]
        self._order.append(weakref.ref(storage))
        return storage

    def unpack(self, saved: _Resident | _Offloaded) -> Tensor:
        """Return a saved tensor.

        Raises:
            LossError: when it was written in place after it was saved.
        """
        if _torch.version_of(saved.tensor if isinstance(saved, _Resident) else saved.shadow) != saved.version:
            raise LossError(
                "offload: a tensor that a gradient needs was changed in place after it was computed; take the "
                "operation that is not in place (x = x.add(1) and not x.add_(1))"
            )
        if isinstance(saved, _Resident):
            return saved.tensor
        saved.storage.start_copy(self._copier.back)
        flat = saved.storage.on_device()
        if self._copier.ahead:
            # The backward pass needs the storages in reverse order.
            index = saved.storage.index
            for reference in self._order[max(index - AHEAD, 0) : index][::-1]:
                storage = reference()
                if storage is not None:
                    storage.start_copy(self._copier.back)
        return flat.as_strided(saved.shape, saved.stride, saved.offset)
