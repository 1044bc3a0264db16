"""What a list of measurements says: quantiles, ratios of pairs, and how sure one can be of a median."""

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
    """A range that holds the median 95 times out of 100."""

    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return three quantiles.

    >>> spread([3.0, 1.0, 2.0])
    Spread(p20=1.4, median=2.0, p80=2.6)
    """
    samples = torch.tensor(values, dtype=torch.float64)
    return Spread(*samples.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist())


def pairwise(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Divide measurements that were taken in the same round, so that a drift of the machine cancels.

    Raises:
        ValueError: when the rounds are not the same number.

    >>> pairwise([1.0, 4.0], [2.0, 2.0])
    [0.5, 2.0]
    """
    return [a / b for a, b in zip(first, second, strict=True)]


def differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Subtract measurements that were taken in the same round.

    Raises:
        ValueError: when the rounds are not the same number.
    """
    return [a - b for a, b in zip(first, second, strict=True)]


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the 95% percentile interval of the median (Efron 1979), by resampling the values with replacement.

    It knows of the noise between rounds only: what differs between two runs of the bench is not in it.

    >>> bootstrap([1.0, 1.0, 1.0])
    Interval(low=1.0, high=1.0)
    """
    samples = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    medians = samples[torch.randint(len(samples), (RESAMPLES, len(samples)), generator=generator)].quantile(0.5, dim=1)
    return Interval(*medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist())
