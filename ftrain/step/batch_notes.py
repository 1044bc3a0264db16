"""Notes for an error in a loss: types, dtypes, devices, indices or gradients of its inputs that may have caused it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import FtrainError, listed
from ftrain.tree import dtype_name
from ftrain.types import PyTree

INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8

OF_STRUCTURE = KeyError, TypeError, AttributeError, IndexError
"""Errors that a loss raises if the batch has other names, or another type, than it reads."""

NEW_LEAF = (
    "a graph and a part of a batch have other tensors than the batch: for the gradient of an input, take a new leaf in "
    "the loss, x = batch['x'].detach().requires_grad_(), and compute with x"
)
NO_GRAPH = (
    "an evaluation records no graph: take the gradient of an input under torch.enable_grad(), and that of parameters "
    "with torch.func.grad; a training step then computes the same as before"
)


def batch_notes(error: Exception, params: PyTree, batch: PyTree) -> list[str]:
    """Return notes for an error that a loss raised for these parameters and this batch; [] if no cause is known."""
    if isinstance(error, FtrainError):
        return []
    if isinstance(error, TypeError) and "object is not callable" in str(error):
        return ["it was called with (params, batch); ft.from_module(module, criterion) calls a criterion(model, batch)"]
    causes = [*_causes(error, params, batch)]
    is_of_structure = isinstance(error, OF_STRUCTURE) or any(word in str(error) for word in ("shape", "size", "dtype"))
    if causes or not is_of_structure:
        return causes
    leaves = [f"{tree.path('batch', name)} is {text}" for name, text in tree.signature(batch).items()]
    return [f"its second argument was this batch: {listed(leaves) or repr(batch)}"]


def _causes(error: Exception, params: PyTree, batch: PyTree) -> Iterator[str]:
    """Yield a note for each property of the batch that may have caused the error."""
    by_path = dict(zip(tree.leaf_names({"batch": batch}), tree.leaves(batch), strict=True))
    arrays = [path for path, leaf in by_path.items() if isinstance(leaf, np.ndarray)]
    if arrays:
        yield (
            f"the batch has NumPy arrays ({', '.join(arrays)}), with which torch does not compute: convert them with "
            "torch.from_numpy, or use ft.data.loader or a DataLoader, which do so"
        )
    columns = batch.items() if isinstance(batch, Mapping) else ()
    lists = [f"batch.{name}" for name, column in columns if type(column) is list]
    if lists and "list" in str(error):
        yield (
            f"the batch has lists in place of tensors ({listed(lists)}), as default_collate makes of lists of "
            "numbers: pass a loader collate=ft.data.pad(), give it samples of tensors (of Hugging Face: "
            "dataset.with_format('torch')), or call a tokenizer with return_tensors='pt'"
        )
    if not isinstance(error, IndexError | RuntimeError):
        return
    tensors = {path: leaf for path, leaf in by_path.items() if isinstance(leaf, Tensor)}
    if "out of bounds" in str(error) or "out of range" in str(error):
        ranges = [
            f"{path} has values from {int(leaf.min())} to {int(leaf.max())}"
            for path, leaf in tensors.items()
            if leaf.dtype in INTEGERS and leaf.numel() and leaf.device == tree.HOST
        ]
        if ranges:
            yield (
                f"{', '.join(ranges)}: a label must be from 0 to the number of classes - 1, or be the ignore_index of "
                "the loss (-100 by default), and an index of an embedding from 0 to its number of rows - 1, which also "
                "holds for positions in a row that is too long"
            )
    if "does not require grad" in str(error) or "not have been used in the graph" in str(error):
        yield NEW_LEAF if torch.is_grad_enabled() else NO_GRAPH
    device = next((leaf.device for leaf in tree.leaves(params) if isinstance(leaf, Tensor)), tree.HOST)
    on_other_device = [f"{path} is on {leaf.device}" for path, leaf in tensors.items() if leaf.device != device]
    if on_other_device and "device" in str(error):
        yield (
            f"{', '.join(on_other_device)}, but the parameters are on {device}: fit and evaluate move batches; in a "
            "loop of your own call ft.tree.to(batch, device)"
        )
        return
    # The errors of torch differ: "the same dtype", "Input type and bias type", "for 'Byte'".
    if "type" in str(error) or "Byte" in str(error):
        yield from _dtype_notes(tensors, params)


def _dtype_notes(tensors: Mapping[str, Tensor], params: PyTree) -> Iterator[str]:
    """Yield notes on tensors of a batch whose dtypes may not fit. `tensors` has them by path."""
    pixels = [path for path, leaf in tensors.items() if leaf.dtype == torch.uint8]
    if pixels:
        yield (
            f"the batch has uint8 tensors ({', '.join(pixels)}), which few operations support: convert inputs to "
            "floats, pixels with x.float() / 255, and class indices with y.long()"
        )
    dtypes = {leaf.dtype for leaf in tree.leaves(params) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    different = [
        f"{path} is {tree.describe(leaf)}"
        for path, leaf in tensors.items()
        if leaf.is_floating_point() and leaf.dtype not in dtypes
    ]
    if different and dtypes:
        needed = " and ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        yield f"{', '.join(different)}, but the parameters are {needed}: convert the batch, with x.float() for example"
