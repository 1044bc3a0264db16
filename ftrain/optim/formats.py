"""How a moment is stored: in a floating-point dtype, or as codes of 8 bits (Dettmers et al. 2021, arXiv:2110.02861)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch, tree

DECADES = 7
"""Decades below 1 that the codes of 8 bits cover."""

Window: TypeAlias = tuple[Tensor, ...]
"""The stored form of some elements of a leaf, to be read and written."""

Rounding: TypeAlias = Callable[[Tensor], Tensor]
"""A function of float32 values before they are cast to bfloat16; may overwrite them."""


@dataclass(frozen=True)
class Floats:
    """Stored in a floating-point `dtype`. Default: that of the parameter.

    A moment is stored in one tree for each of `suffixes`, which end the names of these trees in the state. `block`
    elements must stay together.
    """

    dtype: torch.dtype | None = None
    suffixes: tuple[str, ...] = ("",)
    block: int = 1

    def begin(self, value: Tensor) -> Window:
        """Return the stored form of the initial value of a moment."""
        return (value.to(self.dtype or value.dtype),)

    def read(self, windows: Sequence[Window], dtype: torch.dtype) -> Tensor:
        """Return the values, of shape (elements,), cast to `dtype`; a view if there is one leaf, of this dtype."""
        return flatten([leaf for (leaf,) in windows]).to(dtype)

    def write(self, windows: Sequence[Window], values: Tensor, rounding: Rounding | None) -> None:
        """Store values."""
        leaves = [leaf for (leaf,) in windows]
        first = leaves[0]
        if len(leaves) == 1 and first.dtype == values.dtype and first.is_contiguous():
            return  # `read` returned a view of this leaf, so the formula has written to it already.
        if rounding and first.dtype == torch.bfloat16:
            values = rounding(values.to(torch.float32))
        write_back(values, leaves)


@dataclass(frozen=True)
class Codes:
    """Stored as codes of 8 bits, of the shape of the leaf, and a float32 scale for each block of elements.

    A value is the `dynamic_map` at its code times the largest magnitude in its block of `block` elements. Blocks are in
    row-major order, and the last one of a leaf may be shorter. Leaves with fewer than `min_size` elements are stored as
    float32 (float64 if the parameter is) and have no scales. Use it for moments that begin at zero.
    """

    signed: bool
    block: int
    min_size: int
    suffixes: tuple[str, ...] = ("", "_scale")

    def begin(self, value: Tensor) -> Window:
        """Return the stored form of zeros of the shape of `value`."""
        if value.numel() < self.min_size:
            wide = torch.promote_types(value.dtype, torch.float32)
            return value.to(wide), value.new_zeros(0, dtype=torch.float32)
        blocks = -(-value.numel() // self.block)
        return value.new_zeros(value.shape, dtype=torch.uint8), value.new_zeros(blocks, dtype=torch.float32)

    def read(self, windows: Sequence[Window], dtype: torch.dtype) -> Tensor:
        """Return the values, of shape (elements,), in `dtype`."""
        values = [self._read(flatten(codes), flatten(scale), dtype) for codes, scale in self._runs(windows)]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _read(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if codes.dtype != torch.uint8:
            return codes.to(dtype)
        values = _map_on(self.signed, codes.device).index_select(0, codes.to(torch.int32)).to(dtype)
        for blocks, scales in self._blocks(values, scale.to(dtype)):
            blocks.mul_(scales.unsqueeze(-1))
        return values

    def write(self, windows: Sequence[Window], values: Tensor, rounding: Rounding | None) -> None:
        """Store values."""
        runs = list(self._runs(windows))
        values_of_runs = values.split_with_sizes([sum(leaf.numel() for leaf in codes) for codes, _ in runs])
        for (codes, scale), run in zip(runs, values_of_runs, strict=True):
            if codes[0].dtype != torch.uint8:
                write_back(run, codes)
                continue
            largest = torch.cat([blocks.abs().amax(-1) for (blocks,) in self._blocks(run)])
            coded = [self._codes(blocks, scales) for blocks, scales in self._blocks(run, largest)]
            write_back(coded[0] if len(coded) == 1 else torch.cat(coded), codes)
            write_back(largest, scale)

    def _codes(self, blocks: Tensor, largest: Tensor) -> Tensor:
        # A block of zeros has the scale 0, and stays so with any codes.
        shares = blocks / largest.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        cells = shares.to(torch.float16).view(torch.int16).view(-1).to(torch.int32) & 0xFFFF
        return _codes_on(self.signed, blocks.device).index_select(0, cells)

    def _runs(self, windows: Sequence[Window]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield the codes and scales of leaves that are read as one vector.

        These are all leaves if none has codes, or if all have only full blocks. Else each leaf is a vector.
        """
        has_codes = [codes.dtype == torch.uint8 for codes, _ in windows]
        only_full_blocks = not any(codes.numel() % self.block for codes, _ in windows)
        if not any(has_codes) or (all(has_codes) and only_full_blocks):
            yield [codes for codes, _ in windows], [scale for _, scale in windows]
            return
        for codes, scale in windows:
            yield [codes], [scale]

    def _blocks(self, values: Tensor, *scales: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the full blocks as one matrix, with their `scales`; then the shorter last block, if there is one."""
        # Separate and not padded: Inductor (2.13) reads a wrong scale at the end of a padded and cut tensor.
        full, rest = divmod(len(values), self.block)
        if full:
            yield values[: full * self.block].view(full, self.block), *(each[:full] for each in scales)
        if rest:
            yield values[full * self.block :].view(1, rest), *(each[full:] for each in scales)


Format: TypeAlias = Floats | Codes


def window(stored: Window, block: int, start: int, stop: int) -> Window:
    """Return the stored form of the elements from `start` to `stop` of a leaf; `start` is a multiple of `block`."""
    leaf, *scales = stored
    if stop - start == leaf.numel():
        return stored
    return leaf.view(-1)[start:stop], *[scale[start // block : -(-stop // block)] for scale in scales]


def flatten(leaves: list[Tensor]) -> Tensor:
    """Return the elements of all leaves, each in row-major order, as one vector; a view of a single contiguous leaf."""
    if len(leaves) == 1:
        # Not reshape: for some leaves that are not dense it returns a view that is not contiguous.
        return leaves[0].contiguous().view(-1)
    return _torch.flatten_dense(leaves)


def write_back(values: Tensor, leaves: list[Tensor]) -> None:
    """Write the elements of one vector to the leaves that `flatten` joined."""
    if len(leaves) == 1 and leaves[0].is_contiguous():
        # As a vector, because `values` may be a view of this leaf: torch skips a copy between equal views.
        leaves[0].view(-1).copy_(values)
    elif len(leaves) == 1:
        leaves[0].copy_(values.view(leaves[0].shape))
    else:
        torch._foreach_copy_(leaves, _torch.unflatten_dense(values, leaves))


def dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values that the codes stand for, ascending: float32, from -1 (0 if not `signed`) to 1.

    They are 0, 1, and values in seven decades from 1e-7 to 1. Each decade has twice as many values as the decade below
    it: 1 to 64 of each sign, or 2 to 128 if not `signed`. The values of a decade are the middles of equal intervals.
    """
    options: dict[str, Any] = {"dtype": torch.float64, "device": tree.HOST}
    values = [torch.zeros(1, **options), torch.ones(1, **options)]
    for decade in range(DECADES):
        bounds = torch.linspace(0.1, 1.0, (1 if signed else 2) * 2**decade + 1, **options)
        middles = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade + 1 - DECADES)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values.to(torch.float32)


@functools.lru_cache(maxsize=32)
def _map_on(signed: bool, device: torch.device) -> Tensor:
    # A real tensor, even while a graph is captured, because it is cached.
    with _torch.without_modes():
        return dynamic_map(signed=signed).to(device)


@functools.lru_cache(maxsize=32)
def _codes_on(signed: bool, device: torch.device) -> Tensor:
    """Return the nearest code for each of the 65536 values of float16, indexed by the bits of the value.

    A value is rounded to float16, with an error of at most 0.05% or 3e-8, and looked up in 0.8 ns; a search among 255
    bounds took 40 ns. If not `signed`, no value has the code 0: an optimizer divides by these values, and an element
    whose gradient was below 0.04% of the largest in its block took steps that were up to 90 times too long.
    """
    with _torch.without_modes():
        values = dynamic_map(signed=signed)
        bits = torch.arange(1 << 16, dtype=torch.int32, device=tree.HOST).to(torch.int16)
        cells = bits.view(torch.float16).to(torch.float32)
        bounds = (values[:-1] + values[1:]) / 2
        codes = torch.bucketize(cells.nan_to_num(), bounds).clamp_(min=0 if signed else 1)
        return codes.to(torch.uint8).to(device)
