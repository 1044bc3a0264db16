"""N ranks in one process: a thread for each, with collectives that exchange tensors in memory."""

import sys
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.fx import _symbolic_trace
from torch.testing._internal.distributed import multi_threaded_pg

from ftrain.parallel import stock_draws

_drawing = threading.Lock()


@contextmanager
def seeded(seed):
    """Context in which torch's generator begins at a seed and one thread draws at a time: ranks share the generator."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def run(size, function):
    """Call ``function(rank)`` on each of `size` ranks; return the results in the order of ranks.

    An error of one rank is raised here; the other ranks are then abandoned.
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

    restore = _settings_of_process()
    if size > 1:
        # Steps seed torch's generator and restore it. Threads share it, so it would seem to have advanced.
        stock_draws._generator_state = lambda device: torch.zeros(())
    multi_threaded_pg.ProcessLocalGroup.pg_name = property(_name_of_group)
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
        restore()
    if errors:
        raise errors[0]
    return results


def _settings_of_process():
    """Return a function that restores the settings of the process that ranks change: threads may restore them late."""
    excepthook = sys.excepthook  # `init_process_group` wraps it, to add the rank to messages.
    generator_state = stock_draws._generator_state
    precision, is_deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    # When ranks trace at once, the last one may leave this flag set. From torch 2.15 on each thread has its own.
    is_tracing = getattr(_symbolic_trace, "_is_fx_tracing_flag", False)

    def restore():
        sys.excepthook, stock_draws._generator_state = excepthook, generator_state
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(is_deterministic)
        _symbolic_trace._is_fx_tracing_flag = is_tracing

    return restore


def _name_of_group(group):
    """Return the name of a group, also while it is destroyed, when its world no longer has the name."""
    group.last_name = group._world().pg_names.get(group, getattr(group, "last_name", ""))
    return group.last_name
