"""Read a checkpoint, and believe nothing that its digests do not confirm."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain.backends.oom import is_out_of_memory
from ftrain.checkpoint import files
from ftrain.checkpoint.layout import LARGEST, as_bytes, layout
from ftrain.checkpoint.manifest import MOST_BYTES, NAME, Manifest, Stored, parse
from ftrain.checkpoint.treedef import Json, children, contents, describe, printable, rebuild
from ftrain.checkpoint.validate import choose, filled, renamed
from ftrain.errors import CheckpointError, DeviceError, StructureError
from ftrain.types import PyTree

READERS = 2
"""Threads that read and hash; both leave the interpreter to others meanwhile."""
MOST_NAMED = 20
"""Names of files in a message."""


class Place(NamedTuple):
    """Where the bytes of a tensor are: an open file and an offset."""

    descriptor: int
    offset: int


def load(
    path: str | Path,
    *,
    like: PyTree = None,
    partial: bool = False,
    rename: Mapping[str, str] | None = None,
) -> PyTree:
    """Read a tree that `save` has written, and check every byte of it.

    Args:
        path: the directory.
        like: a tree of the structure, shapes and dtypes that are expected; the result has its types, and its
            tensors are where those of `like` are. Without it the result has the types that were saved, on the CPU.
        partial: take from the file what fits in name, and leave the rest of `like` as it is.
        rename: old to new beginnings of paths, such as ``{"params.encoder": "params.backbone"}``.

    Raises:
        CheckpointError: when there is none, or it is damaged; the message names the file and the tensor.
        DeviceError: when memory runs out while it is read.
        StructureError: when it differs from `like`; it lists every path at once.
        OptionError: for a name in `rename` that nothing has.
    """
    path = Path(path)
    with _named(path):
        manifest = _manifest(path)
        if like is not None:
            return _like(path, manifest, manifest.tree, like, partial=partial, rename=rename or {})
        if partial or rename:
            raise StructureError("load: partial and rename are about the tree given as like=, and there is none")
        return _as_saved(path, manifest, manifest.tree)


def load_parts(path: Path, like: Mapping[str, PyTree], *, on_host: bool = False) -> tuple[Manifest, dict[str, PyTree]]:
    """`load` of a dict whose values are like those given, and as they were saved where none is given.

    Raises:
        CheckpointError: as `load` does.
        StructureError: as `load` does.
    """
    with _named(path):
        manifest = _manifest(path)
        parts = {
            key: _like(path, manifest, node, like[key], partial=False, rename={}, on_host=on_host)
            if key in like
            else _as_saved(path, manifest, node)
            for key, node in children(manifest.tree).items()
        }
    if missing := [key for key in like if key not in parts]:
        raise StructureError(f"load: {path} has no {', '.join(missing)}; it was not saved by a run")
    return manifest, parts


def load_contents(path: Path) -> dict[tuple[Any, ...], Any]:
    """Return what is at each path of a checkpoint: a `Container`, a tensor, or another leaf.

    Raises:
        CheckpointError: as `load` does.
    """
    with _named(path):
        manifest = _manifest(path)
        return contents(manifest.tree, read_tensors(path, manifest, manifest.tensors))


def _as_saved(path: Path, manifest: Manifest, skeleton: Json) -> PyTree:
    held = {id(item) for item in contents(skeleton, manifest.tensors).values()}
    numbers = [number for number, item in enumerate(manifest.tensors) if id(item) in held]
    tensors = read_tensors(path, manifest, [manifest.tensors[number] for number in numbers])
    return rebuild(skeleton, dict(zip(numbers, tensors, strict=True)))


def _like(
    path: Path,
    manifest: Manifest,
    skeleton: Json,
    like: PyTree,
    *,
    partial: bool,
    rename: Mapping[str, str],
    on_host: bool = False,
) -> PyTree:
    found = renamed(contents(skeleton, manifest.tensors), rename)
    chosen = choose(found, describe(like).contents, str(path), partial=partial)
    needed = {id(item): item for item in chosen.values() if isinstance(item, Stored)}
    tensors = dict(zip(needed, read_tensors(path, manifest, [*needed.values()]), strict=True))
    return filled(like, {at: tensors.get(id(item), item) for at, item in chosen.items()}, on_host=on_host)


def verify(path: str | Path) -> Manifest:
    """Check every byte of a checkpoint, in little memory, and return its manifest.

    Raises:
        CheckpointError: when there is none, or it is damaged; the message names the file and the tensor.
        DeviceError: when memory runs out while it is read.
    """
    path = Path(path)
    with _named(path):
        manifest = _manifest(path)
        with _opened(path, manifest) as places:
            _concurrently(lambda item: _check(item, places[item.file, item.key]), manifest.tensors)
    return manifest


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong in reading into an error that names the checkpoint: of the host, if it lacks memory."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except (OSError, RuntimeError, MemoryError, OverflowError) as error:
        if is_out_of_memory(error):
            raise DeviceError(
                f"{path}: memory ran out while it was read ({type(error).__name__}: {error}), which says nothing of "
                "its bytes; free memory, or raise the limit of the process (ulimit -v)"
            ) from error
        raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check that it lists what is in the directory.

    Raises:
        CheckpointError: when it does not, or is malformed.
    """
    with _named(path):
        return _manifest(path)


