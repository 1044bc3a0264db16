"""Write a tree to a directory atomically: all of it is on disk, or nothing."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain.checkpoint import files
from ftrain.checkpoint.layout import TensorInfo, chunks, layout, strides
from ftrain.checkpoint.manifest import FILE_NAME, MAX_BYTES, NAME, Manifest, StoredTensor, dump, environment
from ftrain.checkpoint.treedef import FlatTree, Leaf, dotted, flatten
from ftrain.errors import CheckpointError, OptionError
from ftrain.tree import HOST
from ftrain.types import PyTree

STATE = "state.safetensors"
MODEL_FIELDS = "params", "frozen", "buffers"
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
MIN_BYTES_FOR_THREAD = 2**16
"""Bytes below which hashing in another thread takes longer than hashing at once."""
MANIFEST_ROOM = 4096
"""Bytes reserved in a manifest for each tensor."""


class Placement(NamedTuple):
    """A leaf, the file that it is written to, and its name in the file."""

    leaf: Leaf
    file: str
    key: str

    @property
    def info(self) -> TensorInfo:
        """Its name, dtype and shape in the file."""
        return TensorInfo(self.key, self.leaf.value.dtype, tuple(self.leaf.value.shape))


def save(
    path: str | Path, tree: PyTree, *, step: int | None = None, run: str = "", texts: Mapping[str, str] | None = None
) -> None:
    """Save a tree exactly, as a new directory that is on disk when this returns.

    Parameters and buffers of a `TrainState` go to ``params/model.safetensors`` under their dotted names, so that
    any reader of safetensors loads the model. All other tensors go to ``state.safetensors``. ``MANIFEST.json`` holds
    the structure, the numbers and strings among the leaves, and a sha256 of every tensor. Nothing is pickled. The
    files are written to a temporary directory beside `path`, which is renamed when all of them are on disk: a save
    that fails or is killed leaves `path` as it was. Leaves may be dense tensors, bool, int, float, complex, str and
    bytes.

    Args:
        path: of the new directory, which must not exist.
        tree: any tree, such as a `TrainState`; its tensors may be tied, strided, and on any device.
        step: steps of training done, for the manifest.
        run: id of the run, for the manifest.
        texts: content of additional files by their names in the directory, such as ``{"params/config.json": ...}``.

    Raises:
        CheckpointError: when `path` exists, a leaf cannot be saved, or writing fails.
        OptionError: for a name in `texts` that is outside of the directory or in use.
    """
    flat = flatten(tree)
    write(Path(path), flat, Notes(step, run, {}, environment(device_of(flat.leaves)), dict(texts or {})))


class Notes(NamedTuple):
    """What a manifest holds beside the tree, and the content of additional files by name."""

    step: int | None
    run: str
    metrics: Mapping[str, Any]
    environment: Mapping[str, Any]
    texts: Mapping[str, str]


def device_of(leaves: Sequence[Leaf]) -> torch.device:
    """Return the device of the first leaf that is not on the CPU; the CPU when there is none."""
    devices = (leaf.value.device for leaf in leaves)
    return next((device for device in devices if device != HOST), HOST)


def write(path: Path, flat: FlatTree, notes: Notes) -> None:
    """Write a flattened tree; raises as `save` does."""
    placements = _place_leaves(flat, notes.texts)
    with new_directory(path, [leaf.value for leaf in flat.leaves]) as temporary:
        _write_files(temporary, flat, placements, notes)


def require_savable(tree: PyTree, texts: Mapping[str, str]) -> None:
    """Check everything in a save that does not depend on the disk, without reading a tensor.

    Raises:
        CheckpointError: for leaves, keys and containers that cannot be saved.
        OptionError: for a name in `texts` that is outside of the directory or in use.
    """
    _place_leaves(flatten(tree), texts)


def _place_leaves(flat: FlatTree, texts: Mapping[str, str]) -> list[Placement]:
    placements = name_files(flat.leaves)
    for name in texts:
        if not FILE_NAME.fullmatch(name) or name == NAME or name in {item.file for item in placements}:
            raise OptionError(f"save: texts has the name {name!r}; needs a relative one that is free")
    return placements


@contextmanager
def new_directory(path: Path, tensors: Iterable[Tensor]) -> Iterator[Path]:
    """Context of a temporary directory, which is renamed to `path` when the context ends without an error.

    Checks first that the disk has room for `tensors`.

    Raises:
        CheckpointError: when `path` exists, or writing fails.
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        _make_room(path, tensors)
        files.make_directory(temporary)
        holder = files.hold(temporary)
        try:
            yield temporary
            _commit(temporary, path)
        finally:
            files.release(holder)
    except BaseException as error:
        # Remove the files of the failed attempt; if that fails too, the next save removes them.
        with suppress(OSError):
            if files.exists(temporary):
                files.remove(temporary)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"save: {path} could not be written: {error}; what was saved before is as it was"
            ) from error
        raise


