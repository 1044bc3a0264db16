"""Messages in which a worker process sends its batches, with the values of small tensors.

torch would send a file descriptor of shared memory for each tensor, which takes half a millisecond for any size.
"""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.data.fetched_batch import FetchedBatch, read_error

MAX_BYTES = 1 << 19
"""The largest number of bytes of a tensor whose values are sent; to copy more takes as long as a file descriptor."""


def to_message(fetched: FetchedBatch) -> bytes:
    """Return the message that a worker sends: the pickle of a batch, or of the error if it cannot be pickled."""
    try:
        return _pickled(fetched)
    except Exception as error:
        failure = read_error("a batch cannot be sent from its worker", error)
        return _pickled(FetchedBatch(fetched.position, error=failure))


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ByValuePickler(buffer).dump(value)
    return buffer.getvalue()


class _ByValuePickler(ForkingPickler):
    """Pickles as torch does between processes, but pickles the bytes of small plain tensors.

    Tensors that share memory share it again after unpickling.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self._memories: dict[int, Tensor] = {}
        """The memory of each pickled tensor, as a tensor of bytes by the id of its storage; each is pickled once."""

    def reducer_override(self, value: Any) -> Any:
        """Return the function and arguments that rebuild a small tensor, or NotImplemented for the default."""
        if type(value) is not Tensor or not _is_small(value):
            return NotImplemented
        value = value.resolve_conj().resolve_neg()
        bytes_of_memory = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        memory = self._memories.setdefault(_torch.storage_id(value), bytes_of_memory)
        if value is memory:
            return _from_bytes, (_to_bytes(value),)
        return _view, (memory, value.dtype, value.storage_offset(), value.size(), value.stride())


def _is_small(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor are sent: it is dense, on the host, without a gradient, and at most `MAX_BYTES`."""
    return (
        tensor.device == tree.HOST
        and tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() <= MAX_BYTES
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_quantized)
    )


def _to_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor on the host, without waiting."""
    return tensor.numpy().tobytes()


def _from_bytes(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    # A clone has the alignment of other tensors. With another alignment, kernels may sum in another order.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()


def _view(memory: Tensor, dtype: torch.dtype, offset: int, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, size, stride)
