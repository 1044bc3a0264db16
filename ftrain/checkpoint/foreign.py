"""Directories whose format is another's: safetensors and text files, without a manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ftrain.checkpoint import files
from ftrain.checkpoint.layout import CODES, Kind, as_bytes
from ftrain.checkpoint.saving import made, write_tensors
from ftrain.errors import CheckpointError

LARGEST_TEXT, LARGEST_TENSORS = 2**24, 2**37
"""Bytes of a file, at the most."""
SAMPLES = 1024
"""Elements of a tensor that its mark depends on."""


class Foreign(NamedTuple):
    """Tensors by name, notes in their header, and what a JSON file beside them says."""

    tensors: dict[str, Tensor]
    notes: dict[str, str]
    said: dict[str, Any]


def write_foreign(path: Path, names: tuple[str, str], content: Foreign) -> None:
    """Write a safetensors and a JSON file of these names to a new directory, which is there as a whole or not at all.

    Raises:
        CheckpointError: when something is at `path` already, a tensor has a dtype that safetensors has not, or the disk
            does not take it.
    """
    for name, tensor in content.tensors.items():
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}, which safetensors has not")
    entries = [(Kind(name, each.dtype, tuple(each.shape)), each) for name, each in content.tensors.items()]
    with made(path, content.tensors.values()) as temporary:
        write_tensors(temporary / names[0], entries, content.notes)
        with files.created(temporary / names[1]) as descriptor:
            files.write(descriptor, json.dumps(content.said, indent=2).encode())
        files.sync_directory(temporary)


def read_foreign(path: Path, names: tuple[str, str]) -> Foreign:
    """Read what `write_foreign` writes, or another program has written, to the CPU.

    Raises:
        CheckpointError: when a file is missing or malformed.
    """
    if not files.is_directory(path):
        raise CheckpointError(f"{path}: {'is no directory' if files.exists(path) else 'there is no such directory'}")
    there = files.names(path)
    for name in names:
        if name not in there:
            raise CheckpointError(f"{path}: there is no {name}, but {', '.join(there) or 'nothing'}")
    try:
        data = files.read(path / names[0], LARGEST_TENSORS)
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        said = json.loads(files.read(path / names[1], LARGEST_TEXT))
    except (OSError, SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(said, dict):
        raise CheckpointError(f"{path}: {names[1]} holds a {type(said).__name__}, needs a JSON object")
    return Foreign(tensors, header.get("__metadata__") or {}, said)


def mark(tensor: Tensor) -> str:
    """Return the dtype of a tensor and a digest of its shape and of elements all over it."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
    digest = hashlib.sha256(repr(tuple(tensor.shape)).encode())
    digest.update(as_bytes(some))
    return f"{CODES[tensor.dtype]}:{digest.hexdigest()[:16]}"
