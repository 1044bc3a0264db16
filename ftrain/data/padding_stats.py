"""How much of a batch is padding."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain.data.pack import NO_DOCUMENT
from ftrain.data.pad_batch import MASK
from ftrain.errors import BatchError
from ftrain.types import Mean, PyTree


def padding(batch: PyTree) -> Mean:
    """Return the share of a batch's places that hold padding, as a metric: it adds up over batches and devices.

    Read from ``documents``, as `pack` makes it, or else from ``attention_mask``, on the device they are on. A loss
    reports it by returning it: ``return loss, {"padding": ft.data.padding(batch)}``.

    Raises:
        BatchError: when the batch has neither.

    >>> float(padding({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]])}))
    0.25
    """
    found = batch.get("documents", batch.get(MASK)) if isinstance(batch, dict) else None
    if not isinstance(found, Tensor):
        raise BatchError(
            f"padding: the batch has neither documents nor {MASK}; make it by ft.data.pack, or by "
            'ft.data.pad(mask="tokens")'
        )
    empty = found == NO_DOCUMENT if "documents" in batch else found == 0
    return Mean(empty.sum().float(), torch.full((), float(found.numel()), device=found.device))
