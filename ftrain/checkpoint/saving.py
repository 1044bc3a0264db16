"""Write a tree to a directory atomically: all of it is on disk, or nothing."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain import backends
from ftrain._torch import on_meta
from ftrain._torch.dtensor import local_part
from ftrain.checkpoint import files
from ftrain.checkpoint.blocks import Block, blocks_of_ranks, has_many_ranks
from ftrain.checkpoint.layout import TensorInfo, chunks, layout, strides
from ftrain.checkpoint.manifest import FILE_NAME, MAX_BYTES, NAME, Manifest, TensorEntry, dump
from ftrain.checkpoint.treedef import Container, FlatTree, Leaf, dotted, flatten
from ftrain.errors import CheckpointError, OptionError
from ftrain.tree import HOST, dtype_name
from ftrain.types import PyTree, TrainState, tree_tag

STATE = "state.safetensors"
MODEL_FIELDS = "params", "frozen", "buffers"
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
MIN_BYTES_FOR_THREAD = 2**16
"""Number of bytes below which hashing in another thread takes longer than hashing in this one."""
MANIFEST_BYTES = 4096
"""Number of bytes of a manifest per tensor, at most, to check the free space."""


class Placement(NamedTuple):
    """A leaf, the file that it is written to, and its name in the file."""

    leaf: Leaf
    file: str
    key: str

    @property
    def info(self) -> TensorInfo:
        """Its name, dtype and shape in the file."""
        return TensorInfo(self.key, self.leaf.value.dtype, tuple(self.leaf.value.shape))


class Notes(NamedTuple):
    """What a manifest holds in addition to the tree, and the content of additional files by name."""

    step: int | None
    run: str
    metrics: Mapping[str, Any]
    environment: Mapping[str, Any]
    texts: Mapping[str, str]


class LocalTree(NamedTuple):
    """A flattened tree of which this rank has some blocks; on one rank, all of them.

    Args:
        flat: the flattened tree, with tensors on the device meta in place of the leaves.
        blocks: for each leaf, its blocks by the ranks that write them.
        locals: the blocks that this rank writes, by the number of their leaf.
        divided: the numbers of leaves that are divided. The others are written by the first rank.
    """

    flat: FlatTree
    blocks: Sequence[Mapping[int, Block]]
    locals: Mapping[int, Tensor]
    divided: frozenset[int]


WriteLeaves: TypeAlias = Callable[[Path, Sequence[Placement], LocalTree], list[str]]
"""``(directory, placements, tree) -> digests``: write the tensors of a tree, and return the sha256 of each."""


def local_tree(flat: FlatTree, rank: int = 0) -> LocalTree:
    """Return what a rank writes of a flattened tree."""
    values = [leaf.value for leaf in flat.leaves]
    blocks = [blocks_of_ranks(value) for value in values]
    locals_ = {number: local_part(value) for number, value in enumerate(values) if rank in blocks[number]}
    leaves = [leaf._replace(value=on_meta(leaf.value)) for leaf in flat.leaves]
    divided = frozenset(number for number, value in enumerate(values) if has_many_ranks(value))
    return LocalTree(flat._replace(leaves=leaves), blocks, locals_, divided)


def copied_to_host(tree: LocalTree, buffers: Sequence[Tensor]) -> LocalTree:
    """Return a tree with copies of the blocks in host memory; synchronize with an accelerator before reading them.

    The copies go to `buffers`, those of the last call, where these have the same shapes, strides and dtypes.
    """
    if len(buffers) != len(tree.locals):
        buffers = [torch.empty(0)] * len(tree.locals)
    pairs = zip(tree.locals.items(), buffers, strict=True)
    return tree._replace(locals={number: _copy_to_host(tensor, buffer) for (number, tensor), buffer in pairs})


def _copy_to_host(tensor: Tensor, buffer: Tensor) -> Tensor:
    fits = buffer.dtype == tensor.dtype and buffer.shape == tensor.shape and buffer.stride() == tensor.stride()
    if not fits:
        # Pinned, so that a copy from an accelerator is asynchronous.
        buffer = torch.empty_like(tensor, device=HOST, pin_memory=backends.of(tensor.device).pinned_memory)
    return buffer.copy_(tensor.detach(), non_blocking=True)


def _write_alone(directory: Path, placements: Sequence[Placement], tree: LocalTree) -> list[str]:
    """Write the tensors on one rank, and return the sha256 of each."""
    digests: dict[tuple[str, str], str] = {}
    for file in sorted({item.file for item in placements}):
        entries = [(item.info, tree.locals[number]) for number, item in enumerate(placements) if item.file == file]
        digests.update({(file, key): value for key, value in write_tensors(directory / file, entries).items()})
    return [digests[item.file, item.key] for item in placements]


def write(path: Path, tree: LocalTree, notes: Notes, write_leaves: WriteLeaves = _write_alone) -> Manifest:
    """Write a tree as a new directory, atomically; `write_leaves` may write the tensors on many ranks."""
    placements = place_leaves(tree.flat, notes.texts)
    with new_directory(path, [leaf.value for leaf in tree.flat.leaves]) as temporary:
        folders = _make_folders(temporary, [*notes.texts, *(item.file for item in placements)])
        digests = write_leaves(temporary, placements, tree)
        tensors = [_tensor_entry(item, digest) for item, digest in zip(placements, digests, strict=True)]
        return _write_manifest(temporary, tree.flat, tensors, notes, folders)


def require_savable(tree: PyTree, texts: Mapping[str, str]) -> None:
    """Check everything in a save that does not depend on the disk, without reading a tensor."""
    place_leaves(flatten(tree), texts)


def place_leaves(flat: FlatTree, texts: Mapping[str, str]) -> list[Placement]:
    """Choose a file and a name in it for each tensor. Raises an OptionError if a name in `texts` is not possible."""
    state_paths = [path for path, item in flat.items_by_path().items() if item == Container(tree_tag(TrainState))]
    used: set[tuple[str, str]] = set()
    placements = []
    for leaf in flat.leaves:
        file, name = _file_and_key(leaf.path, state_paths)
        key, number = name, 0
        # Different paths may have the same text, and safetensors reserves one name.
        while (file, key) in used or key == "__metadata__":
            number += 1
            key = f"{name}#{number}"
        used.add((file, key))
        placements.append(Placement(leaf, file, key))
    for name in texts:
        if not FILE_NAME.fullmatch(name) or name == NAME or name in {item.file for item in placements}:
            raise OptionError(
                f"save: texts has the name {name!r}; needs a relative path of a file that the checkpoint does not have"
            )
    return placements


def _file_and_key(path: tuple[Any, ...], state_paths: Sequence[tuple[Any, ...]]) -> tuple[str, str]:
    """Return the file of a leaf and its name there: a model has a file of its own, with the names of its module."""
    above = [state_path for state_path in state_paths if path[: len(state_path)] == state_path]
    state_path = max(above, key=len, default=path)
    within = path[len(state_path) :]
    if len(within) < 2 or within[0] not in MODEL_FIELDS:
        return STATE, dotted(path)
    name = ".".join(str(part) for part in (state_path[1:] if state_path[:1] == ("state",) else state_path)) or "model"
    file = f"params/{name}.safetensors"
    return (file if FILE_NAME.fullmatch(file) else STATE), ".".join(map(str, within[1:]))


@contextmanager
def new_directory(path: Path, tensors: Iterable[Tensor]) -> Iterator[Path]:
    """Context of a temporary directory, which is renamed to `path` when the context ends without an error.

    Raises a CheckpointError when `path` exists, the disk has no room for `tensors`, or writing fails.
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        _require_room(path, tensors)
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
                f"save: {path} could not be written: {error}; earlier checkpoints are unchanged"
            ) from error
        raise


