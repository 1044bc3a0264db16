"""The metric `padding`: the share of a batch that is padding."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain.data.packing import NO_DOCUMENT
from ftrain.data.pad_batch import MASK
from ftrain.errors import BatchError
from ftrain.types import Mean, PyTree


def padding(batch: PyTree) -> Mean:
    """Return the share of padding in a batch, as a `Mean` over all its tokens.

    Computed from ``documents``, which `pack` adds, or else from ``attention_mask``, on their device. To log it, return
    it as a metric of the loss: ``return loss, {"padding": ft.data.padding(batch)}``.

    Args:
        batch: a dict with a tensor ``documents`` (-1 is padding) or ``attention_mask`` (0 or False is padding).

    Raises:
        BatchError: if the batch has neither.

    >>> float(padding({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]])}))
    0.25
    """
    mask = batch.get("documents", batch.get(MASK)) if isinstance(batch, dict) else None
    if not isinstance(mask, Tensor):
        raise BatchError(
            f"padding: the batch has neither documents nor {MASK}; make it by ft.data.pack, or by "
            'ft.data.pad(mask="tokens")'
        )
    is_padding = mask == NO_DOCUMENT if "documents" in batch else mask == 0
    return Mean(is_padding.sum().float(), torch.full((), float(mask.numel()), device=mask.device))