def _make_room(path: Path, tensors: Iterable[Tensor]) -> None:
    files.make_directories(path.parent)
    if files.exists(path):
        raise CheckpointError(f"save: {path} exists already; choose another name, or remove it")
    remove_abandoned(path.parent)
    needed = sum(tensor.nbytes + MANIFEST_ROOM for tensor in tensors) + MANIFEST_ROOM
    room = files.free(path.parent)
    if room < needed:
        raise CheckpointError(
            f"save: {path} needs {needed:,} bytes and {room:,} are free; free some, or keep fewer checkpoints"
        )


def remove_abandoned(directory: Path) -> None:
    """Remove the temporary directories of saves that were killed, but not of those that are running."""
    for name in files.names(directory):
        if TEMPORARY.fullmatch(name) and files.is_abandoned(directory / name):
            files.remove(directory / name)


def name_files(leaves: Sequence[Leaf]) -> list[Placement]:
    """Choose a file and a name in it for each tensor."""
    used: set[tuple[str, str]] = set()
    placements = []
    for leaf in leaves:
        file, name = _file_and_key(leaf)
        key, number = name, 0
        # Different paths may have the same text, and safetensors reserves one name.
        while (file, key) in used or key == "__metadata__":
            number += 1
            key = f"{name}#{number}"
        used.add((file, key))
        placements.append(Placement(leaf, file, key))
    return placements


def _file_and_key(leaf: Leaf) -> tuple[str, str]:
    state_path = leaf.state_path
    within = leaf.path[len(state_path) :] if state_path is not None else ()
    if state_path is None or len(within) < 2 or within[0] not in MODEL_FIELDS:
        return STATE, dotted(leaf.path)
    name = ".".join(str(part) for part in (state_path[1:] if state_path[:1] == ("state",) else state_path)) or "model"
    file = f"params/{name}.safetensors"
    return (file if FILE_NAME.fullmatch(file) else STATE), ".".join(map(str, within[1:]))


def _write_files(directory: Path, flat: FlatTree, placements: Sequence[Placement], notes: Notes) -> None:
    texts = notes.texts
    file_names = *texts, *(item.file for item in placements)
    folders = sorted(
        {parent for name in file_names for parent in (directory / name).parents if directory in parent.parents}
    )
    for folder in folders:
        files.make_directory(folder)
    digests: dict[tuple[str, str], str] = {}
    for file in sorted({item.file for item in placements}):
        entries = [(item.info, item.leaf.value) for item in placements if item.file == file]
        digests.update({(file, key): value for key, value in write_tensors(directory / file, entries).items()})
    for name, text in texts.items():
        with files.created(directory / name) as descriptor:
            files.write(descriptor, text.encode())
    tensors = tuple(_stored_tensor(item, digests[item.file, item.key]) for item in placements)
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    step, run, metrics, surroundings, _ = notes
    manifest = Manifest(step, run, metrics, surroundings, flat.treedef, tensors, hashes)
    data = dump(manifest)
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"save: the manifest of {len(tensors):,} tensors takes {len(data):,} bytes, and {MAX_BYTES:,} are read; "
            "save fewer tensors, or put numbers of a kind into one"
        )
    with files.created(directory / NAME) as descriptor:
        files.write(descriptor, data)
    for folder in (*folders, directory):
        files.sync_directory(folder)


def _commit(temporary: Path, path: Path) -> None:
    try:
        files.rename(temporary, path)
        files.sync_directory(path.parent)
    except OSError:
        # It may not be on disk, so it must not keep its name; a directory at `path` may also be another process's.
        if not files.exists(temporary):
            files.rename(path, temporary)
        raise


def _stored_tensor(item: Placement, digest: str) -> StoredTensor:
    tensor = item.leaf.value
    stride = strides(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(dotted(item.leaf.path), dtype, tuple(tensor.shape), item.file, item.key, digest, stride)


def write_tensors(
    path: Path, entries: Sequence[tuple[TensorInfo, Tensor]], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write a safetensors file, and return the sha256 of each tensor, computed while its bytes are written."""
    plan = layout([info for info, _ in entries], metadata)
    digests = {}
    with files.created(path) as descriptor, ThreadPoolExecutor(1) as pool:
        files.write(descriptor, plan.header)
        for info, tensor in sorted(entries, key=lambda entry: plan.offsets[entry[0].key]):
            digest = hashlib.sha256()
            for chunk in chunks(tensor):
                if len(chunk) < MIN_BYTES_FOR_THREAD:
                    digest.update(chunk)
                    files.write(descriptor, chunk)
                else:
                    hashing = pool.submit(digest.update, chunk)
                    files.write(descriptor, chunk)
                    hashing.result()
            digests[info.key] = digest.hexdigest()
    return digests
