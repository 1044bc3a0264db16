"""N ranks as processes that are forked from the test, so that they need not load torch; gloo connects them."""

import os
import signal
import socket
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.faults.forks import Child


@contextmanager
def started(size, function, *given):
    """Context of a child for each rank, which calls ``function(tell, rank, *given)``; all have ended after it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As a launcher does, so that it outlives every rank.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    children = [Child(_rank, rank, size, port, function, *given) for rank in range(size)]
    try:
        yield children
    finally:
        for child in children:
            child.signal(signal.SIGKILL)
            child.end()
        del store


def _rank(tell, rank, size, port, function, *given):
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(addresses, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    return function(tell, rank, *given)
