"""Collate samples of different lengths by padding; and the metric `padding`, the share of a batch that is padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ftrain.data.packing import IGNORED, NO_DOCUMENT
from ftrain.errors import BatchError, DataError, OptionError, require_choice, require_positive, require_switches
from ftrain.tree import dtype_name
from ftrain.types import Mean, PyTree

MASK = "attention_mask"
"""The field of a padded batch that holds the mask."""


@dataclass(frozen=True)
class Pad:
    """A collate function made by `pad`."""

    draws: ClassVar[bool] = False

    values: Mapping[str, float]
    length: int | None
    multiple: int
    side: str
    fields: tuple[str, ...] | None
    mask: str | None
    cut: bool

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch of some samples, mappings with the same fields.

        Raises:
            DataError: if there are no samples, if they are not such mappings, or if a field cannot be padded.
        """
        names = _names(samples)
        batch: dict[str, Any] = {}
        for name in names:
            values = [sample[name] for sample in samples]
            batch[name] = values if isinstance(values[0], str | bytes) else self._field(name, values)
        if self.mask is not None:
            if self.mask not in names:
                raise DataError(f"pad: mask={self.mask!r} is not a field; there are {', '.join(names)}")
            if MASK in names:
                raise DataError(
                    f"pad: mask= would replace the field {MASK} of the samples; leave it out: it is padded with 0"
                )
            if not isinstance(batch[self.mask], Tensor) or batch[self.mask].ndim == 1:
                raise DataError(f"pad: mask={self.mask!r} holds {samples[0][self.mask]!r:.40}; needs one of sequences")
            masks = [torch.ones(len(sample[self.mask]), dtype=torch.bool) for sample in samples]
            batch[MASK] = self._padded(MASK, masks)
        return batch

    def _field(self, name: str, values: list[Any]) -> Tensor:
        """Return the values of a field as one tensor, padded if the options say so. Raises a DataError."""
        tensors = [_tensor(name, value) for value in values]
        # An empty list has no dtype, so it gets that of the other values.
        dtype = next((tensor.dtype for tensor in tensors if tensor.numel()), torch.float32)
        tensors = [
            tensor.to(dtype) if isinstance(value, list | tuple) and not tensor.numel() else tensor
            for tensor, value in zip(tensors, values, strict=True)
        ]
        has_one_axis = all(tensor.ndim == 1 for tensor in tensors)
        is_padded = has_one_axis if self.fields is None else name in self.fields
        if is_padded:
            return self._padded(name, tensors)
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        if len(shapes) > 1:
            raise DataError(f"pad: field {name} has shapes {shapes} in one batch; add it to fields= to pad it")
        return torch.stack(tensors)

    def _padded(self, name: str, tensors: list[Tensor]) -> Tensor:
        """Return tensors padded along their first axis, as one tensor. Raises a DataError if they do not fit."""
        if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1 or not tensors[0].ndim:
            listed = sorted({f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors})
            raise DataError(f"pad: field {name} has {', '.join(listed)} in one batch; only the first axis may differ")
        length = self._length(name, max(len(tensor) for tensor in tensors))
        fill = self.values.get(name, IGNORED if name == "labels" else 0)
        if any(len(tensor) < length for tensor in tensors):
            _require_holds(name, tensors[0].dtype, fill)
        batch = tensors[0].new_full((len(tensors), length, *tensors[0].shape[1:]), fill)
        for row, tensor in zip(batch, tensors, strict=True):
            tensor = tensor[:length]
            start = length - len(tensor) if self.side == "left" else 0
            row[start : start + len(tensor)] = tensor
        return batch

    def _length(self, name: str, longest: int) -> int:
        """Return the length to which a field is padded. Raises a DataError if the longest sample is longer."""
        if self.length is None:
            return -(-longest // self.multiple) * self.multiple
        if longest > self.length and not self.cut:
            raise DataError(f"pad: field {name} is {longest} long, more than length={self.length}; pass cut=True")
        return self.length


def pad(
    *,
    values: Mapping[str, float] | None = None,
    length: int | None = None,
    multiple: int = 1,
    side: Literal["left", "right"] = "right",
    fields: Sequence[str] | None = None,
    mask: str | None = None,
    cut: bool = False,
) -> Pad:
    """Return a collate function for mappings, which pads each field to its longest sample.

    Fields of text stay lists; numbers, and fields that are not padded, are stacked.

    Args:
        values: padding values by field. Default: -100 for ``labels``, 0 for other fields.
        length: pad to this length, so that every batch has the same shape. Default: the longest sample.
        multiple: round the longest sample up to a multiple of this.
        side: the side on which to pad.
        fields: the fields to pad, along their first axis. Default: all with one axis.
        mask: the field for which to add ``attention_mask`` (bool, False at padding). Default: no mask.
        cut: cut samples that are longer than `length` at their end; else they are an error.

    Raises:
        OptionError: if an option is out of range, or two exclude each other.

    >>> batch = pad(mask="tokens")([{"tokens": [1, 2, 3], "labels": [2, 3, 4]}, {"tokens": [5], "labels": [6]}])
    >>> batch["tokens"].tolist(), batch["labels"].tolist()
    ([[1, 2, 3], [5, 0, 0]], [[2, 3, 4], [6, -100, -100]])
    >>> batch["attention_mask"].int().tolist()
    [[1, 1, 1], [1, 0, 0]]
    """
    require_positive("pad", "multiple", multiple)
    if length is not None:
        require_positive("pad", "length", length)
        if multiple != 1:
            raise OptionError(f"pad: length={length} and multiple={multiple} exclude each other; pass one of them")
    require_choice("pad", "side", side, ("left", "right"))
    require_switches("pad", cut=cut)
    if cut and length is None:
        raise OptionError("pad: cut=True needs length=")
    return Pad(dict(values or {}), length, multiple, side, None if fields is None else tuple(fields), mask, cut)


def padding(batch: PyTree) -> Mean:
    """Return the share of padding in a batch, as a `Mean` over all its tokens, on its device.

    To log it, return it as a metric of the loss: ``return loss, {"padding": ft.data.padding(batch)}``.

    Args:
        batch: a dict with a tensor ``documents`` (-1 is padding) or ``attention_mask`` (0 or False is padding).

    Raises:
        BatchError: if the batch has neither.

    >>> float(padding({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]])}))
    0.25
    """
    mask = batch.get("documents", batch.get(MASK)) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor):
        raise BatchError(
            f"padding: the batch has neither documents nor {MASK}; make it by ft.data.pack, or by "
            'ft.data.pad(mask="tokens")'
        )
    is_padding = mask == NO_DOCUMENT if "documents" in batch else mask == 0
    return Mean(is_padding.sum().float(), is_padding.new_full((), mask.numel(), dtype=torch.float32))


