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
"""Number of attempts to make a temporary directory and lock it before another process removes it."""
MIN_BYTES_FOR_THREAD = 2**16
"""Number of bytes above which a chunk is hashed in another thread; for fewer, this takes longer."""
MANIFEST_BYTES = 4096
"""Upper estimate of the bytes of a manifest per tensor, to check the free space."""


class Written(NamedTuple):
    """The frozen parameters in an earlier checkpoint: its directory, their files, and the sha256 of each by number."""

    directory: Path
    files: Collection[str]
    digests: Mapping[int, str]


@dataclass(frozen=True)
class LocalTree:
    """A flattened tree, and the tensors and blocks in it that this rank writes.

    Args:
        flat: the flattened tree, with tensors on the device meta in place of the leaves.
        blocks: the blocks of each divided tensor, by the number of the tensor and the rank that writes them.
        locals: the tensors that this rank writes, by number: its blocks, and on the first rank all undivided tensors.
        frozen: the numbers of the frozen parameters that have a file of their own.
        written: the frozen parameters in an earlier checkpoint, which this one shares. Default: this one writes them.
    """

    flat: FlatTree
    blocks: Mapping[int, Mapping[int, Block]]
    locals: Mapping[int, Tensor]
    frozen: frozenset[int] = frozenset()
    written: Written | None = None

    @functools.cached_property
    def entries(self) -> list[TensorEntry]:
        """Its tensors as in the manifest, without digests; computed when needed, in the thread that writes."""
        return tensor_entries(self.flat, self.frozen)

    @functools.cached_property
    def indices(self) -> dict[str, str]:
        """The texts of the indices of models with two files, by name."""
        return indices(self.entries) if self.frozen else {}

    @property
    def to_write(self) -> list[int]:
        """The numbers of the tensors that are not in an earlier checkpoint."""
        shared = frozenset() if self.written is None else self.frozen
        return [number for number in range(len(self.flat.leaves)) if number not in shared]


WriteLeaves: TypeAlias = Callable[[Path, LocalTree], list[str]]
"""A function of a directory and a tree that writes the tensors ``tree.to_write``, and returns the sha256 of each."""


def local_tree(flat: FlatTree, rank: int, frozen: frozenset[int] = frozenset()) -> LocalTree:
    """Return the part of a flattened tree that a rank writes; the numbers `frozen` get files of their own."""
    values = dict(enumerate(leaf.value for leaf in flat.leaves))
    blocks = {number: blocks_of_ranks(value) for number, value in values.items() if has_many_ranks(value)}
    locals_ = {number: local_part(value) for number, value in values.items() if rank in blocks.get(number, {0})}
    leaves = [leaf._replace(value=on_meta(leaf.value)) for leaf in flat.leaves]
    return LocalTree(flat._replace(leaves=leaves), blocks, locals_, frozen)


def copied_to_host(tree: LocalTree, buffers: Sequence[Tensor]) -> LocalTree:
    """Return a tree with its tensors copied to host memory; synchronize with an accelerator before reading them.

    `buffers` are the copies of the last call, in order; they are reused where shapes, strides and dtypes are the same.
    """
    reusable, copies = dict(zip(tree.locals, buffers, strict=False)), {}
    for number, tensor in tree.locals.items():
        buffer = reusable.get(number)
        if buffer is None or _memory_format(buffer) != _memory_format(tensor):
            # Pinned, so that a copy from an accelerator is asynchronous.
            buffer = torch.empty_like(tensor, device=HOST, pin_memory=backends.of(tensor.device).pinned_memory)
        copies[number] = buffer.copy_(tensor.detach(), non_blocking=True)
    return dataclasses.replace(tree, locals=copies)


