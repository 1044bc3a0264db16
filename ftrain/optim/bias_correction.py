"""Powers of decay rates by the number of updates, as exactly as the device can."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ftrain import backends


def exact_count(count: Tensor) -> Tensor:
    """Return the number of updates for arithmetic in float64, as on the host, so that only the leaves' dtype rounds.

    On a device without float64 it is float32, and `power` and `debias` are exact to a few units in its last place.
    """
    return count.to(backends.widest(count.device))


def power(decay: float, count: Tensor) -> Tensor:
    """``decay ** count``."""
    # The power of a number close to 1 has the rounding error of that number times the count.
    return (count * math.log(decay)).exp() if count.dtype == torch.float32 and decay else decay**count


def debias(decay: float, count: Tensor) -> Tensor:
    """``1 - decay ** count``, the factor by which an average that began at zero is too small."""
    if count.dtype == torch.float32 and decay:
        return -torch.expm1(count * math.log(decay))
    return 1 - decay**count
