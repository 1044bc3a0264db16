"""Send gradients as one bit per element and one number per leaf."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain.parallel.compression.method import (
    RESIDUAL,
    Compression,
    Exchange,
    Memory,
    first_residual,
    with_residuals,
)

BITS = 8


def sign() -> Compression:
    r"""Send the signs of a gradient and its mean magnitude: EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847).

    .. math:: a = g + e \qquad c = \frac{\lVert a \rVert_1}{n} \operatorname{sign}(a) \qquad e \leftarrow a - c

    for each leaf of n elements and each rank, which sends c. Every rank gets the c of all others and sums them. It gets
    1 bit per element from each rank, 1/32 of float32, so the method is meant for few ranks, such as one per node. The
    residual e is in the state and has the size of a rank's gradient. It is added to later gradients, not to updates,
    so any optimizer can be used.
    """

    def combine(grads: list[Tensor], memories: list[Memory], exchange: Exchange) -> tuple[list[Tensor], list[Memory]]:
        corrected = with_residuals(grads, [memory[RESIDUAL] for memory in memories])
        scales = torch.stack([tensor.abs().sum() / max(tensor.numel(), 1) for tensor in corrected])
        bits = packed(torch.cat([tensor.reshape(-1) >= 0 for tensor in corrected]))
        wait_for_scales = exchange.group.start_gather([scales])
        wait_for_bits = exchange.group.start_gather([bits])
        (all_scales,), (all_bits,) = wait_for_scales(), wait_for_bits()
        totals = [torch.zeros_like(tensor) for tensor in corrected]
        # One rank after another, in the same order on all: the same bits, without memory for all at once.
        for rank_bits, rank_scales in zip(all_bits, all_scales, strict=True):
            compressed_by_rank = _decompressed(rank_bits, rank_scales, corrected)
            for total, compressed in zip(totals, compressed_by_rank, strict=True):
                total += compressed
        compressed_here = _decompressed(bits, scales, corrected)
        residuals = [tensor - compressed for tensor, compressed in zip(corrected, compressed_here, strict=True)]
        sums = [exchange.needed(index, total).to(grads[index].dtype) for index, total in enumerate(totals)]
        return sums, [{RESIDUAL: residual} for residual in residuals]

    return Compression("sign", combine, "{gather} of signs", lambda index, leaf, axis: {RESIDUAL: first_residual(leaf)})


def packed(bits: Tensor) -> Tensor:
    """Return bool[n] as uint8[ceil(n / 8)]; the first element is the lowest bit."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % BITS)).view(-1, BITS)
    return (padded.to(torch.uint8) << _shifts(bits)).sum(1, dtype=torch.uint8)


def unpacked(packed_bits: Tensor, length: int) -> Tensor:
    """Return bool[length] from its packed bits."""
    return ((packed_bits.unsqueeze(1) >> _shifts(packed_bits)) & 1).view(-1)[:length].to(torch.bool)


def _shifts(tensor: Tensor) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=tensor.device)


def _decompressed(bits: Tensor, scales: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the leaves that one rank has sent: the scale of the leaf with the sign of each element."""
    lengths = [leaf.numel() for leaf in like]
    signs = unpacked(bits, sum(lengths)).split_with_sizes(lengths)
    triples = zip(signs, scales.unbind(), like, strict=True)
    return [torch.where(sign, scale, -scale).to(leaf.dtype).view(leaf.shape) for sign, scale, leaf in triples]
