"""Running out of memory: telling that it happened, and releasing what the failed work held."""

from __future__ import annotations

import errno
import gc
import traceback

import torch

from ftrain.backends.registry import of
from ftrain.backends.transfers import copier_of

TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "memoryerror",
    "can't start new thread",
    "out_of_memory",
    "resource_exhausted",
    "status_alloc_failed",
)
"""What devices say that have no class of their own for it, the allocators of the host, compilers of the error that has
stopped them, threads that find no memory for their stack, and libraries of kernels: ``CUBLAS_STATUS_ALLOC_FAILED``,
https://docs.nvidia.com/cuda/cublas/index.html#cublasstatus-t."""


UNSAID = "could not create a primitive"
"""What oneDNN says whatever it lacks: memory, or an implementation."""


HEADROOM = 1 << 30
"""Bytes that a host can give, untouched, which is not short of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left.

    That oneDNN could not create a primitive says so only if the host cannot give a further GiB of addresses (a limit
    such as ``ulimit -v``, or no overcommitment): else it is a fault of another kind, which smaller pieces do not mend.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(each in text for each in TEXTS) or (UNSAID in text and not _has_headroom())


def _has_headroom() -> bool:
    try:
        torch.empty(HEADROOM, dtype=torch.uint8, device=torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def release(error: BaseException, device: torch.device) -> None:
    """Let go of all that hangs on an error, and give the memory back to the device."""
    found: BaseException | None = error
    while found is not None:
        # The frames of what has failed hold its tensors.
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
    gc.collect()
    # What was on its way to the host is held until it is there.
    copier_of(device).wait()
    empty_cache = of(device).empty_cache
    if empty_cache is not None:
        empty_cache()