def _require_holds(name: str, dtype: torch.dtype, fill: float) -> None:
    """Raise a DataError if a dtype cannot hold the padding value of a field."""
    if dtype.is_floating_point or dtype.is_complex:
        return
    # torch would store -100 as 156 in uint8, and as True in bool.
    lowest, highest = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (lowest <= fill <= highest and fill == int(fill)):
        raise DataError(
            f"pad: field {name} is {dtype_name(dtype)}, which cannot hold the padding value {fill}; "
            f"convert it (to int64), or pass values={{{name!r}: ...}}"
        )


def _names(samples: list[Any]) -> list[str]:
    """Return the names of the fields of samples. Raises a DataError unless these are mappings with the same fields."""
    if not samples:
        raise DataError("pad: the batch has no samples; needs at least one")
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise DataError(
                f"pad: a sample is a {type(sample).__name__}; needs mappings from names of fields to values"
            )
        if sample.keys() != samples[0].keys():
            raise DataError(f"pad: samples of one batch have the fields {list(samples[0])} and {list(sample)}")
    return list(samples[0])


def _tensor(name: str, value: Any) -> Tensor:
    """Return the value of a field as a tensor. Raises a DataError if it is not one of numbers."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"pad: field {name} holds a {type(value).__name__}; needs a tensor or numbers, or leave it out of the "
            f"samples: {error}"
        ) from error
