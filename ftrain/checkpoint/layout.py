"""The safetensors format: names of dtypes, the offset of each tensor, and the header.

Source: https://github.com/huggingface/safetensors#format. A header depends only on the names, dtypes and shapes
of the tensors, so a reader that knows these compares the header instead of parsing it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ftrain.tree import dtype_name

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
"""Names of the dtypes that safetensors supports."""

AS_BYTES = torch.complex64, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu
"""Dtypes stored as uint8, with an additional last axis of the bytes of one element."""

DTYPES = {dtype_name(dtype): dtype for dtype in (*CODES, *AS_BYTES)}
"""The dtypes of a checkpoint by their names without ``torch.``."""
ALIGNMENT = 8
"""The length of a header is a multiple of this number of bytes."""
CHUNK = 16 * 2**20
"""Bytes that are copied, hashed and written at a time."""


class TensorInfo(NamedTuple):
    """Name, dtype and shape of a tensor in a file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout(NamedTuple):
    """The header of a file, the offset of each tensor from the start of the file, and the size of the file in bytes."""

    header: bytes
    offsets: dict[str, int]
    size: int


def layout(infos: Sequence[TensorInfo], metadata: Mapping[str, str] | None = None) -> Layout:
    """Return the layout of a file of tensors, those with the widest elements first, so that every tensor is aligned.

    `metadata` is added to that of the header.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    starts, end = {}, 0
    for info in sorted(infos, key=lambda info: -info.dtype.itemsize):
        start, end = end, end + info.bytes
        is_supported = info.dtype in CODES
        entries[info.key] = {
            "dtype": CODES.get(info.dtype, "U8"),
            "shape": [*info.shape] if is_supported else [*info.shape, info.dtype.itemsize],
            "data_offsets": [start, end],
        }
        starts[info.key] = start
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {key: len(header) + start for key, start in starts.items()}
    return Layout(header, offsets, len(header) + end)


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order, in chunks; a strided tensor is copied row by row."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous() and tensor.nbytes > CHUNK and tensor.ndim >= 2:
        for row in tensor:
            yield from chunks(row)
        return
    flat, step = tensor.reshape(-1), max(1, CHUNK // tensor.element_size())
    for start in range(0, flat.numel(), step):
        yield as_bytes(flat[start : start + step].cpu().contiguous())


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    # Not by `reshape`: the stride of a tensor with one element may be any number, and `reshape` keeps it.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a dense tensor if they differ from those of row-major order; else None.

    The strides of axes of length 1 are compared too, which `is_contiguous` ignores: torch chooses kernels by them.
    """
    stride = tuple(tensor.stride())
    row_major = torch.empty(tensor.shape, device="meta").stride()
    return stride if stride != row_major and is_dense(tensor.shape, stride) else None


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this shape and stride fills a block of memory without gaps or overlaps."""
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True