def _require_room(path: Path, tensors: Iterable[Tensor]) -> None:
    files.make_directories(path.parent)
    if files.exists(path):
        raise CheckpointError(f"save: {path} exists already; choose another name, or remove it")
    remove_abandoned(path.parent)
    needed = sum(tensor.nbytes + MANIFEST_BYTES for tensor in tensors) + MANIFEST_BYTES
    room = files.free(path.parent)
    if room < needed:
        raise CheckpointError(
            f"save: {path} needs {needed:,} bytes and {room:,} are free; remove files, or keep fewer checkpoints"
        )


def remove_abandoned(directory: Path) -> None:
    """Remove the temporary directories of saves that were killed, but not of those that are running."""
    for name in files.names(directory):
        if TEMPORARY.fullmatch(name) and files.is_abandoned(directory / name):
            files.remove(directory / name)


def _make_folders(directory: Path, names: Iterable[str]) -> list[Path]:
    """Make the folders of files in a directory, and return them."""
    folders = sorted({parent for name in names for parent in (directory / name).parents if directory in parent.parents})
    for folder in folders:
        files.make_directory(folder)
    return folders


def _write_manifest(
    directory: Path, flat: FlatTree, tensors: Sequence[TensorEntry], notes: Notes, folders: Sequence[Path]
) -> Manifest:
    """Write everything except the tensors, which are already written, and sync the directory and its folders to disk.

    Raises a CheckpointError if the manifest is too long to be read again.
    """
    digests = {}
    for name, text in notes.texts.items():
        data = text.encode()
        with files.created(directory / name) as descriptor:
            files.write(descriptor, data)
        digests[name] = hashlib.sha256(data).hexdigest()
    manifest = Manifest(notes.step, notes.run, notes.metrics, notes.environment, flat.treedef, tuple(tensors), digests)
    data = dump(manifest)
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"save: the manifest of {len(tensors):,} tensors takes {len(data):,} bytes, and {MAX_BYTES:,} are read; "
            "save fewer tensors, for example by stacking tensors of one shape"
        )
    with files.created(directory / NAME) as descriptor:
        files.write(descriptor, data)
    for folder in (*folders, directory):
        files.sync_directory(folder)
    return manifest


def _commit(temporary: Path, path: Path) -> None:
    try:
        files.rename(temporary, path)
        files.sync_directory(path.parent)
    except OSError:
        # It may not be on disk, so it must not keep its name; a directory at `path` may also be another process's.
        if not files.exists(temporary):
            files.rename(path, temporary)
        raise


def _tensor_entry(item: Placement, digest: str) -> TensorEntry:
    """Return the entry of a tensor in the manifest."""
    path, dtype = dotted(item.leaf.path), dtype_name(item.info.dtype)
    return TensorEntry(path, dtype, item.info.shape, item.file, item.key, digest, strides(item.leaf.value))


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
