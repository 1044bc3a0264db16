"""N ranks in one process: a thread for each, whose collectives exchange tensors in memory."""

import sys
import threading

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg


def run(size, function):
    """Call ``function(rank)`` on each of `size` ranks; return the results in the order of ranks.

    What one of them raises is raised here; the others are then abandoned.
    """
    results, errors = [None] * size, []

    def work(rank):
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    excepthook = sys.excepthook  # To which `init_process_group` adds the rank.
    multi_threaded_pg._install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        store = dist.HashStore()
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()
        sys.excepthook = excepthook
    if errors:
        raise errors[0]
    return results
