"""The loader compared with torch's `DataLoader`: the time of a shuffled and collated batch of memory-mapped tokens.

Both read the same small samples: in this process without anything between batches, in this process with a matrix
product between batches (which, as a training step would, evicts the loader's code and data from the CPU's caches), and
with two workers. Before, the samples of a whole pass are compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import ftrain as ft
from bench.rows import FAILED, RATIO, TIME, Row, measured, unmeasured
from bench.settings import Settings
from bench.stats import paired_ratios
from bench.timing import LocalRacer, interleaved

LENGTH, BATCH = 128, 32
WIDTH = 1024
TORCH, OURS, NO_DRAWS, TOKEN_FILE = (
    "DataLoader",
    "ftrain loader",
    "ftrain loader, draws = False",
    "ftrain loader, TokenFile",
)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """A dataset by hand: windows of a file of tokens."""

    def __init__(self, path: Path, draws: bool | None = None) -> None:
        self._tokens = np.load(path, mmap_mode="r")
        if draws is not None:
            self.draws = draws

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * LENGTH
        window = torch.from_numpy(self._tokens[start : start + LENGTH + 1].astype(np.int64))
        return {"tokens": window[:-1], "labels": window[1:]}


def run(settings: Settings) -> list[Row]:
    """Time the loaders in this process, without and with steps between batches, and with workers."""
    count = 4 * BATCH if settings.tiny else 512 * BATCH
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        ft.data.write_tokens(path, [np.arange(count * LENGTH + 1) * 7919 % 50_021])
        races = [(0, False), (0, True), (2, False)]
        return [row for workers, stepping in races for row in _race(path, workers, stepping, settings)]


class BetweenSteps:
    """A racer that computes a matrix product before it reads each batch; only the reading is timed."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read
        self._weight, self._inputs = torch.ones(WIDTH, WIDTH), torch.ones(BATCH, WIDTH)

    def turn(self, steps: int) -> float:
        seconds = 0.0
        for _ in range(steps):
            torch.mm(self._inputs, self._weight)
            start = time.perf_counter()
            self._read()
            seconds += time.perf_counter() - start
        return seconds


def _race(path: Path, workers: int, stepping: bool, settings: Settings) -> list[Row]:
    question = f"C10 loader, {workers} workers" + (", a step between batches" if stepping else "")
    print(question, flush=True)
    options: dict[str, Any] = {"num_workers": workers}
    loaders = {
        TORCH: DataLoader(
            Tokens(path), BATCH, shuffle=True, drop_last=True, persistent_workers=workers > 0, num_workers=workers
        ),
        OURS: ft.data.loader(Tokens(path), BATCH, **options),
        NO_DRAWS: ft.data.loader(Tokens(path, draws=False), BATCH, **options),
        TOKEN_FILE: ft.data.loader(ft.data.TokenFile(path, LENGTH), BATCH, **options),
    }
    passes = {name: _samples(loader) for name, loader in loaders.items()}
    different = [name for name, samples in passes.items() if not torch.equal(samples, passes[TORCH])]
    if different:
        return [unmeasured(question, name, FAILED, f"other samples than {TORCH}") for name in different]
    # Each turn continues where the last turn of the same loader ended, so that no turn starts workers.
    reads = {name: _endless(loader).__next__ for name, loader in loaders.items()}
    racers = {name: BetweenSteps(read) if stepping else LocalRacer(read, "cpu") for name, read in reads.items()}
    times = interleaved(racers, rounds=settings.rounds, seconds=settings.seconds)
    rows = [measured(question, name, TIME, "us", values) for name, values in times.items()]
    ratios = {name: paired_ratios(times[name], times[TORCH]) for name in (OURS, NO_DRAWS, TOKEN_FILE)}
    return rows + [
        measured(question, name, f"{RATIO}{TORCH}", "", values, interval=True) for name, values in ratios.items()
    ]


def _samples(loader: Any) -> torch.Tensor:
    """Return all samples of a pass and how often each was read, sorted: each loader has an order of its own."""
    rows = torch.cat([torch.cat([batch["tokens"], batch["labels"]], 1) for batch in loader])
    samples, counts = torch.unique(rows, dim=0, return_counts=True)
    return torch.cat([samples, counts[:, None]], 1)


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader
