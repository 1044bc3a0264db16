"""Read and write directories in the format of other libraries: a safetensors file and a JSON file.

A third file has our digests of both.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ftrain.checkpoint import files
from ftrain.checkpoint.layout import CODES, TensorInfo, as_bytes, layout
from ftrain.checkpoint.manifest import signed
from ftrain.checkpoint.saving import new_directory, write_tensors
from ftrain.checkpoint.treedef import printable
from ftrain.errors import CheckpointError

MAX_TEXT_BYTES, MAX_TENSOR_BYTES = 2**26, 2**37
"""The largest number of bytes to read from a file."""
DIGESTS = "ftrain_digests.json"
"""The name of the file of digests, which other libraries ignore."""
SAMPLES = 1024
"""Number of elements of a tensor that its fingerprint covers."""


class TensorsAndConfig(NamedTuple):
    """Tensors by name, the metadata in the header of their file, and the content of the JSON file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    config: dict[str, Any]


def write_safetensors(path: Path, names: tuple[str, str], content: TensorsAndConfig) -> None:
    """Write a safetensors and a JSON file with these names to a new directory, atomically.

    A third file, `DIGESTS`, has the sha256 of each tensor, of the header and of the JSON file. Raises a CheckpointError
    when `path` exists, safetensors does not support the dtype of a tensor, or writing fails.
    """
    for name, tensor in content.tensors.items():
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}, which safetensors does not support")
    infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in content.tensors.items()]
    text = json.dumps(content.config, indent=2).encode()
    header = layout(infos, content.metadata).header
    with new_directory(path, infos) as temporary:
        digests_of_tensors = write_tensors(
            temporary / names[0], list(zip(infos, content.tensors.values(), strict=True)), content.metadata
        )
        digests = {names[0]: {"header": _sha256(header), "tensors": digests_of_tensors}, names[1]: _sha256(text)}
        signed_digests = signed(json.dumps(digests, indent=1).removesuffix("\n}").encode())
        for name, data in ((names[1], text), (DIGESTS, signed_digests)):
            with files.created(temporary / name) as descriptor:
                files.write(descriptor, data)
        files.sync_directory(temporary)


def read_safetensors(path: Path, names: tuple[str, str]) -> TensorsAndConfig:
    """Return the content of a directory that `write_safetensors` or another library wrote; tensors are on the CPU.

    Files without `DIGESTS` are not verified. Raises a CheckpointError when a file is missing, malformed or changed.
    """
    try:
        data = files.read(files.resolved(path / names[0]), MAX_TENSOR_BYTES)
        text = files.read(files.resolved(path / names[1]), MAX_TEXT_BYTES)
        if files.exists(path / DIGESTS):
            _require_digests(path, names, data, text)
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        config = json.loads(text)
    except (OSError, SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: {names[1]} holds a {type(config).__name__}, needs a JSON object")
    return TensorsAndConfig(tensors, header.get("__metadata__") or {}, config)


def _require_digests(path: Path, names: tuple[str, str], data: bytes, text: bytes) -> None:
    """Check the bytes of the two files by `DIGESTS`. Raises a CheckpointError that names the changed tensors."""
    saved = files.read(files.resolved(path / DIGESTS), MAX_TEXT_BYTES)
    if saved != signed(saved[: -len(signed(b""))]):
        raise CheckpointError(f"{path / DIGESTS}: its own digest does not match; it was changed after it was written")
    digests = json.loads(saved)
    start = 8 + int.from_bytes(data[:8], "little")
    changed = []
    if _sha256(text) != digests[names[1]]:
        changed.append(names[1])
    if _sha256(data[:start]) != digests[names[0]]["header"]:
        changed.append(f"{names[0]}: the header")
    else:
        entries = json.loads(data[8:start]).items()
        offsets = {name: entry["data_offsets"] for name, entry in entries if name != "__metadata__"}
        for name, digest in digests[names[0]]["tensors"].items():
            begin, end = offsets[name]
            if _sha256(data[start + begin : start + end]) != digest:
                changed.append(f"{names[0]}: {printable(name)}")
    if changed:
        raise CheckpointError(
            f"{path}: {', '.join(changed)}: the bytes are not those that were saved; if they were changed on purpose, "
            f"remove {DIGESTS}"
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fingerprint(tensor: Tensor) -> str:
    """Return a text that identifies a tensor: its dtype, and a digest of its shape and evenly spaced elements."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
    digest = hashlib.sha256(repr(tuple(tensor.shape)).encode())
    digest.update(as_bytes(sample))
    return f"{CODES[tensor.dtype]}:{digest.hexdigest()[:16]}"
