"""Recognize that memory ran out, and free the memory that the failed work holds."""

from __future__ import annotations

import errno
import gc
import traceback

import torch

from ftrain.backends.registry import of
from ftrain.backends.transfers import copier_of

MESSAGE_PARTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "memoryerror",
    "can't start new thread",
    "out_of_memory",
    "resource_exhausted",
    "status_alloc_failed",
    "allocation_failed",
)
"""Parts of the error messages of devices without an error class, of allocators of the host, of compilers, of threads
without memory for their stack, and of kernel libraries:
``CUBLAS_STATUS_ALLOC_FAILED``, https://docs.nvidia.com/cuda/cublas/index.html#cublasstatus-t;
``CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED``,
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-graph-library.html#cudnnstatus-t."""

AMBIGUOUS = "could not create a primitive"
"""Message of oneDNN when it has too little memory, and also when it has no implementation."""

HEADROOM = 1 << 30
"""Bytes that a host with enough memory can reserve."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host ran out of memory.

    oneDNN's message "could not create a primitive" counts only if the host cannot reserve another GiB (``ulimit -v``):
    otherwise oneDNN has no implementation, and smaller microbatches would not help.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(part in text for part in MESSAGE_PARTS) or (AMBIGUOUS in text and not _has_headroom())


def _has_headroom() -> bool:
    try:
        torch.empty(HEADROOM, dtype=torch.uint8, device=torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def release(error: BaseException, device: torch.device) -> None:
    """Free the tensors that an error keeps alive, and return the cached memory to the device."""
    current: BaseException | None = error
    while current is not None:
        # The frames of the failed call hold its tensors.
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
    gc.collect()
    # Copies to the host keep their sources alive until they are complete.
    copier_of(device).wait()
    empty_cache = of(device).empty_cache
    if empty_cache is not None:
        empty_cache()
