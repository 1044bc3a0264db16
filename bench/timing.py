"""Interleaved timing: variants take turns, so that a drift of the machine hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One result: microseconds a step at three quantiles, and the median ratio to the first variant."""

    case: str
    variant: str
    p20: float
    median: float
    p80: float
    ratio: float


def interleaved(case: str, variants: Mapping[str, Run], *, rounds: int, calls: int) -> list[Row]:
    """Time variants in turn, `calls` calls each, for so many rounds."""
    for run in variants.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    first = next(iter(variants))
    return [_row(case, name, torch.tensor(times[name]), torch.tensor(times[first])) for name in variants]


def _row(case: str, name: str, own: torch.Tensor, first: torch.Tensor) -> Row:
    low, middle, high = own.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return Row(case, name, low, middle, high, (own / first).median().item())
