"""How batches are sent from a worker process: small tensors by value, within the message.

Torch moves the memory of each tensor into shared memory and sends a file descriptor, which takes about half a
millisecond whatever its size, and a place in ``/dev/shm`` and in the table of open files. A copy of a few kilobytes
takes less.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.data.fetched_batch import FetchedBatch, ReadError

MAX_BYTES = 1 << 19
"""Up to this size the memory of a tensor is sent by value. Copies of more take as long as a file descriptor."""


def to_message(fetched: FetchedBatch) -> Message:
    """Return the message in which a worker sends a batch, as it is now; it is received as a `FetchedBatch`."""
    try:
        return Message(_pickled(fetched))
    except Exception as error:
        read_error = ReadError.from_exception("a batch cannot be sent from its worker", error)
        return Message(_pickled(FetchedBatch(fetched.position, error=read_error)))


class Message:
    """A pickled object that another process receives unpickled."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._pickled,)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ByValuePickler(buffer).dump(value)
    return buffer.getvalue()


class _ByValuePickler(ForkingPickler):
    """Pickles as torch's processes do, except for small plain tensors; tensors that shared memory still share it."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self._memories: dict[int, _Memory] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is rebuilt, or that it is pickled as usual."""
        if type(value) is not Tensor or not _is_small(value):
            return NotImplemented
        value = value.resolve_conj().resolve_neg()
        memory = self._memories.setdefault(_torch.storage_id(value), _Memory(value))
        return _view, (memory, value.dtype, value.storage_offset(), value.size(), value.stride())


def _is_small(tensor: Tensor) -> bool:
    return (
        tensor.device == tree.HOST
        and tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() <= MAX_BYTES
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
    )


class _Memory:
    """Pickles as the bytes of a tensor's memory, and unpickles as a tensor of these bytes."""

    def __init__(self, owner: Tensor) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(owner.untyped_storage())

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_bytes, (_to_bytes(self._bytes),)


def _to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the host, without waiting."""
    return tensor.numpy().tobytes()


def _from_bytes(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    # Copied, so that it is aligned as any other tensor is: otherwise kernels may add up in another order.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def _view(memory: Tensor, dtype: torch.dtype, offset: int, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, size, stride)
