"""Amounts of memory as text, written and read."""

from __future__ import annotations

import re

from ftrain.errors import OptionError

UNITS = "B", "KiB", "MiB", "GiB", "TiB"
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)


def format_bytes(count: float) -> str:
    """Return a number of bytes in the largest binary unit that it fills.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    power = 0
    while count >= 1024 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:,.1f} {UNITS[power]}" if power else f"{count:.0f} B"


def parse_bytes(function: str, memory: int | str) -> int:
    """Return an amount of memory in bytes.

    Args:
        function: name of the caller, for the message.
        memory: number of bytes, or text with a unit.

    Raises:
        OptionError: if it is not such an amount.

    >>> parse_bytes("tune", "8GB"), parse_bytes("tune", "1.5 GiB"), parse_bytes("tune", 1024)
    (8000000000, 1610612736, 1024)
    """
    match = _AMOUNT.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if match:
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise OptionError(f"{function}: memory is {memory!r}; needs bytes, as a number or as in '8GB' or '512MiB'")
    return memory
