"""The real numbers that complex and sparse tensors hold."""

from __future__ import annotations

import torch
from torch import Tensor

DENSE = torch.strided, torch.jagged
"""The layouts of tensors that are not sparse."""

COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


def real_elements(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that are not zero by its layout, as real numbers."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout not in DENSE:
        tensor = tensor.values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