def _manifest(path: Path) -> Manifest:
    if not files.is_directory(path):
        raise CheckpointError("is no directory" if files.exists(path) else "there is no such checkpoint")
    manifest = parse(files.read(path / NAME, MOST_BYTES))
    listed = {NAME, *manifest.files, *(item.file for item in manifest.tensors)}
    found = set(_walk(path))
    if found != listed:
        missing, more = sorted(listed - found), sorted(found - listed)
        raise CheckpointError(
            "; ".join(
                [f"files are missing: {_few(missing)}"] * bool(missing)
                + [f"holds what the manifest does not list: {_few(more)}"] * bool(more)
            )
        )
    for name, digest in manifest.files.items():
        if hashlib.sha256(files.read(path / name, MOST_BYTES)).hexdigest() != digest:
            raise CheckpointError(f"{name}: the bytes are not those that were saved")
    return manifest


def _few(found: Sequence[str]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" * (len(found) > MOST_NAMED)
    return ", ".join(f"{printable(name):.200}" for name in found[:MOST_NAMED]) + more


def _walk(path: Path) -> Iterator[str]:
    """The files below a directory, however deep."""
    left = [""]
    while left:
        below = left.pop()
        for name in files.names(path / below):
            if files.is_directory(path / below / name):
                left.append(f"{below}{name}/")
            else:
                yield f"{below}{name}"


@contextmanager
def _opened(path: Path, manifest: Manifest) -> Iterator[dict[tuple[str, str], Place]]:
    """Open the files of the tensors, check their headers, and tell where each tensor lies."""
    places = {}
    with ExitStack() as stack:
        for file in sorted({item.file for item in manifest.tensors}):
            plan = layout([item.kind for item in manifest.tensors if item.file == file])
            descriptor = stack.enter_context(files.opened(path / file))
            length = files.size(descriptor)
            if length != plan.size:
                raise CheckpointError(f"{file}: has {length:,} bytes and needs {plan.size:,}: cut off, or another file")
            header = bytearray(len(plan.header))
            files.read_into(descriptor, memoryview(header), 0)
            if header != plan.header:
                raise CheckpointError(f"{file}: its header is not that of the tensors in the manifest")
            places.update({(file, key): Place(descriptor, offset) for key, offset in plan.offsets.items()})
        yield places


def read_tensors(path: Path, manifest: Manifest, chosen: Sequence[Stored]) -> list[Tensor]:
    """Read some of the tensors of a checkpoint to the CPU.

    Raises:
        CheckpointError: when a file is not the one that was written, or a digest does not match.
    """
    with _opened(path, manifest) as places:
        return _concurrently(lambda item: _read(item, places[item.file, item.key]), chosen)


def _concurrently(function: Callable[[Stored], Any], items: Sequence[Stored]) -> list[Any]:
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(function, items))


def _read(item: Stored, place: Place) -> Tensor:
    tensor = torch.empty(item.shape, dtype=item.kind.dtype)
    target, digest = as_bytes(tensor), hashlib.sha256()
    for start in range(0, len(target), LARGEST):
        part = target[start : start + LARGEST]
        files.read_into(place.descriptor, part, place.offset + start)
        digest.update(part)
    _require_digest(item, digest.hexdigest())
    if item.stride is None:
        return tensor
    return torch.empty_strided(item.shape, item.stride, dtype=tensor.dtype).copy_(tensor)


def _check(item: Stored, place: Place) -> None:
    left, offset, digest = item.kind.bytes, place.offset, hashlib.sha256()
    buffer = memoryview(bytearray(min(left, LARGEST)))
    while left:
        part = buffer[: min(left, LARGEST)]
        files.read_into(place.descriptor, part, offset)
        digest.update(part)
        left, offset = left - len(part), offset + len(part)
    _require_digest(item, digest.hexdigest())


def _require_digest(item: Stored, digest: str) -> None:
    if digest != item.sha256:
        raise CheckpointError(f"{item.file}: {printable(item.path)}: the bytes are not those that were saved")
