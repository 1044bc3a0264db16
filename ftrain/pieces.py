"""When memory runs out: telling that it has, letting go of it, and batches in smaller pieces."""

from __future__ import annotations

import errno
import gc
import traceback
from typing import Any

import torch

from ftrain import backends, tree
from ftrain.errors import OptionError
from ftrain.transfers import copier_of
from ftrain.types import PyTree

ON_OOM = RAISE, SPLIT = "raise", "split"
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


def require_on_oom(function: str, on_oom: str) -> None:
    """Check what is to be done when memory runs out.

    Raises:
        OptionError: for anything but ``"raise"`` and ``"split"``.
    """
    if on_oom not in ON_OOM:
        raise OptionError(f"{function}: on_oom is {on_oom!r}; choices are {', '.join(ON_OOM)}")


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
        torch.empty(HEADROOM, dtype=torch.uint8, device=tree.HOST)
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
    empty_cache = backends.of(device).empty_cache
    if empty_cache is not None:
        empty_cache()


def most_pieces(batch: PyTree) -> int:
    """In how many pieces a batch can be cut: its examples, or 1 when its tensors do not say how many there are."""
    lengths = {leaf.shape[0] for leaf in tree.leaves(batch) if _has_axis(leaf)}
    return max(1, *lengths) if len(lengths) == 1 else 1


def cut(batch: PyTree, pieces: int) -> list[PyTree]:
    """Cut every tensor of a batch along its first axis, without copying, into as many pieces as it allows.

    They differ by one example at most. 0-d tensors and other leaves go to every piece.

    >>> [len(piece) for piece in cut(torch.zeros(5, 2), 2)]
    [3, 2]
    """
    pieces = min(pieces, most_pieces(batch))
    if pieces == 1:
        return [batch]
    found, spec = tree.flatten(batch)
    columns = [leaf.tensor_split(pieces) if _has_axis(leaf) else (leaf,) * pieces for leaf in found]
    return [tree.unflatten(spec, [column[index] for column in columns]) for index in range(pieces)]


def _has_axis(leaf: Any) -> bool:
    return tree.is_tensor(leaf) and leaf.ndim > 0
