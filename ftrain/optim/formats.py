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

Window: TypeAlias = tuple[Tensor, ...]
"""The stored form of some elements of a leaf, to be read and written."""

Rounding: TypeAlias = Callable[[Tensor], Tensor]
"""A function of float32 values before they are cast to bfloat16; may overwrite them."""


@dataclass(frozen=True)
class Floats:
    """Stored in a floating-point dtype; in that of the parameter if none is given.

    A leaf is stored as one tensor for each of `suffixes`, which end the names of the trees in the state. `block`
    elements must stay together.
    """

    dtype: torch.dtype | None = None
    suffixes: tuple[str, ...] = ("",)
    block: int = 1

    def begin(self, value: Tensor) -> Window:
        """Store the initial value of a moment."""
        return (value.to(self.dtype or value.dtype),)

    def read(self, windows: Sequence[Window], dtype: torch.dtype) -> Tensor:
        """Return the values, of shape (elements,), in the dtype to compute in; a view of a single leaf that has it."""
        return flatten([leaf for (leaf,) in windows]).to(dtype)

    def write(self, windows: Sequence[Window], values: Tensor, rounding: Rounding | None) -> None:
        """Store values."""
        leaves = [leaf for (leaf,) in windows]
        first = leaves[0]
        if len(leaves) == 1 and first.dtype == values.dtype and first.is_contiguous():
            return  # These are the values.
        if rounding and first.dtype == torch.bfloat16:
            values = rounding(values.to(torch.float32))
        write_back(values, leaves)


@dataclass(frozen=True)
class Codes:
    """Stored as codes of 8 bits, of the shape of the leaf, and a float32 scale for each block of elements.

    A value is the `dynamic_map` at its code times the largest magnitude in its block of `block` elements. Blocks are in
    row-major order, and the last one of a leaf may be shorter. Leaves with fewer than `least` elements are float32
    (float64 if the parameter is), unscaled. Use it for moments that begin at zero.
    """

    signed: bool
    block: int
    least: int
    suffixes: tuple[str, ...] = ("", "_scale")

    def begin(self, value: Tensor) -> Window:
        """Store zeros."""
        if value.numel() < self.least:
            wide = torch.promote_types(value.dtype, torch.float32)
            return value.to(wide), value.new_zeros(0, dtype=torch.float32)
        blocks = -(-value.numel() // self.block)
        return value.new_zeros(value.shape, dtype=torch.uint8), value.new_zeros(blocks, dtype=torch.float32)

    def read(self, windows: Sequence[Window], dtype: torch.dtype) -> Tensor:
        """Return the values, of shape (elements,), in the dtype to compute in."""
        values = [self._read(flatten(codes), flatten(scale), dtype) for codes, scale in self._runs(windows)]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _read(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        if codes.dtype != torch.uint8:
            return codes.to(dtype)
        values = _map_on(self.signed, codes.device).index_select(0, codes.to(torch.int32)).to(dtype)
        for blocks, each in self._blocks(values, scale.to(dtype)):
            blocks.mul_(each.unsqueeze(-1))
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
            coded = [self._codes(blocks, each) for blocks, each in self._blocks(run, largest)]
            write_back(coded[0] if len(coded) == 1 else torch.cat(coded), codes)
            write_back(largest, scale)

    def _codes(self, blocks: Tensor, largest: Tensor) -> Tensor:
        # A block of zeros has the scale 0, and stays so with any codes.
        shares = blocks / largest.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        cells = shares.to(torch.float16).view(torch.int16).view(-1).to(torch.int32) & 0xFFFF
        return _codes_on(self.signed, blocks.device).index_select(0, cells)

    def _runs(self, windows: Sequence[Window]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield the codes and scales of leaves to join: all small ones, or all of full blocks; else one by one."""
        small = {codes.dtype != torch.uint8 for codes, _ in windows}
        if small == {True} or (small == {False} and not any(codes.numel() % self.block for codes, _ in windows)):
            yield [codes for codes, _ in windows], [scale for _, scale in windows]
            return
        for codes, scale in windows:
            yield [codes], [scale]

    def _blocks(self, values: Tensor, *beside: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the full blocks with their rows of `beside`, then the shorter last block if there is one."""
        # Separate and not padded: Inductor (2.13) reads a wrong scale at the end of a padded and cut tensor.
        whole, rest = divmod(len(values), self.block)
        if whole:
            yield values[: whole * self.block].view(whole, self.block), *(each[:whole] for each in beside)
        if rest:
            yield values[whole * self.block :].view(1, rest), *(each[whole:] for each in beside)


Format: TypeAlias = Floats | Codes


def window(stored: Window, block: int, start: int, stop: int) -> Window:
    """Return what is stored for the elements from `start` to `stop` of a leaf; scales are those of whole blocks."""
    leaf, *scales = stored
    if stop - start == leaf.numel():
        return stored
    return leaf.view(-1)[start:stop], *[scale[start // block : -(-stop // block)] for scale in scales]


def flatten(leaves: list[Tensor]) -> Tensor:
    """Return the elements of all leaves, each in row-major order, as one vector; a view of a single contiguous leaf."""
    if len(leaves) == 1:
        # Not reshape, which finds strides for some leaves that are not dense.
        return leaves[0].contiguous().view(-1)
    return _torch.flatten_dense(leaves)


def write_back(values: Tensor, leaves: list[Tensor]) -> None:
    """Write the elements of one vector to the leaves that `flatten` joined."""
    if len(leaves) == 1 and leaves[0].is_contiguous():
        # As a vector, since the values may be this memory: copying to itself is free if the strides are equal too.
        leaves[0].view(-1).copy_(values)
    elif len(leaves) == 1:
        leaves[0].copy_(values.view(leaves[0].shape))
    else:
        torch._foreach_copy_(leaves, _torch.unflatten_dense(values, leaves))


def dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values from -1 or 0 to 1 that the codes stand for, in order: float32.

    Each decade from 1e-7 to 1 has twice as many as the last, halfway between evenly spaced bounds: seven decades
    of 1 to 64 values of each sign, or of 2 to 128 without one; and 0 and 1.
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
    # A real tensor, even while a graph is captured.
    with _torch.without_modes():
        return dynamic_map(signed=signed).to(device)


@functools.lru_cache(maxsize=32)
def _codes_on(signed: bool, device: torch.device) -> Tensor:
    """The nearest code for each of the 65536 values of float16, by its bits.

    A value is looked up as the nearest float16, which is within 0.05% of it or within 3e-8, in 0.8 ns; the
    search among 255 bounds took 40 ns. Without a sign no code is 0: an optimizer divides by these values, and an
    element with a gradient of less than 0.04% of the largest in its block took steps up to 90 times too long.
    """
    with _torch.without_modes():
        values = dynamic_map(signed=signed)
        bits = torch.arange(1 << 16, dtype=torch.int32, device=tree.HOST).to(torch.int16)
        cells = bits.view(torch.float16).to(torch.float32)
        bounds = (values[:-1] + values[1:]) / 2
        codes = torch.bucketize(cells.nan_to_num(), bounds).clamp_(min=0 if signed else 1)
        return codes.to(torch.uint8).to(device)
