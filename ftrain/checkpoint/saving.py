"""Write a tree to a directory atomically: all of it is on disk, or nothing."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain import backends
from ftrain._torch import on_meta
from ftrain._torch.dtensor import local_part
from ftrain.checkpoint import files
from ftrain.checkpoint.blocks import Block, blocks_of_ranks, has_many_ranks
from ftrain.checkpoint.layout import TensorInfo, chunks, layout
from ftrain.checkpoint.manifest import FILE_NAME, MAX_BYTES, NAME, Manifest, TensorEntry, dump
from ftrain.checkpoint.model_files import frozen_numbers, indices, tensor_entries
from ftrain.checkpoint.treedef import FlatTree, flatten
from ftrain.errors import CheckpointError, OptionError, StructureError
from ftrain.tree import HOST
from ftrain.types import PyTree

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
MAX_ATTEMPTS = 100
"""Number of attempts to make a temporary directory before another process removes it."""
MIN_BYTES_FOR_THREAD = 2**16
"""Number of bytes below which hashing in another thread takes longer than hashing in this one."""
MANIFEST_BYTES = 4096
"""Number of bytes of a manifest per tensor, at most, to check the free space."""


class Written(NamedTuple):
    """A checkpoint that has the frozen parameters, their files in it, and the sha256 of each by its number."""

    directory: Path
    files: Collection[str]
    digests: Mapping[int, str]


@dataclass(frozen=True)
class LocalTree:
    """A flattened tree of which this rank has some blocks; on one rank, all of them.

    Args:
        flat: the flattened tree, with tensors on the device meta in place of the leaves.
        blocks: the blocks of each divided tensor, by the number of the tensor and the rank that writes them.
        locals: what this rank writes, by the number of the tensor. The first rank writes what is not divided.
        frozen: the numbers of the frozen parameters, which have a file of their own; empty if they have none.
        written: what an earlier checkpoint has in such a file, and this one shares.
    """

    flat: FlatTree
    blocks: Mapping[int, Mapping[int, Block]]
    locals: Mapping[int, Tensor]
    frozen: frozenset[int] = frozenset()
    written: Written | None = None

    @functools.cached_property
    def entries(self) -> list[TensorEntry]:
        """Its tensors as in the manifest, without digests; made in the thread that writes."""
        return tensor_entries(self.flat, self.frozen)

    @functools.cached_property
    def indices(self) -> dict[str, str]:
        """The texts of the indices of models with two files, by name."""
        return indices(self.entries) if self.frozen else {}

    @property
    def to_write(self) -> list[int]:
        """The numbers of the tensors that are not written yet."""
        numbers = range(len(self.flat.leaves))
        return [number for number in numbers if self.written is None or number not in self.frozen]


WriteLeaves: TypeAlias = Callable[[Path, LocalTree], list[str]]
"""``(directory, tree) -> digests``: write the tensors ``tree.to_write``, and return the sha256 of each."""


def local_tree(flat: FlatTree, rank: int, frozen: frozenset[int] = frozenset()) -> LocalTree:
    """Return what a rank writes of a flattened tree; the tensors with the numbers `frozen` get files of their own."""
    values = dict(enumerate(leaf.value for leaf in flat.leaves))
    blocks = {number: blocks_of_ranks(value) for number, value in values.items() if has_many_ranks(value)}
    locals_ = {number: local_part(value) for number, value in values.items() if rank in blocks.get(number, {0})}
    leaves = [leaf._replace(value=on_meta(leaf.value)) for leaf in flat.leaves]
    return LocalTree(flat._replace(leaves=leaves), blocks, locals_, frozen)


def copied_to_host(tree: LocalTree, buffers: Sequence[Tensor]) -> LocalTree:
    """Return a tree with copies of the blocks in host memory; synchronize with an accelerator before reading them.

    The copies go to `buffers`, those of the last call, where these have the same shapes, strides and dtypes.
    """
    earlier, copies = dict(zip(tree.locals, buffers, strict=False)), {}
    for number, tensor in tree.locals.items():
        buffer = earlier.get(number)
        if buffer is None or _memory_format(buffer) != _memory_format(tensor):
            # Pinned, so that a copy from an accelerator is asynchronous.
            buffer = torch.empty_like(tensor, device=HOST, pin_memory=backends.of(tensor.device).pinned_memory)
        copies[number] = buffer.copy_(tensor.detach(), non_blocking=True)
    return dataclasses.replace(tree, locals=copies)


def _memory_format(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _write_alone(directory: Path, tree: LocalTree) -> list[str]:
    """Write the tensors on one rank, and return the sha256 of each."""
    entries, digests = {number: tree.entries[number] for number in tree.to_write}, dict[tuple[str, str], str]()
    for file in sorted({entry.file for entry in entries.values()}):
        tensors = [(entry.info, tree.locals[number]) for number, entry in entries.items() if entry.file == file]
        digests.update({(file, key): value for key, value in write_tensors(directory / file, tensors).items()})
    return [digests[entry.file, entry.key] for entry in entries.values()]


def write(
    path: Path, tree: LocalTree, draft: Manifest, texts: Mapping[str, str], write_leaves: WriteLeaves = _write_alone
) -> Manifest:
    """Write a tree as a new directory, atomically, and return its manifest: the draft with tensors and files.

    `write_leaves` may write the tensors on many ranks.
    """
    _require_free_names(texts, tree)
    texts = {**texts, **tree.indices}
    with new_directory(path, [tree.entries[number].info for number in tree.to_write]) as temporary:
        folders = _make_folders(temporary, {*texts, *(entry.file for entry in tree.entries)})
        digests = _link_written(temporary, tree)
        digests.update(zip(tree.to_write, write_leaves(temporary, tree), strict=True))
        tensors = tuple(dataclasses.replace(entry, sha256=digests[number]) for number, entry in enumerate(tree.entries))
        manifest = dataclasses.replace(draft, tensors=tensors, files=_write_texts(temporary, texts))
        _write_manifest(temporary, folders, manifest)
    return manifest


def _link_written(directory: Path, tree: LocalTree) -> dict[int, str]:
    """Give the files that are written already a name in a new checkpoint; return the sha256 of each tensor in them."""
    if tree.written is None:
        return {}
    for file in sorted(tree.written.files):
        files.link(tree.written.directory / file, directory / file)
    return {**tree.written.digests}


def texts_by_name(function: str, texts: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of `texts`. Raises an OptionError if they are not texts by name."""
    if not isinstance(texts, Mapping | None):
        raise OptionError(f"{function}: texts is {texts!r:.60}; needs texts by name, such as {{'config.json': '...'}}")
    return dict(texts or {})


