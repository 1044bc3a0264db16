"""Write a tree to a directory so that it is there as a whole, on the disk, or not at all."""

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
from ftrain.checkpoint.layout import Kind, chunks, layout, strides
from ftrain.checkpoint.manifest import FILE_NAME, MOST_BYTES, NAME, Manifest, Stored, dump, environment
from ftrain.checkpoint.treedef import Described, Leaf, describe, dotted
from ftrain.errors import CheckpointError, OptionError
from ftrain.tree.ops import HOST
from ftrain.types import PyTree

STATE = "state.safetensors"
MODEL = "params", "frozen", "buffers"
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
SMALL = 2**16
"""Bytes below which a hash is done before another thread would have begun with it."""
MANIFEST_ROOM = 4096
"""Bytes of a manifest a tensor, at the most."""


class Placed(NamedTuple):
    """A leaf, the file it goes to, and its name there."""

    leaf: Leaf
    file: str
    key: str


def save(
    path: str | Path, tree: PyTree, *, step: int | None = None, run: str = "", texts: Mapping[str, str] | None = None
) -> None:
    """Save a tree as a new directory, bit for bit; when this returns, it is on the disk.

    Parameters and buffers of a `TrainState` go to ``params/model.safetensors`` under their dotted names, so that
    any reader of safetensors loads the model; everything else goes to ``state.safetensors``, and ``MANIFEST.json``
    holds the structure, the numbers and strings among the leaves, and a sha256 of every tensor. Nothing is pickled.
    Written is a temporary sibling, which is renamed when all of it is on the disk; what fails or is killed before
    leaves `path` as it was. Leaves may be dense tensors, bool, int, float, complex, str and bytes.

    Args:
        path: of the directory to make; it must not be there.
        tree: any tree, a `TrainState` for one; its tensors may be tied, strided, on any device.
        step: noted in the manifest.
        run: an id, noted in the manifest.
        texts: further files, by their names in the directory, such as ``{"params/config.json": ...}``.

    Raises:
        CheckpointError: when something is at `path` already, a leaf cannot be saved, or the disk does not take it.
        OptionError: for a name in `texts` that leads elsewhere.
    """
    described = describe(tree)
    write(Path(path), described, Notes(step, run, {}, environment(device_of(described.leaves)), dict(texts or {})))


class Notes(NamedTuple):
    """What a manifest says beside the tree, and files that go with it."""

    step: int | None
    run: str
    metrics: Mapping[str, Any]
    environment: Mapping[str, Any]
    texts: Mapping[str, str]


def device_of(leaves: Sequence[Leaf]) -> torch.device:
    """Where a tree is, keys and counters on the CPU aside."""
    devices = (leaf.value.device for leaf in leaves)
    return next((device for device in devices if device != HOST), HOST)


def write(path: Path, described: Described, notes: Notes) -> None:
    """`save` for a tree that was taken apart.

    Raises:
        CheckpointError: as `save` does.
        OptionError: as `save` does.
    """
    placed = _placed(described, notes.texts)
    with made(path, [leaf.value for leaf in described.leaves]) as temporary:
        _fill(temporary, described, placed, notes)


def require_savable(tree: PyTree, texts: Mapping[str, str]) -> None:
    """Check all of a save that does not depend on the disk, without copying or reading a tensor.

    Raises:
        CheckpointError: for what cannot be saved in the tree.
        OptionError: for a name in `texts` that leads elsewhere.
    """
    _placed(describe(tree), texts)


def _placed(described: Described, texts: Mapping[str, str]) -> list[Placed]:
    placed = place(described.leaves)
    for name in texts:
        if not FILE_NAME.fullmatch(name) or name == NAME or name in {item.file for item in placed}:
            raise OptionError(f"save: texts has the name {name!r}; needs a relative one that is free")
    return placed


