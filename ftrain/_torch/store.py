"""The store of torch's process group: a table of short strings that all ranks read and write."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from ftrain._torch import private_names


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; ``(0, 1)`` without a process group."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def connect() -> Any:
    """Return the store of the process group over a new connection."""
    return _default_store().clone()


_connection = threading.local()
"""The connection of a thread (``store``), and the store that it belongs to (``of``)."""


def store() -> Any:
    """Return the store of the process group over the connection of this thread. Other threads may use it, too.

    A call that waits for a key blocks the calls of other threads, so poll for the key (`check`) instead. The connection
    is kept, since a new one takes a socket of rank 0 and a look-up of its name, which may be slow.
    """
    default = _default_store()
    if getattr(_connection, "of", lambda: None)() is not default:
        _connection.store, _connection.of = default.clone(), weakref.ref(default)
    _connection.store.set_timeout(default.timeout)
    return _connection.store


def are_processes() -> bool:
    """Whether the ranks are processes, which share a store; in tests they may be threads, or not exist."""
    dist: Any = torch.distributed
    below = _default_store()
    while isinstance(below, dist.PrefixStore):
        below = below.underlying_store
    return isinstance(below, dist.TCPStore | dist.FileStore)


def set_timeout(groups: Iterable[Any], seconds: float) -> None:
    """Set the timeout of the collectives of some groups, and of waits for messages in the store."""
    timeout, dist = timedelta(seconds=seconds), torch.distributed
    with private_names():  # Public from torch 2.15 on.
        set_of_group: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    _default_store().set_timeout(timeout)
    for group in groups:
        set_of_group(timeout, group)


def chosen_timeout(group: Any, device: torch.device) -> float | None:
    """Return the seconds after which collectives of a group on a device fail, or None for those of torch."""
    with private_names():
        usual = torch.distributed.distributed_c10d.default_pg_timeout
        # Libraries that are plugged in may have no options.
        options = getattr(group._get_backend(device), "options", None)
        seconds = usual if options is None else options._timeout
    return None if seconds == usual else float(seconds.total_seconds())


def timeout() -> timedelta:
    """Return the timeout that `set_timeout` has set last."""
    seconds: timedelta = _default_store().timeout
    return seconds


def _default_store() -> Any:
    with private_names():
        from torch.distributed.distributed_c10d import _get_default_store
    return _get_default_store()
