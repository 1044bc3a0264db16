"""Amounts of memory, as people write them."""

from __future__ import annotations

import re

from ftrain.errors import OptionError

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)


def as_bytes(memory: int | str) -> int:
    """Return an amount of memory in bytes.

    Raises:
        OptionError: when it is no such amount.

    >>> as_bytes("8GB"), as_bytes("1.5 GiB"), as_bytes(1024)
    (8000000000, 1610612736, 1024)
    """
    match = SIZE.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if match:
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise OptionError(f"tune: memory is {memory!r}; needs bytes, as a number or as in '8GB' or '512MiB'")
    return memory
