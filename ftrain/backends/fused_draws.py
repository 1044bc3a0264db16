"""Kernels that draw random numbers within: those of attention and of recurrent nets on GPUs.

Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html, and for
recurrent nets https://docs.pytorch.org/docs/stable/backends.html#torch-backends-cudnn (MIOpen has the same switch).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def without_fused_draws() -> Iterator[None]:
    """Context in which attention and recurrent nets are made of operations, of which dropout is one.

    It is a setting of the process, so it holds in all threads.
    """
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cudnn.enabled = enabled
