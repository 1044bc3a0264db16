"""Keep the tensors that autograd saves for the backward pass in host memory until they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage, nn

from ftrain import _torch, backends
from ftrain.backends.transfers import copier_of, is_abstract, on_host
from ftrain.errors import LossError, TraceError

AHEAD = 4
"""Number of storages that are copied to the device before the backward pass needs them."""

PLAIN = Tensor, nn.Parameter, _torch.FakeTensor
"""Tensor classes without behaviour of their own; tensors of other subclasses stay on the device."""


class _HostStorage:
    """One storage on the host; `index` is its position in the order in which storages were saved."""

    def __init__(self, flat: Tensor, index: int, host: Tensor | None) -> None:
        self.size, self.dtype, self.device, self.index = flat.numel(), flat.dtype, flat.device, index
        self._host = host
        self._finish_copy: Callable[[], Tensor] | None = None
        self._on_device: Tensor | None = None

    def start_copy(self, copy_back: Callable[[Tensor, torch.device], Callable[[], Tensor]]) -> None:
        """Start the copy to the device, unless it has been started."""
        if self._host is not None:
            self._finish_copy = copy_back(self._host, self.device)
            self._host = None

    def on_device(self) -> Tensor:
        """Return its elements on the device, as a 1-d tensor; they stay there as long as a saved tensor needs them."""
        if self._finish_copy is not None:
            self._on_device = self._finish_copy()
            self._finish_copy = None
        if self._on_device is None:
            # Fake tensors have no values to copy.
            return torch.empty(self.size, dtype=self.dtype, device=self.device)
        return self._on_device


class _Saved(NamedTuple):
    """A saved tensor, with its version when it was saved.

    If it is a view of a storage on the host, `tensor` is empty and only shares its version counter.
    """

    tensor: Tensor
    version: int
    storage: _HostStorage | None = None
    shape: torch.Size = torch.Size()
    stride: tuple[int, ...] = ()
    offset: int = 0


class ActivationOffloader:
    """Copies saved tensors to the host in the forward pass, each storage once, and back in the backward pass.

    The `resident` tensors, such as parameters, and storages below `min_bytes` stay on the device.
    """

    def __init__(self, device: torch.device, resident: Iterable[Any], min_bytes: int) -> None:
        self._device, self._min_bytes = device, max(min_bytes, 1)
        self._resident = {_torch.storage_id(leaf) for leaf in resident if isinstance(leaf, Tensor)}
        self._copier, self._pinned = copier_of(device), backends.of(device).pinned_memory
        # Storage on the device -> its copies, by version and dtype.
        self._copies: WeakKeyDictionary[UntypedStorage, WeakValueDictionary[tuple[int, torch.dtype], _HostStorage]] = (
            WeakKeyDictionary()
        )
        self._saved: WeakValueDictionary[int, _HostStorage] = WeakValueDictionary()
        self._count = 0

    def pack(self, tensor: Tensor) -> _Saved:
        """Return what autograd saves in place of a tensor. Raises a TraceError while a graph is captured."""
        if _torch.is_capturing():
            raise TraceError("offload: activations go to the host between operations, and a whole graph is one")
        version = _torch.version_of(tensor)
        if not self._can_offload(tensor):
            return _Saved(tensor.detach(), version)
        # Shares the version counter of the tensor, but not its memory, which can be freed.
        counter = tensor.detach()
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage = self._host_storage(tensor, version)
        return _Saved(counter, version, storage, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _can_offload(self, tensor: Tensor) -> bool:
        if type(tensor) not in PLAIN or tensor.device != self._device or tensor.layout != torch.strided:
            return False
        size = tensor.untyped_storage().nbytes()
        if size < self._min_bytes or size % tensor.itemsize or _torch.storage_id(tensor) in self._resident:
            return False
        return not (tensor.is_conj() or tensor.is_neg())

    def _host_storage(self, tensor: Tensor, version: int) -> _HostStorage:
        """Return the copy of the storage of a tensor on the host; it is made when there is none of this version."""
        memory = tensor.untyped_storage()
        copies = self._copies.setdefault(memory, WeakValueDictionary())
        storage = copies.get((version, tensor.dtype))
        if storage is None:
            flat = tensor.detach().as_strided((memory.nbytes() // tensor.itemsize,), (1,), 0)
            host = None if is_abstract(flat) else on_host(flat, self._pinned)
            if host is not None:
                self._copier.out(flat, host)
            storage = _HostStorage(flat, self._count, host)
            copies[version, tensor.dtype] = storage
            self._saved[self._count] = storage
            self._count += 1
        return storage

    def unpack(self, saved: _Saved) -> Tensor:
        """Return a saved tensor. Raises a LossError when it was changed in place after it was saved."""
        if _torch.version_of(saved.tensor) != saved.version:
            raise LossError(
                "offload: a tensor that a gradient needs was changed in place after it was computed; use the "
                "operation that is not in place (x = x.add(1) and not x.add_(1))"
            )
        if saved.storage is None:
            return saved.tensor
        saved.storage.start_copy(self._copier.back)
        flat = saved.storage.on_device()
        if self._copier.ahead:
            # The backward pass needs the storages in reverse order.
            for index in range(saved.storage.index - 1, saved.storage.index - 1 - AHEAD, -1):
                storage = self._saved.get(index)
                if storage is not None:
                    storage.start_copy(self._copier.back)
        return flat.as_strided(saved.shape, saved.stride, saved.offset)