def _memory_format(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _write_alone(directory: Path, tree: LocalTree) -> list[str]:
    """Write the tensors on one rank, and return the sha256 of each."""
    entries = {number: tree.entries[number] for number in tree.to_write}
    digests = dict[tuple[str, str], str]()
    for file in sorted({entry.file for entry in entries.values()}):
        tensors = [(entry.info, tree.locals[number]) for number, entry in entries.items() if entry.file == file]
        for key, digest in write_tensors(directory / file, tensors).items():
            digests[file, key] = digest
    return [digests[entry.file, entry.key] for entry in entries.values()]


def write(
    path: Path, tree: LocalTree, draft: Manifest, texts: Mapping[str, str], write_leaves: WriteLeaves = _write_alone
) -> Manifest:
    """Write a tree as a new directory, atomically, and return its manifest: `draft` with tensors and files added.

    `texts` are additional files by name. `write_leaves` may write the tensors on many ranks.
    """
    _require_texts(texts, tree)
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
    """Link the files of the earlier checkpoint into a new one, and return the sha256 of each tensor in them."""
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
    """Check that an argument is a mapping of trees by name. Raises a StructureError if not."""
    if not isinstance(trees, Mapping):
        raise StructureError(f"{function}: {name} is a {type(trees).__name__}; needs trees by name: {{'state': state}}")


def require_savable(tree: PyTree, texts: Mapping[str, str]) -> None:
    """Check that a tree and additional files can be saved, apart from the disk; reads no tensor.

    Raises a CheckpointError if the tree cannot be saved, and an OptionError if `texts` cannot.
    """
    flat = flatten(tree)
    content = local_tree(flat, 0, frozen_numbers(flat))
    _require_texts(texts, content)
    tensors = tuple(dataclasses.replace(entry, sha256="0" * 64) for entry in content.entries)
    _dumped(Manifest(None, "", {}, {}, flat.treedef, tensors))


def _require_texts(texts: Mapping[str, str], tree: LocalTree) -> None:
    """Raise an OptionError unless `texts` can be read again, and have names of files that the checkpoint has not."""
    used_names = {NAME, *tree.indices, *(entry.file for entry in tree.entries)}
    for name in texts:
        is_file_name = isinstance(name, str) and FILE_NAME.fullmatch(name)
        if not is_file_name or name in used_names:
            raise OptionError(
                f"save: texts has the name {name!r}; needs a relative path of a file that the checkpoint does not have"
            )
        text: Any = texts[name]
        if not isinstance(text, str):
            raise OptionError(f"save: texts[{name!r}] is a {type(text).__name__}; needs a str, such as json.dumps(...)")
        if (length := len(text.encode())) > MAX_BYTES:
            raise OptionError(
                f"save: texts[{name!r}] has {length:,} bytes, and {MAX_BYTES:,} are read; write it beside it"
            )


def temporary_path(path: Path) -> Path:
    """Return a new path beside `path` for a directory that is being written or removed; the next save removes it."""
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
        try:
            files.make_directory(temporary)
            # Another process that saves at this moment may remove it before it is locked.
            with suppress(BlockingIOError, FileNotFoundError):
                return temporary, files.hold(temporary)
        except OSError:
            with suppress(OSError):
                files.remove(temporary)
            raise
    raise CheckpointError(
        f"save: {path} could not be written: other processes removed its temporary directory {MAX_ATTEMPTS} times; "
        "save at another time than they, or in another directory"
    )


def _require_room(path: Path, tensors: Iterable[TensorInfo]) -> None:
    """Make the parent directory. Raises a CheckpointError if `path` exists or the disk has no room for `tensors`."""
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
    """Make the folders within a directory for files with these names, and return them."""
    folders: set[Path] = set()
    for name in names:
        folders.update(parent for parent in (directory / name).parents if directory in parent.parents)
    # A folder sorts before the folders in it.
    for folder in sorted(folders):
        files.make_directory(folder)
    return sorted(folders)


def _write_texts(directory: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """Write additional files, and return the sha256 of each by name."""
    digests = {}
    for name, text in texts.items():
        data = text.encode()
        with files.created(directory / name) as descriptor:
            files.write(descriptor, data)
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests


def _write_manifest(directory: Path, folders: Sequence[Path], manifest: Manifest) -> None:
    """Write the manifest, after all other files, and sync the directory and its folders to disk."""
    data = _dumped(manifest)
    with files.created(directory / NAME) as descriptor:
        files.write(descriptor, data)
    for folder in (*folders, directory):
        files.sync_directory(folder)


def _dumped(manifest: Manifest) -> bytes:
    """Return a manifest as bytes. Raises a CheckpointError if it is too large to be read."""
    data = dump(manifest)
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"save: the manifest of {len(manifest.tensors):,} tensors takes {len(data):,} bytes, and {MAX_BYTES:,} are "
            "read; save fewer tensors, for example by stacking tensors of one shape"
        )
    return data


def _commit(temporary: Path, path: Path) -> None:
    """Rename a complete directory to `path`, and sync the new name to disk."""
    try:
        files.rename(temporary, path)
        files.sync_directory(path.parent)
    except OSError:
        # The new name may not be on disk, so undo the rename; unless it failed: `path` may be of another process.
        if not files.exists(temporary):
            files.rename(path, temporary)
        raise


def write_tensors(
    path: Path, entries: Sequence[tuple[TensorInfo, Tensor]], metadata: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write a safetensors file, and return the sha256 of each tensor, computed while its bytes are written."""
    file_layout = layout([info for info, _ in entries], metadata)
    digests = {}
    with files.created(path) as descriptor, ThreadPoolExecutor(1) as pool:
        files.write(descriptor, file_layout.header)
        for info, tensor in sorted(entries, key=lambda entry: file_layout.offsets[entry[0].key]):
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
