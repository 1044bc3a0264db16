"""Statistics of measurements: quantiles, ratios and differences of pairs, and the confidence interval of a median."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

RESAMPLES = 2000


class Spread(NamedTuple):
    """The 20th, 50th and 80th percentile."""

    p20: float
    median: float
    p80: float


class Interval(NamedTuple):
    """The 95% confidence interval of a median."""

    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the 20th, 50th and 80th percentile.

    >>> spread([3.0, 1.0, 2.0])
    Spread(p20=1.4, median=2.0, p80=2.6)
    """
    samples = torch.tensor(values, dtype=torch.float64)
    return Spread(*samples.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist())


def paired_ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the ratios of measurements of the same round, in which a slow phase of the machine cancels.

    Raises:
        ValueError: if the numbers of rounds differ.

    >>> paired_ratios([1.0, 4.0], [2.0, 2.0])
    [0.5, 2.0]
    """
    return [a / b for a, b in zip(first, second, strict=True)]


def paired_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the differences of measurements of the same round.

    Raises:
        ValueError: if the numbers of rounds differ.
    """
    return [a - b for a, b in zip(first, second, strict=True)]


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the 95% percentile interval of the median (Efron 1979), from resamples with replacement.

    It covers the noise between the rounds of one run, not the differences between two runs.

    >>> bootstrap([1.0, 1.0, 1.0])
    Interval(low=1.0, high=1.0)
    """
    samples = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    medians = samples[torch.randint(len(samples), (RESAMPLES, len(samples)), generator=generator)].quantile(0.5, dim=1)
    return Interval(*medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist())
