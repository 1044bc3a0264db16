"""The store of torch's process group: a table of short texts that all ranks read and write."""

from __future__ import annotations

from typing import Any

import torch

from ftrain._torch import private_names


def rank_and_size() -> tuple[int, int]:
    """Return the number of this rank and how many there are; ``(0, 1)`` without a process group."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def store() -> Any:
    """Return the store of the process group over a connection of its own."""
    with private_names():
        from torch.distributed.distributed_c10d import _get_default_store
    default: Any = _get_default_store()
    return default.clone()
