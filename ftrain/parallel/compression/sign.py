"""Gradients that are sent as one bit per element and one number per leaf."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain.parallel.compression.method import (
    RESIDUAL,
    Compression,
    Exchange,
    Memory,
    no_residual,
    with_residuals,
)

BITS = 8


def sign() -> Compression:
    r"""Send the signs of a gradient and its mean magnitude: EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847).

    .. math:: a = g + e \qquad c = \frac{\lVert a \rVert_1}{n} \operatorname{sign}(a) \qquad e \leftarrow a - c

    for each leaf of n elements and each rank, which sends c. Every rank gets those of all others and sums them: 1
    bit per element and rank, 1/32 of float32 each, so it is meant for few ranks, such as one per node. The
    residual e is in the state and has the size of a rank's gradient. It is added to later gradients, not to updates,
    so any optimizer can be used.
    """

    def combine(grads: list[Tensor], memories: list[Memory], exchange: Exchange) -> tuple[list[Tensor], list[Memory]]:
        wanted = with_residuals(grads, [memory[RESIDUAL] for memory in memories])
        scales = torch.stack([each.abs().sum() / max(each.numel(), 1) for each in wanted])
        signs = torch.cat([each.reshape(-1) >= 0 for each in wanted])
        their_scales, their_signs = exchange.group.start_gather([scales]), exchange.group.start_gather([packed(signs)])
        all_scales, all_bits = (wait()[0] for wait in (their_scales, their_signs))
        totals = [torch.zeros_like(each) for each in wanted]
        # One rank after another, in the same order on all: the same bits, without memory for all at once.
        for bits, rank_scales in zip(all_bits, all_scales, strict=True):
            for total, sent in zip(totals, _sent(bits, rank_scales, wanted), strict=True):
                total += sent
        left = [each - sent for each, sent in zip(wanted, _sent(packed(signs), scales, wanted), strict=True)]
        sums = [exchange.needed(index, total).to(grads[index].dtype) for index, total in enumerate(totals)]
        return sums, [{RESIDUAL: residual} for residual in left]

    return Compression("sign", combine, "{gather} of signs", lambda index, leaf, axis: {RESIDUAL: no_residual(leaf)})


def packed(bits: Tensor) -> Tensor:
    """Return bool[n] as uint8[ceil(n / 8)]."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % BITS)).view(-1, BITS)
    return (padded.to(torch.uint8) << _places(bits)).sum(1, dtype=torch.uint8)


def unpacked(packed_bits: Tensor, length: int) -> Tensor:
    """Return bool[length] from its packed bits."""
    return ((packed_bits.unsqueeze(1) >> _places(packed_bits)) & 1).view(-1)[:length].to(torch.bool)


def _places(tensor: Tensor) -> Tensor:
    return torch.arange(BITS, dtype=torch.uint8, device=tensor.device)


def _sent(bits: Tensor, scales: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return what one rank sent of each leaf: its scale with the sign of each element."""
    lengths = [leaf.numel() for leaf in like]
    signs = unpacked(bits, sum(lengths)).split_with_sizes(lengths)
    triples = zip(signs, scales.unbind(), like, strict=True)
    return [torch.where(signs, scale, -scale).to(leaf.dtype).view(leaf.shape) for signs, scale, leaf in triples]
