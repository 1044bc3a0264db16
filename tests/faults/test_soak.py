"""Many saves and many steps: memory, descriptors and threads stay what they were."""

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
"""Bytes by which the second half of a run may be larger than the first: pages that come and go."""


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def look():
    """Bytes, descriptors, threads, and objects of Python's."""
    return [resident(), len(os.listdir("/proc/self/fd")), threading.active_count(), len(gc.get_objects())]


def alone(tell, function, directory, count):
    """Run something in a process whose own modules need not be looked through each time."""
    gc.collect()
    gc.freeze()
    function(tell, directory, count)


def saving(tell, directory, count):
    samples = []
    step, made = make(squares, ft.ema(0.9)), state()
    more = everything()
    with ft.Checkpoints(directory, every=1, keep=2) as checkpoints:
        for number in range(1, count + 1):
            made, _ = step.donating(made, batch())
            checkpoints.save(number, {"state": made, "more": more}, metrics={"loss": number / 7})
            if number % (count // SAMPLES) == 0:
                checkpoints.wait()
                gc.collect()
                samples.append(look())
    tell(samples)


def loading(tell, directory, count):
    parts = {"state": state(), "more": everything()}
    with ft.Checkpoints(directory, every=1) as checkpoints:
        checkpoints.save(1, parts)
    samples = []
    for number in range(1, count + 1):
        ft.Checkpoints(directory, every=1).latest({"state": parts["state"]})
        if number % (count // SAMPLES) == 0:
            gc.collect()
            samples.append(look())
    tell(samples)


def entering(tell, directory, count):
    """A run that is gone on with again and again: the context, the lock, the pool."""
    samples, parts = [], {"state": state()}
    for number in range(1, count + 1):
        with ft.Checkpoints(directory, every=1, keep=1, best="loss") as checkpoints:
            checkpoints.save(number, parts, metrics={"loss": float(number % 5)})
        if number % (count // SAMPLES) == 0:
            gc.collect()
            samples.append(look())
    tell(samples)


def stepping(tell, directory, count):
    """Steps alone, for the history of a `fit` grows as it says."""
    samples = []
    step = make(squares, ft.ema(0.9))
    data = ft.data.loader(ft.data.arrays({"x": torch.ones(64, 3), "y": torch.zeros(64)}), 4)
    for made in ft.iterate(step.donating, step.init({"w": torch.ones(3), "b": torch.zeros(())}), data, steps=count):
        if made.step % (count // SAMPLES) == 0:
            gc.collect()
            samples.append(look())
    tell(samples)


def fitting(tell, directory, count):
    """`fit` with all of its services; its memory and its objects grow by the history, which it returns."""
    samples = []
    step = make(squares)

    def sample(state):
        gc.collect()
        samples.append(look())
        return {"x": 0.0}

    data = ft.data.loader(ft.data.arrays({"x": torch.ones(64, 3), "y": torch.zeros(64)}), 4)
    made = step.init({"w": torch.ones(3), "b": torch.zeros(())})
    ft.fit(
        step,
        made,
        data,
        steps=count,
        evaluate=sample,
        evaluate_every=count // SAMPLES,
        checkpoints=ft.Checkpoints(directory, every=count // 20),
        progress=False,
    )
    tell(samples)


HISTORY = {"fit": 512}
"""Bytes that a step may add to what a run returns: a dict of floats of its history. Told is what it does add."""

KINDS = {
    "saves": (saving, 10_000, 20),
    "loads": (loading, 10_000, 20),
    "runs": (entering, 2_000, 20),
    "steps": (stepping, 200_000, 400),
    "fit": (fitting, 40_000, 200),
}


def growth(values):
    """By how much the least of the last quarter is above the largest of the second: nothing that comes and goes."""
    quarter = len(values) // 4
    return min(values[-quarter:]) - max(values[quarter : 2 * quarter])


def trend(values):
    """The growth from one sample to the next, as the median of all pairs: one page more is none."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((other - one) / (later - now) for (now, one), (later, other) in pairs)


@quiet_forks
@pytest.mark.parametrize("name", KINDS)
def test_nothing_grows(name, tmp_path):
    function, full, quick = KINDS[name]
    count = times(full, quick)
    with tally(f"soak: {name}") as tries:
        tries.runs = count
        samples = forked(alone, function, tmp_path, count)
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
        tries.failures += [f"{what}: {tries.note}" for what, has_grown in grown.items() if has_grown]
