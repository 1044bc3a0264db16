"""The compression methods by the value of `reduce`."""

from __future__ import annotations

from ftrain.errors import OptionError
from ftrain.parallel.compression.method import Compression
from ftrain.parallel.compression.sixteen_bits import bf16, fp16

UNCOMPRESSED = "fp32"
NAMED = {"bf16": bf16, "fp16": fp16}


def compression_of(reduce: str | Compression) -> Compression | None:
    """Return the method that a user names; None if gradients are sent in their own dtype.

    Raises:
        OptionError: if `reduce` is anything else.
    """
    if isinstance(reduce, Compression):
        return reduce
    if reduce == UNCOMPRESSED:
        return None
    if not isinstance(reduce, str) or reduce not in NAMED:
        raise OptionError(
            f"sharded: reduce is {reduce!r}; needs 'fp32' (no compression), 'bf16', 'fp16', ft.parallel.powersgd(rank) "
            "or ft.parallel.sign()"
        )
    return NAMED[reduce]()
