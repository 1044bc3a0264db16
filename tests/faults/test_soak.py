"""Many saves and many steps: memory, descriptors and threads do not grow."""

import gc
import itertools
import os
import statistics
import threading

import pytest
import torch

import ftrain as ft
from tests.faults.figures import tally, times
from tests.faults.forks import forked, quiet_forks
from tests.faults.problem import batch, make, squares
from tests.faults.specimens import everything, state

SAMPLES = times(40, 20)
SLACK = 4 * 2**20
"""Bytes by which the memory may grow without a leak: the allocator keeps some pages."""


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure():
    """Return the resident bytes, and the numbers of descriptors, threads and objects of Python."""
    return [resident(), len(os.listdir("/proc/self/fd")), threading.active_count(), len(gc.get_objects())]


def with_frozen_modules(send, function, directory, count):
    """Call a function after freezing all objects of the modules, so that each collection is fast."""
    gc.collect()
    gc.freeze()
    function(send, directory, count)


def saving(send, directory, count):
    samples = []
    step, new_state = make(squares, ft.ema(0.9)), state()
    extra = everything()
    with ft.Checkpoints(directory, every=1, keep=2) as checkpoints:
        for number in range(1, count + 1):
            new_state, _ = step.donating(new_state, batch())
            checkpoints.save(number, {"state": new_state, "more": extra}, metrics={"loss": number / 7})
            if number % (count // SAMPLES) == 0:
                checkpoints.wait()
                gc.collect()
                samples.append(measure())
    send(samples)


def loading(send, directory, count):
    parts = {"state": state(), "more": everything()}
    with ft.Checkpoints(directory, every=1) as checkpoints:
        checkpoints.save(1, parts)
    samples = []
    for number in range(1, count + 1):
        ft.Checkpoints(directory, every=1).latest({"state": parts["state"]})
        if number % (count // SAMPLES) == 0:
            gc.collect()
            samples.append(measure())
    send(samples)


def entering(send, directory, count):
    """Open a directory again and again: the context, the lock, the thread pool."""
    samples, parts = [], {"state": state()}
    for number in range(1, count + 1):
        with ft.Checkpoints(directory, every=1, keep=1, best="loss") as checkpoints:
            checkpoints.save(number, parts, metrics={"loss": float(number % 5)})
        if number % (count // SAMPLES) == 0:
            gc.collect()
            samples.append(measure())
    send(samples)


def stepping(send, directory, count):
    """Make steps without `fit`, whose history grows."""
    samples = []
    step = make(squares, ft.ema(0.9))
    data = ft.data.loader(ft.data.arrays({"x": torch.ones(64, 3), "y": torch.zeros(64)}), 4)
    for new_state in ft.iterate(
        step.donating, step.init({"w": torch.ones(3), "b": torch.zeros(())}), data, steps=count
    ):
        if new_state.step % (count // SAMPLES) == 0:
            gc.collect()
            samples.append(measure())
    send(samples)


def fitting(send, directory, count):
    """Run `fit` with evaluations and checkpoints; its memory grows by the history that it returns."""
    samples = []
    step = make(squares)

    def sample(state):
        gc.collect()
        samples.append(measure())
        return {"x": 0.0}

    data = ft.data.loader(ft.data.arrays({"x": torch.ones(64, 3), "y": torch.zeros(64)}), 4)
    new_state = step.init({"w": torch.ones(3), "b": torch.zeros(())})
    ft.fit(
        step,
        new_state,
        data,
        steps=count,
        evaluate=sample,
        evaluate_every=count // SAMPLES,
        checkpoints=ft.Checkpoints(directory, every=count // 20),
        progress=False,
    )
    send(samples)


HISTORY = {"fit": 512}
"""The largest number of bytes that a step may add: its record in the history, a dict of floats."""

WORKLOADS = {
    "saves": (saving, 10_000, 20),
    "loads": (loading, 10_000, 20),
    "runs": (entering, 2_000, 20),
    "steps": (stepping, 200_000, 400),
    "fit": (fitting, 40_000, 200),
}


def growth(values):
    """Return by how much the minimum of the last quarter is above the maximum of the second; fluctuations are less."""
    quarter = len(values) // 4
    return min(values[-quarter:]) - max(values[quarter : 2 * quarter])


def trend(values):
    """Return the growth per sample, as the median of the slopes of all pairs (the Theil-Sen estimator)."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median(
        (second - first) / (second_at - first_at) for (first_at, first), (second_at, second) in pairs
    )


@quiet_forks
@pytest.mark.parametrize("name", WORKLOADS)
def test_memory_descriptors_threads_and_objects_do_not_grow(name, tmp_path):
    function, full, quick = WORKLOADS[name]
    count = times(full, quick)
    with tally(f"soak: {name}") as tries:
        tries.runs = count
        samples = forked(with_frozen_modules, function, tmp_path, count)
        memory, descriptors, threads, objects = (growth(column) for column in zip(*samples, strict=True))
        slope = trend([sample[0] for sample in samples]) / (count / SAMPLES)
        returned = HISTORY.get(name, 0) * count // 2
        tries.note = f"{slope:+.1f} bytes each, {descriptors:+} descriptors, {threads:+} threads, {objects:+} objects"
        grown = {
            "memory": memory > SLACK + returned,
            "descriptors": descriptors > 0,
            "threads": threads > 0,
            "objects": objects > 100 + (count // 2 if returned else 0),
        }
        tries.failures += [f"{resource}: {tries.note}" for resource, has_grown in grown.items() if has_grown]
