"""Cosine and cosine with restarts, bare and warmed up.

Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, equation 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftrain.optim.schedules.curve import decay
from ftrain.optim.schedules.inputs import count, positive
from ftrain.types import Schedule


@dataclass(frozen=True)
class _Cosine:
    waves: float

    def __call__(self, done: int, steps: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * self.waves * 2.0 * (done / steps)))


@dataclass(frozen=True)
class _Restarts:
    cycles: int

    def __call__(self, done: int, steps: int) -> float:
        if done == steps:
            return 0.0
        # In floats 21/22 of the way in 22 cycles is not yet a restart, and transformers' value there is 0.
        if done * self.cycles % steps == 0:
            return 1.0
        return 0.5 * (1.0 + math.cos(math.pi * ((self.cycles * (done / steps)) % 1.0)))


def cosine(peak: float, total: int, end: float = 0.0, waves: float = 0.5) -> Schedule:
    """``end + (peak - end) (1 + cos(2 pi waves k / total)) / 2``, then what that is at `total`.

    Half a wave goes down once, from `peak` to `end`.

    Raises:
        OptionError: a value is not a finite number, `waves` is not positive, or `total` is not an
            integer of at least 0.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, equation 5.

    >>> [round(cosine(1.0, 4)(k), 3) for k in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    waves = positive("cosine", "waves", waves)
    return decay(cosine, _Cosine(waves), peak, 0, total, end, waves=waves)


def warmup_cosine(peak: float, warmup: int, total: int, end: float = 0.0, waves: float = 0.5) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then as `cosine` from `peak` to `end`, reached at `total`.

    Raises:
        OptionError: a value is not a finite number, `waves` is not positive, or not
            ``0 <= warmup <= total`` in integers.

    >>> warmup_cosine(1e-3, 10, 100, end=1e-5)
    warmup_cosine(1e-3, 10, 100, end=1e-5)
    """
    waves = positive("warmup_cosine", "waves", waves)
    return decay(warmup_cosine, _Cosine(waves), peak, warmup, total, end, waves=waves)


def cosine_restarts(peak: float, total: int, cycles: int, end: float = 0.0) -> Schedule:
    """``end + (peak - end) (1 + cos(pi (cycles k / total mod 1))) / 2``, then `end`.

    Each of the cycles starts at `peak` again. Cycles that grow are a `chain` of `cosine`.

    Raises:
        OptionError: a value is not a finite number, `cycles` is not an integer of at least 1, or
            `total` not one of at least 0.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983.

    >>> [round(cosine_restarts(1.0, 8, cycles=2)(k), 3) for k in range(9)]
    [1.0, 0.854, 0.5, 0.146, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    cycles = count("cosine_restarts", "cycles", cycles, least=1)
    return decay(cosine_restarts, _Restarts(cycles), peak, 0, total, end, cycles=cycles)


def warmup_cosine_restarts(peak: float, warmup: int, total: int, cycles: int, end: float = 0.0) -> Schedule:
    """``peak k / warmup`` for ``k < warmup``, then as `cosine_restarts`, all cycles done at `total`.

    Raises:
        OptionError: a value is not a finite number, `cycles` is not an integer of at least 1, or not
            ``0 <= warmup <= total`` in integers.

    >>> warmup_cosine_restarts(1e-3, 10, 100, cycles=3)
    warmup_cosine_restarts(1e-3, 10, 100, 3)
    """
    cycles = count("warmup_cosine_restarts", "cycles", cycles, least=1)
    return decay(warmup_cosine_restarts, _Restarts(cycles), peak, warmup, total, end, cycles=cycles)
