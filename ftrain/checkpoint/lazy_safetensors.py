"""Tensors in safetensors files, read when they are needed, whole or a slice."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ftrain import tree
from ftrain.checkpoint import files
from ftrain.checkpoint.safetensors_with_config import MAX_TEXT_BYTES
from ftrain.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Hugging Face's names of the file that says which tensor is in which file, and of a single file."""
FLOATS = "F64", "F32", "F16", "BF16"
"""Codes of dtypes that hold weights as they are. Weights in another dtype, such as float8, may need a scale."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open safetensors file, which is read when it is needed.

    Args:
        file: the open file.
        name: the name of the tensor in the file.
        shape: its shape.
        code: the name that safetensors has for its dtype in the file.
        dtype: the dtype in which it is read. Default: that in the file.
        device: the device to which it is read.
    """

    file: Any
    name: str
    shape: tuple[int, ...]
    code: str
    dtype: torch.dtype | None = None
    device: torch.device = tree.HOST

    @property
    def ndim(self) -> int:
        """Its number of axes."""
        return len(self.shape)

    def like(self, tensor: Tensor, device: torch.device) -> StoredTensor:
        """Return this tensor, to be read to `device` in the dtype of another tensor."""
        return dataclasses.replace(self, dtype=tensor.dtype, device=device)

    def read(self) -> Tensor:
        """Read and return the whole tensor."""
        return self._converted(self.file.get_tensor(self.name))

    def narrow(self, axis: int, start: int, length: int) -> Tensor:
        """Read and return a slice along one axis; no more of the file is read."""
        if length == 0:  # safetensors has no empty slices.
            shape = (*self.shape[:axis], 0, *self.shape[axis + 1 :])
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        index = (*[slice(None)] * axis, slice(start, start + length))
        return self._converted(self.file.get_slice(self.name)[index])

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, or of a model directory of Hugging Face, without reading their values.

    Raises a CheckpointError if there is no such file, or one is malformed.
    """
    if path.name == INDEX:
        path = path.parent
    if not files.is_directory(files.resolved(path)):
        return _tensors_of(path)
    names = files.names(path)
    if INDEX not in names:
        if SINGLE not in names:
            raise CheckpointError(f"{path}: there is neither {SINGLE} nor {INDEX}; pass the path of the file")
        return _tensors_of(path / SINGLE)
    try:
        file_of = json.loads(files.read(files.resolved(path / INDEX), MAX_TEXT_BYTES))["weight_map"]
        tensors = {file: _tensors_of(path / Path(file).name) for file in sorted(set(file_of.values()))}
        return {name: tensors[file][name] for name, file in file_of.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX}: cannot be read: {type(error).__name__}: {error}") from error


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file. Raises a CheckpointError if it cannot be read."""
    try:
        file: Any = safe_open(str(path), "pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_slice(name)
            tensors[name] = StoredTensor(file, name, tuple(tensor.get_shape()), tensor.get_dtype())
        return tensors
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {type(error).__name__}: {error}") from error
