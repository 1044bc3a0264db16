"""Amounts of memory as text."""

from __future__ import annotations

UNITS = "B", "KiB", "MiB", "GiB", "TiB"


def format_bytes(count: float) -> str:
    """Return a number of bytes in the largest binary unit that it fills.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    power = 0
    while count >= 1024 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:,.1f} {UNITS[power]}" if power else f"{count:.0f} B"
