"""Checkpoints of 1 GB: the time to save and to load, the memory of a save, and how long an asynchronous save blocks.

Also the time to save a run of which 1 GB is frozen.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from bench.memory import peak_increase
from bench.rows import FAILED, RATIO, TIME, Row, measured, unmeasured
from bench.saving import FORMATS, OURS, UNSYNCED, Format, State, make_state, remove
from bench.settings import Settings
from bench.stats import paired_ratios
from ftrain.checkpoint import Checkpoints
from ftrain.types import TrainState

SAVE, LOAD, ASYNC = "C7 save, 1 GB", "C7 load, 1 GB", "C7 asynchronous save, 1 GB"
TUNED = "C7 save of what is trained beside 1 GB that is frozen"
LATER, ALONE, WHOLE = "a later save of a run", "torch.save of what is trained", "torch.save of all"
ROUNDS = 5


def run(settings: Settings) -> list[Row]:
    """Time saving and loading in turns, then an asynchronous save, then the saves of a fine-tuning run."""
    print(SAVE, flush=True)
    state = make_state(10**6 if settings.tiny else 10**9)
    size = sum(leaf.nbytes for leaf in state.values())
    rounds = 1 if settings.smoke else ROUNDS
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as scratch:
        rows = _raced(state, size, Path(scratch), rounds)
        return rows + _asynchronous(state, Path(scratch), rounds) + _fine_tuned(state, Path(scratch), rounds)


def _raced(state: State, size: int, folder: Path, rounds: int) -> list[Row]:
    saves: dict[str, list[float]] = {name: [] for name in FORMATS}
    loads: dict[str, list[float]] = {name: [] for name in FORMATS}
    path = folder / "saved"
    # Nothing of this is timed: it fills caches and imports modules.
    different = [name for name, file_format in FORMATS.items() if not _loads_what_it_saves(file_format, state, path)]
    if different:
        return [unmeasured(LOAD, name, FAILED, "it loads other tensors than it has saved") for name in different]
    for _ in range(rounds):
        for name, file_format in FORMATS.items():
            saves[name].append(timed(partial(file_format.save, state, path)))
            loads[name].append(timed(partial(file_format.load, path, state)))
            remove(path)
    del loads[UNSYNCED]
    rows = _rows(SAVE, saves, size) + _rows(LOAD, loads, size)
    nbytes = peak_increase(lambda: FORMATS[OURS].save(state, path))
    return [*rows, measured(SAVE, OURS, "memory beyond the state", "MB", [nbytes / 1e6])]


def _loads_what_it_saves(file_format: Format, state: State, path: Path) -> bool:
    file_format.save(state, path)
    loaded = file_format.load(path, state)
    remove(path)
    return loaded.keys() == state.keys() and all(torch.equal(loaded[name], leaf) for name, leaf in state.items())


def _rows(question: str, times: dict[str, list[float]], size: int) -> list[Row]:
    rows = []
    for name, values in times.items():
        rows.append(measured(question, name, TIME, "us", [1e6 * value for value in values]))
        rows.append(measured(question, name, "throughput", "MB/s", [size / 1e6 / value for value in values]))
        if name != OURS:
            rows.append(
                measured(question, OURS, f"{RATIO}{name}", "", paired_ratios(times[OURS], values), interval=True)
            )
    return rows


def _asynchronous(state: State, folder: Path, rounds: int) -> list[Row]:
    blocked, whole, copied = [], [], []
    with Checkpoints(folder / "run", every=1, keep=1) as checkpoints:
        for step in range(rounds + 1):
            copied.append(timed(lambda: {name: leaf.clone() for name, leaf in state.items()}))
            start = time.perf_counter()
            checkpoints.save(step, {"state": state})
            blocked.append(time.perf_counter() - start)
            checkpoints.wait()
            whole.append(time.perf_counter() - start)
    durations = {"the call": blocked, "until it is on the disk and verified": whole, "a copy by clone()": copied}
    rows = [
        measured(ASYNC, name, TIME, "us", [1e6 * value for value in values[1:]]) for name, values in durations.items()
    ]
    ratio = paired_ratios(blocked[1:], copied[1:])
    return [*rows, measured(ASYNC, "the call", f"{RATIO}a copy by clone()", "", ratio, interval=True)]


def _fine_tuned(frozen: State, folder: Path, rounds: int) -> list[Row]:
    """Time the later saves of a run whose base is frozen, and `torch.save` of the trained part and of all."""
    trained = {name: torch.randn(8, leaf.shape[-1]) for name, leaf in frozen.items()}
    moments = {name: [torch.zeros_like(leaf), torch.zeros_like(leaf)] for name, leaf in trained.items()}
    state = TrainState(torch.tensor(1), trained, frozen, {}, moments, {}, torch.tensor([0, 0]))
    times: dict[str, list[float]] = {LATER: [], ALONE: [], WHOLE: []}
    with Checkpoints(folder / "tuned", every=1, keep=1, async_=False) as checkpoints:
        first = timed(lambda: checkpoints.save(0, {"state": state}))
        for step in range(1, rounds + 1):
            times[LATER].append(timed(partial(checkpoints.save, step, {"state": state})))
            for name, content in ((ALONE, (trained, moments)), (WHOLE, (trained, moments, frozen))):
                times[name].append(timed(partial(torch.save, content, folder / "tuned.pt")))
                remove(folder / "tuned.pt")
    rows = [measured(TUNED, name, TIME, "us", [1e6 * value for value in values]) for name, values in times.items()]
    rows.append(measured(TUNED, "the first save of a run", TIME, "us", [1e6 * first]))
    return [
        *rows,
        *(
            measured(TUNED, LATER, f"{RATIO}{name}", "", paired_ratios(times[LATER], times[name]), interval=True)
            for name in (ALONE, WHOLE)
        ),
    ]


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