@contextmanager
def made(path: Path, tensors: Iterable[Tensor]) -> Iterator[Path]:
    """Context of a temporary directory, with room for tensors, that gets its name when the context ends well.

    Raises:
        CheckpointError: when something has the name already, or the disk does not take it.
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        _prepare(path, tensors)
        files.make_directory(temporary)
        holder = files.hold(temporary)
        try:
            yield temporary
            _commit(temporary, path)
        finally:
            files.release(holder)
    except BaseException as error:
        # A failed attempt leaves nothing behind; if that fails too, the next save clears it.
        with suppress(OSError):
            if files.exists(temporary):
                files.remove(temporary)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"save: {path} could not be written: {error}; what was saved before is as it was"
            ) from error
        raise


def _prepare(path: Path, tensors: Iterable[Tensor]) -> None:
    files.make_directories(path.parent)
    if files.exists(path):
        raise CheckpointError(f"save: {path} is there already; choose another name, or remove it")
    clear(path.parent)
    needed = sum(tensor.nbytes + MANIFEST_ROOM for tensor in tensors) + MANIFEST_ROOM
    room = files.free(path.parent)
    if room < needed:
        raise CheckpointError(
            f"save: {path} needs {needed:,} bytes and {room:,} are free; free some, or keep fewer checkpoints"
        )


def clear(directory: Path) -> None:
    """Remove what saves have left in a directory that were killed; those under way are let be."""
    for name in files.names(directory):
        if TEMPORARY.fullmatch(name) and files.is_abandoned(directory / name):
            files.remove(directory / name)


def place(leaves: Sequence[Leaf]) -> list[Placed]:
    """Decide in which file each tensor lies, and under which name."""
    taken: set[tuple[str, str]] = set()
    placed = []
    for leaf in leaves:
        file, name = _place(leaf)
        key, number = name, 0
        # Paths of different keys may be written alike, and one name is the format's own.
        while (file, key) in taken or key == "__metadata__":
            number += 1
            key = f"{name}#{number}"
        taken.add((file, key))
        placed.append(Placed(leaf, file, key))
    return placed


def _place(leaf: Leaf) -> tuple[str, str]:
    owner = leaf.owner
    within = leaf.path[len(owner) :] if owner is not None else ()
    if owner is None or len(within) < 2 or within[0] not in MODEL:
        return STATE, dotted(leaf.path)
    name = ".".join(str(part) for part in (owner[1:] if owner[:1] == ("state",) else owner)) or "model"
    file = f"params/{name}.safetensors"
    return (file if FILE_NAME.fullmatch(file) else STATE), ".".join(map(str, within[1:]))


def _fill(directory: Path, described: Described, placed: Sequence[Placed], notes: Notes) -> None:
    texts = notes.texts
    named = *texts, *(item.file for item in placed)
    inside = sorted({above for name in named for above in (directory / name).parents if directory in above.parents})
    for folder in inside:
        files.make_directory(folder)
    digests: dict[tuple[str, str], str] = {}
    for file in sorted({item.file for item in placed}):
        entries = [(_kind(item), item.leaf.value) for item in placed if item.file == file]
        digests.update({(file, key): value for key, value in write_tensors(directory / file, entries).items()})
    for name, text in texts.items():
        with files.created(directory / name) as descriptor:
            files.write(descriptor, text.encode())
    tensors = tuple(_stored(item, digests[item.file, item.key]) for item in placed)
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    step, run, metrics, surroundings, _ = notes
    manifest = Manifest(step, run, metrics, surroundings, described.skeleton, tensors, hashes)
    data = dump(manifest)
    if len(data) > MOST_BYTES:
        raise CheckpointError(
            f"save: the manifest of {len(tensors):,} tensors takes {len(data):,} bytes, and {MOST_BYTES:,} are read; "
            "save fewer tensors, or put numbers of a kind into one"
        )
    with files.created(directory / NAME) as descriptor:
        files.write(descriptor, data)
    for folder in (*inside, directory):
        files.sync_directory(folder)


def _commit(temporary: Path, path: Path) -> None:
    try:
        files.rename(temporary, path)
        files.sync_directory(path.parent)
    except OSError:
        # Not known to be on the disk, so it must not be there either; what is there may also be another's.
        if not files.exists(temporary):
            files.rename(path, temporary)
        raise


def _kind(item: Placed) -> Kind:
    return Kind(item.key, item.leaf.value.dtype, tuple(item.leaf.value.shape))


def _stored(item: Placed, digest: str) -> Stored:
    tensor = item.leaf.value
    stride = strides(tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Stored(dotted(item.leaf.path), dtype, tuple(tensor.shape), item.file, item.key, digest, stride)


def write_tensors(
    path: Path, entries: Sequence[tuple[Kind, Tensor]], notes: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write a safetensors file and return the sha256 of each tensor, computed while the bytes are on their way."""
    plan = layout([kind for kind, _ in entries], notes)
    digests = {}
    with files.created(path) as descriptor, ThreadPoolExecutor(1) as other:
        files.write(descriptor, plan.header)
        for kind, tensor in sorted(entries, key=lambda entry: plan.offsets[entry[0].key]):
            digest = hashlib.sha256()
            for chunk in chunks(tensor):
                if len(chunk) < SMALL:
                    digest.update(chunk)
                    files.write(descriptor, chunk)
                else:
                    hashed = other.submit(digest.update, chunk)
                    files.write(descriptor, chunk)
                    hashed.result()
            digests[kind.key] = digest.hexdigest()
    return digests
