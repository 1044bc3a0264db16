"""Tensors as bytes in a safetensors file: which dtype it calls them, where each lies, and the header that says so.

The format is that of https://github.com/huggingface/safetensors#format. A header depends on the names, dtypes and
shapes alone, so that a reader who knows these compares it instead of parsing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What safetensors calls the dtypes that it has."""

AS_BYTES = torch.complex64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu
"""Dtypes stored as bytes, with a last axis of the bytes of one element."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, *AS_BYTES)}
ALIGNMENT = 8
LARGEST = 16 * 2**20
"""Bytes that are copied, hashed and written at a time."""


class Kind(NamedTuple):
    """A tensor in a file: its name there, and what it is."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How many it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """The first bytes of a file, and where in it each tensor begins."""

    header: bytes
    offsets: dict[str, int]
    size: int


def layout(kinds: Sequence[Kind], notes: Mapping[str, str] | None = None) -> Layout:
    """Lay tensors out, those of the widest elements first, so that each is aligned; the header may hold notes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(notes or {})}}
    places, end = {}, 0
    for kind in sorted(kinds, key=lambda kind: -kind.dtype.itemsize):
        native = kind.dtype in CODES
        entries[kind.key] = {
            "dtype": CODES.get(kind.dtype, "U8"),
            "shape": [*kind.shape] if native else [*kind.shape, kind.dtype.itemsize],
            "data_offsets": [end, end + kind.bytes],
        }
        places[kind.key], end = end, end + kind.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return Layout(header, {key: len(header) + place for key, place in places.items()}, len(header) + end)


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Give the bytes of a tensor in row-major order, without a second copy of all of them."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    if whole.is_contiguous() or whole.nbytes <= LARGEST or whole.ndim < 2:
        whole = whole.reshape(-1)
    else:
        for row in whole:
            yield from chunks(row)
        return
    step = max(1, LARGEST // whole.element_size())
    for start in range(0, whole.numel(), step):
        yield as_bytes(whole[start : start + step].cpu().contiguous())


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat = tensor.reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def strides(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor that fills its memory in another order than row by row; else None."""
    if tensor.is_contiguous() or not is_dense(tensor.shape, tensor.stride()):
        return None
    return tuple(tensor.stride())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of that shape and stride has every element of its memory once."""
    expected = 1
    for step, length in sorted((step, length) for step, length in zip(stride, shape, strict=True) if length != 1):
        if step != expected:
            return False
        expected *= length
    return True
