"""N ranks as processes that are forked from the test, so that they need not load torch; gloo connects them."""

import os
import signal
import socket
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tests.faults.forks import Child


@contextmanager
def started(size, function, *args):
    """Context of a process for each rank, which calls ``function(tell, rank, *args)``. Its end ends all of them."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listening.getsockname()[1]
    children = [Child(_rank, rank, size, listening, function, *args) for rank in range(size)]
    try:
        # The store is in this process, as in a launcher, so that it outlives every rank. It is made after the forks:
        # its thread resolves host names, and a child forked meanwhile would wait forever for the resolver's lock.
        with_socket = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}
        _store = dist.TCPStore("127.0.0.1", port, **with_socket)
        yield children
    finally:
        for child in children:
            child.signal(signal.SIGKILL)
            child.wait()


def _rank(tell, rank, size, listening, function, *args):
    port = listening.getsockname()[1]
    listening.close()
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(addresses, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    return function(tell, rank, *args)
