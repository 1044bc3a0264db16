"""Threads that seed and restore torch's generator at the same time."""

import subprocess
import sys

# Finalizers run while torch holds the lock of its generator, and let Python change the thread there.
THREADS = """
import gc, sys, threading
from ftrain.backends.generators import seeded

sys.setswitchinterval(1e-6)
gc.set_threshold(20)

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

threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_do_not_wait_for_each_other_forever():
    subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=120)
