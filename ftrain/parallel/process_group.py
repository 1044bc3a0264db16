"""Join the ranks that a launcher has started into one process group, also when it starts them again."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ftrain import backends, tree
from ftrain.errors import OptionError, RankError, warn

EXCEPTION = "exception_dump"
"""The key, without its prefix, that torch's ProcessGroupNCCL writes into a store when a collective has failed
(``kStoreDumpKey`` in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp)."""

SIZE_VARIABLES = "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"
"""Environment variables with the number of processes that a launcher (torchrun, SLURM, Open MPI) has started."""

PAUSE = 0.01
"""Seconds after which rank 0 looks for other ranks again."""


def join(timeout: float) -> None:
    """Make the process group of all ranks, if there is none; its collectives fail after `timeout` seconds.

    The group is destroyed at the end of the program.
    """
    if dist.is_initialized():
        return
    _initialise(timeout)
    at_exit(_destroy, weakref.ref(dist.group.WORLD))


def at_exit(function: Callable[[Any], None], argument: Any) -> None:
    """Call a function of process groups at the end of the program; the last one registered is called first.

    It is not called after an error: other ranks may be in a collective, and it could wait for them. Nor in a forked
    process.
    """
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process and getattr(sys, "last_value", None) is None:
            function(argument)

    atexit.register(call)


def _destroy(group: Callable[[], Any]) -> None:
    """Destroy a process group, as torch asks, unless the program has done so."""
    if dist.is_initialized() and group() is dist.group.WORLD:
        dist.destroy_process_group()


def _initialise(timeout: float) -> None:
    # The functions of this module, which DTensor imports, have the default group as a default argument: imported later,
    # they would keep the group and its threads alive after it is destroyed.
    importlib.import_module("torch.distributed.nn.functional")
    backend = backends.default()
    if "RANK" not in os.environ:
        _warn_if_others_started()
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend.distributed, store=store, rank=0, world_size=1)
        return
    if backend.device.type != tree.HOST.type:
        _set_device(torch.get_device_module(backend.device))
    limit = timedelta(seconds=timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend.distributed, timeout=limit)
        return
    # When torchrun restarts ranks it keeps its store, which still has the addresses of the ranks that have ended. Its
    # count of restarts does not tell the starts apart, because each node counts only its own failures.
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launcher_store = dist.TCPStore(address, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    prefix = name_of_start(launcher_store, rank, size, timeout)
    prefixed = dist.PrefixStore(prefix, launcher_store)  # type: ignore[attr-defined]
    dist.init_process_group(backend.distributed, store=prefixed, rank=rank, world_size=size, timeout=limit)


def _warn_if_others_started() -> None:
    """Warn if a launcher has started several processes without RANK, so that each trains alone."""
    # No error: a shell within an allocation of several tasks has these variables too.
    for name in SIZE_VARIABLES:
        if os.environ.get(name, "").isdecimal() and int(os.environ[name]) > 1:
            warn(
                f"mesh: {name} is {os.environ[name]}, and RANK is not set: this process trains alone, as each of the "
                "others does. To train together, start them with torchrun, or set RANK, LOCAL_RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT for each"
            )
            return


def _set_device(module: Any) -> None:
    """Set the current device to that of this rank on its node; a process that sees only one device takes that.

    Raises an OptionError if the node has fewer devices than ranks.
    """
    count = module.device_count()
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank and 1 < count <= int(local_rank):
        raise OptionError(
            f"mesh: LOCAL_RANK is {local_rank}, and this process sees {count} devices; each rank needs one of its own: "
            f"start at most {count} on this node (torchrun --nproc-per-node={count})"
        )
    module.set_device(int(local_rank or os.environ["RANK"]) % max(count, 1))


def name_of_start(launcher_store: Any, rank: int, size: int, seconds: float) -> str:
    """Return a name that all ranks of this start share, and that no other start has; waits for all ranks.

    The store may still hold keys of earlier starts. So each rank asks rank 0 with a key that is unique, and only a rank
    0 that runs now answers, with the name of this start. Raises a RankError that names a rank that does not come.
    """
    unique = f"ftrain/start/{uuid.uuid4().hex}"
    if rank == 0:
        _answer_requests(launcher_store, unique, size, seconds)
        return unique
    launcher_store.set(_request_key(rank), unique)
    try:
        start = launcher_store.get(unique).decode()
    except dist.DistStoreError as error:
        raise RankError(f"mesh: rank 0 did not join within {seconds:g} seconds; see its log") from error
    launcher_store.set(_joined_key(start, rank), "")
    try:
        launcher_store.wait([_joined_key(start, 0)])
    except dist.DistStoreError as error:
        raise _not_joined(launcher_store, start, range(size), seconds) from error
    return str(start)


def _answer_requests(launcher_store: Any, start: str, size: int, seconds: float) -> None:
    """Give the name of a start to each rank that asks, until all ranks have it."""
    absent = [*range(1, size)]
    waited = 0.0
    while absent := [rank for rank in absent if not launcher_store.check([_joined_key(start, rank)])]:
        if waited > seconds:
            raise _not_joined(launcher_store, start, absent, seconds)
        for rank in absent:
            if launcher_store.check([_request_key(rank)]):
                # This may be the request of an earlier start, of which no rank reads the answer.
                launcher_store.set(launcher_store.get(_request_key(rank)).decode(), start)
        threading.Event().wait(PAUSE)
        waited += PAUSE
    # NCCL's watchdog leaves this key behind, and would end the ranks of this start when it reads it.
    launcher_store.delete_key(EXCEPTION)
    launcher_store.set(_joined_key(start, 0), "")


def _request_key(rank: int) -> str:
    return f"ftrain/asks/{rank}"


def _joined_key(start: str, rank: int) -> str:
    return f"{start}/came/{rank}"


def _not_joined(launcher_store: Any, start: str, ranks: Iterable[int], seconds: float) -> RankError:
    absent = [str(rank) for rank in ranks if rank and not launcher_store.check([_joined_key(start, rank)])]
    return RankError(
        f"mesh: rank {', '.join(absent) or 0} did not join within {seconds:g} seconds; see the log of each rank"
    )
