"""How tensors travel from a worker process: small ones by value, within the message.

Torch moves each tensor into shared memory of its own and sends a file descriptor, which takes about half a millisecond
whatever its size, and a place in ``/dev/shm`` and in the table of open files. A copy of a few kilobytes takes less.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.data.fetched_batch import FetchedBatch

MAX_BYTES = 1 << 19
"""Up to this size a tensor is sent by value. Copies of more take as long as a file descriptor."""


def by_value(fetched: FetchedBatch) -> FetchedBatch:
    """Return a batch whose small tensors are pickled by value; what it unpickles to is the batch itself.

    Tensors that share memory, as views of one another do, are left to torch, which keeps that they share it; so is what
    is not a plain, contiguous tensor on the host.
    """
    leaves, structure = tree.flatten(fetched.batch)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    storages = Counter(map(_storage, tensors.values()))
    small = {
        key: _Value(_to_bytes(tensor), tensor.dtype, tensor.shape)
        for key, tensor in tensors.items()
        if _is_plain(tensor) and tensor.nbytes <= MAX_BYTES and storages[_storage(tensor)] == 1
    }
    if not small:
        return fetched
    return fetched._replace(batch=tree.unflatten(structure, [small.get(id(leaf), leaf) for leaf in leaves]))


def _storage(tensor: Tensor) -> int | None:
    return _torch.storage_id(tensor) if tensor.layout is torch.strided else None


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device == tree.HOST
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
    )


class _Value:
    """What a tensor holds now; pickles as its bytes, and unpickles as a tensor."""

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_bytes, self._fields


def _to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the host, for which nothing waits."""
    return tensor.resolve_conj().resolve_neg().view(-1).view(torch.uint8).numpy().tobytes()


def _from_bytes(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    # Copied, so that it lies in memory as any other tensor does: kernels may add up in another order elsewhere.
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone()