def require_named(function: str, name: str, trees: Any) -> None:
    """Check that trees are given by name. Raises a StructureError if not."""
    if not isinstance(trees, Mapping):
        raise StructureError(f"{function}: {name} is a {type(trees).__name__}; needs trees by name: {{'state': state}}")


def require_savable(tree: PyTree, texts: Mapping[str, str]) -> None:
    """Check what does not depend on the disk, without reading a tensor.

    Raises a CheckpointError for a tree that cannot be saved, and an OptionError for `texts` that cannot.
    """
    flat = flatten(tree)
    _require_free_names(texts, local_tree(flat, 0, frozen_numbers(flat)))


def _require_free_names(texts: Mapping[str, str], tree: LocalTree) -> None:
    names = {NAME, *tree.indices, *(entry.file for entry in tree.entries)}
    for name in texts:
        is_name = isinstance(name, str) and FILE_NAME.fullmatch(name)
        if not is_name or name in names:
            raise OptionError(
                f"save: texts has the name {name!r}; needs a relative path of a file that the checkpoint does not have"
            )
        text: Any = texts[name]
        if not isinstance(text, str):
            raise OptionError(f"save: texts[{name!r}] is a {type(text).__name__}; needs a str, such as json.dumps(...)")


def temporary_path(path: Path) -> Path:
    """Return a new name beside a directory, for its next or its last content; the next save removes leftovers."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def new_directory(path: Path, tensors: Iterable[TensorInfo]) -> Iterator[Path]:
    """Context of a temporary directory, which is renamed to `path` when the context ends without an error.

    Raises a CheckpointError when `path` exists, the disk has no room for `tensors`, or writing fails.
    """
    try:
        _require_room(path, tensors)
        temporary, holder = _make_temporary(path)
        try:
            yield temporary
            _commit(temporary, path)
        except BaseException:
            # Remove the files of the failed attempt; if that fails too, the next save removes them.
            with suppress(OSError):
                files.remove(temporary)
            raise
        finally:
            files.release(holder)
    except OSError as error:
        raise CheckpointError(
            f"save: {path} could not be written: {error}; earlier checkpoints are unchanged"
        ) from error


def _make_temporary(path: Path) -> tuple[Path, int]:
    """Make a temporary directory and lock it; return it and the descriptor of its lock."""
    for _ in range(MAX_ATTEMPTS):
        temporary = temporary_path(path)
        files.make_directory(temporary)
        # Another process that saves at this moment may remove it before it is locked.
        with suppress(BlockingIOError, FileNotFoundError):
            return temporary, files.hold(temporary)
    raise CheckpointError(
        f"save: {path} could not be written: other processes removed its temporary directory {MAX_ATTEMPTS} times; "
        "save at another time than they, or in another directory"
    )


def _require_room(path: Path, tensors: Iterable[TensorInfo]) -> None:
    files.make_directories(path.parent)
    if files.exists(path):
        raise CheckpointError(f"save: {path} exists already; choose another name, or remove it")
    remove_abandoned(path.parent)
    needed = sum(tensor.bytes + MANIFEST_BYTES for tensor in tensors) + MANIFEST_BYTES
    free = files.free_bytes(path.parent)
    if free < needed:
        raise CheckpointError(
            f"save: {path} needs {needed:,} bytes and {free:,} are free; remove other files, or older checkpoints"
        )


def remove_abandoned(directory: Path) -> None:
    """Remove the temporary directories of saves that were killed, but not of those that are running."""
    for name in files.names(directory):
        if TEMPORARY.fullmatch(name):
            files.remove_abandoned(directory / name)


def _make_folders(directory: Path, names: Iterable[str]) -> list[Path]:
    folders = sorted({parent for name in names for parent in (directory / name).parents if directory in parent.parents})
    for folder in folders:
        files.make_directory(folder)
    return folders


def _write_texts(directory: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """Write additional files, and return the sha256 of each."""
    digests = {}
    for name, text in texts.items():
        data = text.encode()
        with files.created(directory / name) as descriptor:
            files.write(descriptor, data)
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests


def _write_manifest(directory: Path, folders: Sequence[Path], manifest: Manifest) -> None:
    """Write the manifest, after all other files, and sync the directory and its folders to disk."""
    data = dump(manifest)
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"save: the manifest of {len(manifest.tensors):,} tensors takes {len(data):,} bytes, and {MAX_BYTES:,} are "
            "read; save fewer tensors, for example by stacking tensors of one shape"
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
        # The new name may not be on disk, so it is taken back. If the rename failed, `path` may be another process's.
        if not files.exists(temporary):
            files.rename(path, temporary)
        raise


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
