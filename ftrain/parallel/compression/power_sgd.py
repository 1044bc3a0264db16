"""Send gradients as products of two matrices of low rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ftrain import random
from ftrain.errors import require_positive
from ftrain.parallel.compression.method import (
    RESIDUAL,
    Compression,
    Exchange,
    Memory,
    first_residual,
    with_residuals,
)

BASIS = "q"
"""The name of the right factors of the last step: a matrix of (columns, rank) for each leaf."""


def powersgd(rank: int = 4) -> Compression:
    r"""Send a gradient as two thin matrices: PowerSGD (Vogels et al. 2019, arXiv:1905.13727).

    For each rank's matrix :math:`M = g + e` of (rows, columns), with :math:`\Sigma` a sum over ranks,

    .. math::
        P = \operatorname{orthogonal}(\Sigma M Q) \qquad Q_i = M^\top P \qquad Q \leftarrow \Sigma Q_i \qquad
        e \leftarrow M - P Q_i^\top

    and the gradient is :math:`P Q^\top`. So rank * (rows + columns) numbers are all-reduced, on any number of ranks. A
    leaf is a matrix whose rows are its first axis. Leaves with fewer than two axes, and those for which the factors
    would not be smaller, are sent as they are. The residual e and Q, with which the next step begins, are in the state;
    e has the size of a rank's gradient. It is added to later gradients, not to updates, so any optimizer can be used.

    Args:
        rank: number of columns of P and Q. More columns are more exact.

    Raises:
        OptionError: when the rank is not a positive whole number.
    """
    require_positive("powersgd", "rank", rank)

    def init(index: int, leaf: Tensor, axis: int | None) -> Memory:
        # Blocks along another axis than the first would have different numbers of columns.
        if axis or not _is_compressed(leaf, rank):
            return {}
        # Drawn from a key, so that all ranks start with the same values.
        shape = leaf.numel() // leaf.shape[0], rank
        start = random.normal(random.fold_in(random.key(0), index), shape)
        residual = first_residual(leaf)
        return {RESIDUAL: residual, BASIS: start.to(residual)}

    def combine(grads: list[Tensor], memories: list[Memory], exchange: Exchange) -> tuple[list[Tensor], list[Memory]]:
        as_is = [index for index, memory in enumerate(memories) if not memory]
        exchange_as_is = Exchange(exchange.group, [exchange.parts[index] for index in as_is])
        sums = dict(zip(as_is, exchange_as_is.needed_sums([grads[index] for index in as_is]), strict=True))
        compressed = [index for index, memory in enumerate(memories) if memory]
        residuals = [memories[index][RESIDUAL] for index in compressed]
        corrected = with_residuals([grads[index] for index in compressed], residuals)
        matrices = [tensor.flatten(1) for tensor in corrected]
        bases = [memories[index][BASIS] for index in compressed]
        lefts = exchange.sums([matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)])
        lefts = [_orthogonal(left, rank) for left in lefts]
        rights = [matrix.mT @ left for matrix, left in zip(matrices, lefts, strict=True)]
        right_sums = exchange.sums(rights)
        memories = list(memories)
        for index, matrix, left, right, total in zip(compressed, matrices, lefts, rights, right_sums, strict=True):
            shape = grads[index].shape
            sums[index] = exchange.needed(index, (left @ total.mT).view(shape)).to(grads[index].dtype)
            memories[index] = {RESIDUAL: torch.addmm(matrix, left, right.mT, alpha=-1).view(shape), BASIS: total}
        return [sums[index] for index in range(len(grads))], memories

    return Compression(f"powersgd({rank})", combine, "all-reduce of factors; {sum} of other gradients", init)


def _is_compressed(leaf: Tensor, rank: int) -> bool:
    """Return whether the two factors of a leaf have fewer elements than the leaf."""
    if leaf.ndim < 2 or not leaf.numel():
        return False
    rows, columns = leaf.shape[0], math.prod(leaf.shape[1:])
    return rank * (rows + columns) < rows * columns


def _orthogonal(matrix: Tensor, rank: int) -> Tensor:
    """Return `rank` orthonormal columns that span those of a matrix; some are 0 if it has fewer rows."""
    # The decomposition must not see NaN or infinity. The gradients still show them: the right factor is the product of
    # the matrix itself and these columns.
    columns = torch.linalg.qr(torch.nan_to_num(matrix, 0.0, 0.0, 0.0)).Q
    return torch.nn.functional.pad(columns, (0, rank - columns.shape[1]))
