"""Threads that seed and restore torch's generator at the same time."""

import gc
import sys
import threading

from ftrain.backends.generators import seeded
from tests.faults.forks import Child, quiet_forks


class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        sum(range(50))


def work():
    for seed in range(3000):
        Cycle()
        with seeded(seed):
            pass


def in_threads(tell):
    # Finalizers run while torch holds the lock of its generator, and let Python change the thread there.
    sys.setswitchinterval(1e-6)
    gc.freeze()
    gc.set_threshold(20)
    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@quiet_forks
def test_threads_do_not_wait_for_each_other_forever():
    assert Child(in_threads).end(patience=120) == 0
