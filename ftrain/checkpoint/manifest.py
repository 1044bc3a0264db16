"""MANIFEST.json: the structure and metadata of a checkpoint, a digest of every tensor, and a digest of itself."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ftrain._version import __version__
from ftrain.backends.device_module import float32_precision
from ftrain.checkpoint.layout import DTYPES, TensorInfo, is_dense
from ftrain.checkpoint.treedef import MALFORMED, Json, decode, encode, items_by_path
from ftrain.errors import CheckpointError

NAME = "MANIFEST.json"
FORMAT, VERSION = "ftrain checkpoint", 2
READABLE = 1, VERSION
"""Versions that can be read. Version 2 names classes by tags, version 1 by their modules."""
MAX_BYTES = 64 * 2**20
"""The largest size of a manifest that is written or read."""
MAX_AXES = 64
"""The largest number of axes of a tensor, that of torch."""
FILE_NAME = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]*/)*[A-Za-z0-9_-][A-Za-z0-9_.-]*")
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Args:
        path: its path in the tree, with dots.
        dtype: its dtype without ``torch.``.
        shape: the shape of the whole tensor, also when it is divided over ranks.
        file: the name of the file that holds it.
        key: its name in this file.
        sha256: the digest of its bytes in row-major order.
        stride: its strides; None if they are those of row-major order.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    key: str
    sha256: str
    stride: tuple[int, ...] | None = None

    @property
    def info(self) -> TensorInfo:
        """Its name, dtype and shape in the file."""
        return TensorInfo(self.key, DTYPES[self.dtype], self.shape)


@dataclass(frozen=True)
class Manifest:
    """Everything in a checkpoint except the values of its tensors.

    Args:
        step: number of training steps done; None for a tree that is not a training state.
        run: id of the run that wrote it; "" without a run.
        metrics: metrics of the state, by name.
        environment: the result of the function `environment` when it was saved.
        tree: the structure of the saved tree as JSON. A tensor is an index into `tensors`; tied tensors share one.
        tensors: every tensor; tied ones once.
        files: the sha256 of every additional file by its name.
    """

    step: int | None
    run: str
    metrics: Mapping[str, Any]
    environment: Mapping[str, Any]
    tree: Json
    tensors: tuple[TensorEntry, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions, the number of threads, the device and the flags on which the bits of a result may depend."""
    return {
        "ftrain": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": float32_precision(),
    }


def dump(manifest: Manifest) -> bytes:
    """Return a manifest as bytes, with its own digest at the end."""
    metrics = {name: encode(value) for name, value in manifest.metrics.items()}
    tensors = [vars(item) for item in manifest.tensors]
    body = {"format": FORMAT, "version": VERSION, **vars(manifest), "metrics": metrics, "tensors": tensors}
    return signed(json.dumps(body, indent=1).removesuffix("\n}").encode())


def signed(text: bytes) -> bytes:
    """Return the text of a JSON object, given without its closing brace, with a last entry: the digest of the text."""
    return text + b',\n "digest": "%s"\n}' % hashlib.sha256(text).hexdigest().encode()


def parse(data: bytes) -> Manifest:
    """Read and check a manifest. Raises a CheckpointError for anything that `dump` would not have written."""
    # Before parsing, which takes up to 100 times as long and as much memory.
    if data != signed(data[: -len(signed(b""))]):
        raise CheckpointError(f"{NAME}: its own digest does not match; it was changed after it was written")
    try:
        body = json.loads(data.decode("utf-8"))
        version = body.get("version")
        if body.get("format") != FORMAT or type(version) is not int or version not in READABLE:
            raise CheckpointError(
                f"{NAME}: the format is {body.get('format')!r:.60}, version {version!r:.60}; this ftrain reads "
                f"{FORMAT!r}, versions {', '.join(map(str, READABLE))}"
            )
        return _manifest(body)
    except MALFORMED as error:
        raise CheckpointError(f"{NAME}: malformed: {type(error).__name__}: {error!s:.200}") from None


def _manifest(body: dict[str, Any]) -> Manifest:
    """Return a manifest from its JSON object. Raises a CheckpointError, or one of `MALFORMED`, if it is not one."""
    step, run = body["step"], body["run"]
    _require(step is None or (type(step) is int and step >= 0), "step", step)
    _require(isinstance(run, str), "run", run)
    for name, expected_type in (("metrics", dict), ("environment", dict), ("tensors", list), ("files", dict)):
        _require(isinstance(body[name], expected_type), name, body[name])
    metrics = {name: decode(value) for name, value in body["metrics"].items()}
    tensors = tuple(_parse_tensor(item) for item in body["tensors"])
    keys = [(item.file, item.key) for item in tensors]
    _require(len(set(keys)) == len(keys), "tensors", "one name in a file twice")
    items_by_path(body["tree"], tensors)  # Raises an error if the tree is malformed.
    files = body["files"]
    for name, digest in files.items():
        _require(_is_file_name(name) and name not in {item.file for item in tensors}, "the name of a file", name)
        _require(_is_digest(digest), f"the sha256 of {name}", digest)
    return Manifest(step, run, metrics, body["environment"], body["tree"], tensors, files)


def _parse_tensor(item: dict[str, Any]) -> TensorEntry:
    """Return the entry of a tensor in a manifest. Raises a CheckpointError, or one of `MALFORMED`, if it is not one."""
    shape, stride = tuple(item["shape"]), item["stride"]
    entry = TensorEntry(**{**item, "shape": shape, "stride": None if stride is None else tuple(stride)})
    is_valid = (
        isinstance(entry.path, str)
        and entry.dtype in DTYPES
        and _is_shape(shape)
        and _is_file_name(entry.file)
        and entry.file.endswith(".safetensors")
        and isinstance(entry.key, str)
        and entry.key != "__metadata__"
        and _is_digest(entry.sha256)
        and (entry.stride is None or (_is_shape(entry.stride) and is_dense(shape, entry.stride)))
    )
    _require(is_valid, "a tensor", item)
    return entry


def _is_shape(value: tuple[Any, ...]) -> bool:
    return len(value) <= MAX_AXES and all(type(length) is int and 0 <= length < 2**62 for length in value)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and FILE_NAME.fullmatch(value) is not None and value != NAME


def _require(is_valid: bool, name: str, value: Any) -> None:
    """Raise a CheckpointError that names a value of a manifest, unless it is valid."""
    if not is_valid:
        raise CheckpointError(f"{NAME}: {name} is {value!r:.100}, which no checkpoint has")
