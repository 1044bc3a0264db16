"""Amounts of memory as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ftrain.errors import OptionError

UNITS = "B", "KiB", "MiB", "GiB", "TiB"
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
"""The power of 1000, or of 1024, for which a prefix of a unit stands."""


def format_bytes(count: float) -> str:
    """Return a number of bytes in the largest binary unit that it fills.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    size, name = unit_of(count)
    return f"{count / size:,.1f} {name}" if size > 1 else f"{count:.0f} {name}"


def unit_of(value: float, base: int = 1024, names: Sequence[str] = UNITS) -> tuple[int, str]:
    """Return the size and the name of the largest unit that a value fills; each unit is `base` times the one before.

    >>> unit_of(1536), unit_of(2_000_000, 1000, ("FLOP", "kFLOP", "MFLOP"))
    ((1024, 'KiB'), (1000000, 'MFLOP'))
    """
    largest = max((power for power in range(len(names)) if value >= base**power), default=0)
    return base**largest, names[largest]


def parse_bytes(function: str, memory: int | str) -> int:
    """Return the bytes of a number of bytes, or of text with a unit. Raises an OptionError for anything else.

    >>> parse_bytes("tune", "8GB"), parse_bytes("tune", "1.5 GiB"), parse_bytes("tune", 8e9)
    (8000000000, 1610612736, 8000000000)
    """
    match = _AMOUNT.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if match:
        amount, prefix, binary = match.groups()
        base = 1024 if binary else 1000
        return int(float(amount) * base ** _POWERS[prefix.lower()])
    number: Any = memory
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 1 <= number < float("inf") or number % 1:
        raise OptionError(f"{function}: memory is {memory!r}; needs bytes, as a number or as in '8GB' or '512MiB'")
    return int(number)
