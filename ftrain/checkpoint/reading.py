"""Read a checkpoint, and verify every byte by its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftrain import tree as trees
from ftrain._torch.store import rank_and_size
from ftrain.backends.oom import is_out_of_memory
from ftrain.checkpoint import files
from ftrain.checkpoint.blocks import Block, block_of_this_rank, has_many_ranks, runs
from ftrain.checkpoint.layout import CHUNK, as_bytes, layout
from ftrain.checkpoint.manifest import MAX_BYTES, NAME, Manifest, TensorEntry, parse
from ftrain.checkpoint.matching import fill_like, match_leaves, rename_paths
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.treedef import Json, children, flatten, items_by_path, printable, unflatten
from ftrain.errors import (
    CheckpointError,
    DeviceError,
    StructureError,
    UnreachableError,
    as_path,
    listed,
    require_switches,
)
from ftrain.types import PyTree

NUM_READERS = 2
"""Number of threads that read and hash tensors; reading and hashing release the GIL."""


class LoadedCheckpoint(NamedTuple):
    """A loaded checkpoint: its trees by name in `parts`, and its manifest."""

    step: int
    path: Path
    parts: dict[str, PyTree]
    manifest: Manifest

    def __repr__(self) -> str:
        # Without the manifest, which lists every tensor.
        return f"LoadedCheckpoint(step={self.step}, path={str(self.path)!r}, parts={[*self.parts]})"

    @property
    def environment(self) -> Mapping[str, Any]:
        """The versions, the number of threads, the device and the flags of the process that saved it."""
        return self.manifest.environment

    @property
    def run(self) -> dict[str, PyTree]:
        """The tree that `ftrain.fit` saves next to the state. Raises a CheckpointError if `fit` did not save this."""
        run = self.parts.get("run")
        if not isinstance(run, dict) or run.keys() != {"record", "position", "began"}:
            raise CheckpointError(
                f"{self.path}: was not saved by ftrain.fit, which cannot resume from it; use another directory"
            )
        return run


def load(
    path: str | Path,
    *,
    like: PyTree = None,
    partial: bool = False,
    rename: Mapping[str, str] | None = None,
) -> PyTree:
    """Return a tree that `save` has written, after verifying every byte of it.

    If `like` has DTensors of several ranks, all of them must call it: each reads its own blocks and verifies a share
    of the tensors, and an error on one rank is raised on all.

    Args:
        path: the directory of the checkpoint.
        like: a tree with the expected structure, shapes and dtypes. The result has its types, and its tensors are on
            the devices of those of `like`. Default: the types that were saved, on the CPU.
        partial: load the leaves whose paths are in the checkpoint, and keep the other leaves of `like`.
        rename: new prefixes of paths by old ones, such as ``{"params.encoder": "params.backbone"}``. A renamed leaf
            replaces one that has its new path.

    Raises:
        CheckpointError: when it is missing or damaged; the message names the file and the tensor. Without `like`, when
            it has a container that needs it, such as a named tuple.
        DeviceError: when memory runs out.
        StructureError: when it differs from `like`; the message lists the paths, at most 20. With `partial`, when
            nothing would be loaded, or a model without its adapters. For `partial` or `rename` without `like`.
        OptionError: if `path` is not a path, no path in the tree begins with a name in `rename`, or with `rename` two
            leaves have one name.
        RankError: when another rank failed in another way, or did not call this.
    """
    path = as_path("load", "path", path)
    require_switches("load", partial=partial)

    def read_tree() -> PyTree:
        with error_names(path):
            reader = _Reader(path, _read_manifest(path))
            if like is not None:
                return reader.like(reader.manifest.tree, like, partial=partial, rename=rename)
            if partial or rename:
                raise StructureError("load: partial= and rename= need like=, which is missing")
            return reader.as_saved(reader.manifest.tree)

    return Ranks("load", alone=not any(map(has_many_ranks, trees.leaves(like)))).on_each(read_tree)


def load_checkpoint(
    path: Path,
    step: int,
    like: Mapping[str, PyTree],
    ranks: Ranks,
    *,
    on_host: bool,
    accept: Callable[[LoadedCheckpoint], None] | None,
) -> LoadedCheckpoint:
    """Load the checkpoint of a step on all ranks; the arguments are those of `Checkpoints.latest`.

    A tree whose name is not in `like` is loaded as it was saved. Raises the errors of `load` on every rank, and a
    CheckpointError when the checkpoint is of another step, or `accept` rejects it.
    """

    def load() -> LoadedCheckpoint:
        with error_names(path):
            reader = _Reader(path, _read_manifest(path))
            parts = {
                key: reader.like(node, like[key], on_host=on_host) if key in like else reader.as_saved(node)
                for key, node in children(reader.manifest.tree).items()
            }
        if missing := [key for key in like if key not in parts]:
            raise StructureError(f"load: {path} has no {', '.join(missing)}; it was not saved by a run")
        if reader.manifest.step != step:
            raise CheckpointError(f"{path}: is of step {reader.manifest.step}, and was renamed")
        loaded = LoadedCheckpoint(step, path, parts, reader.manifest)
        if accept is not None and ranks.is_first:
            accept(loaded)
        return loaded

    return ranks.on_each(load)


def load_items(path: Path) -> dict[tuple[Any, ...], Any]:
    """Return the `Container`, tensor or other leaf at each path of a checkpoint; raises the errors of `load`."""
    with error_names(path):
        reader = _Reader(path, _read_manifest(path))
        return items_by_path(reader.manifest.tree, reader.read(reader.manifest.tensors))


class _Reader(NamedTuple):
    """Reads trees of one checkpoint."""

    path: Path
    manifest: Manifest

    def as_saved(self, treedef: Json) -> PyTree:
        """Return a saved tree with the types that were saved."""
        used = {id(item) for item in items_by_path(treedef, self.manifest.tensors).values()}
        entries = {number: item for number, item in enumerate(self.manifest.tensors) if id(item) in used}
        return unflatten(treedef, dict(zip(entries, self.read([*entries.values()]), strict=True)))

    def like(
        self,
        treedef: Json,
        like: PyTree,
        *,
        partial: bool = False,
        rename: Mapping[str, str] | None = None,
        on_host: bool = False,
    ) -> PyTree:
        """Return a saved tree with the types and devices of `like`; of its divided tensors, the blocks of this rank."""
        saved, wanted = items_by_path(treedef, self.manifest.tensors), flatten(like).items_by_path()
        items = match_leaves(rename_paths(saved, rename or {}), wanted, str(self.path), partial=partial)
        stored = {tree_path: item for tree_path, item in items.items() if isinstance(item, TensorEntry)}
        divided = {tree_path: item for tree_path, item in stored.items() if has_many_ranks(wanted[tree_path])}
        # By identity: tied leaves have the same entry, which is read once.
        whole = {id(item): item for tree_path, item in stored.items() if tree_path not in divided}
        tensors = dict(zip(whole, self.read([*whole.values()]), strict=True))
        blocks = [(item, block_of_this_rank(wanted[tree_path])) for tree_path, item in divided.items()]
        local_blocks = dict(zip(divided, self.read_blocks(blocks), strict=True))
        values = {tree_path: tensors.get(id(item), item) for tree_path, item in items.items()}
        return fill_like(like, {**values, **local_blocks}, on_host=on_host)

    def read(self, items: Sequence[TensorEntry]) -> list[Tensor]:
        """Read tensors to the CPU, and verify them."""
        with _open_tensor_files(self.path, self.manifest) as offsets:
            return _concurrently(lambda item: _read(item, *offsets[item.file, item.key]), items)

    def read_blocks(self, blocks: Sequence[tuple[TensorEntry, Block]]) -> list[Tensor]:
        """Read the blocks of this rank to the CPU, and verify its share of their tensors."""
        rank, size = rank_and_size()
        verified = [item for item, _ in blocks[rank::size]]
        with _open_tensor_files(self.path, self.manifest) as offsets:
            _concurrently(lambda item: _check(item, *offsets[item.file, item.key]), verified)

            def read_block(item_and_block: tuple[TensorEntry, Block]) -> Tensor:
                item, block = item_and_block
                return _read_block(item, block, *offsets[item.file, item.key])

            return _concurrently(read_block, blocks)


def _read_block(item: TensorEntry, block: Block, descriptor: int, offset: int) -> Tensor:
    """Return a block of a tensor, which begins at `offset` of an open file."""
    local = torch.empty(block.shape, dtype=item.info.dtype)
    target, position, itemsize = as_bytes(local), 0, item.info.dtype.itemsize
    for start, length in runs(block, item.shape):
        run = target[position : position + length * itemsize]
        files.read_into(descriptor, run, offset + start * itemsize)
        position += len(run)
    return local


def verify(path: str | Path) -> Manifest:
    """Verify every byte of a checkpoint without loading it into memory, and return its manifest.

    Raises:
        CheckpointError: when it is missing or damaged; the message names the file and the tensor.
        DeviceError: when memory runs out.
        OptionError: when `path` is not a path.
    """
    return verify_files(as_path("verify", "path", path))


def verify_files(path: Path, *, but: Collection[str] = ()) -> Manifest:
    """Verify a checkpoint as `verify` does, except for the tensors in the files `but`."""
    with error_names(path):
        manifest = _read_manifest(path)
        with _open_tensor_files(path, manifest) as offsets:
            items = [item for item in manifest.tensors if item.file not in but]
            _concurrently(lambda item: _check(item, *offsets[item.file, item.key]), items)
    return manifest


@contextmanager
def error_names(path: Path) -> Iterator[None]:
    """Context that raises a CheckpointError that names the path in place of an error of reading.

    Raises a DeviceError if memory ran out, and an UnreachableError if the content of the checkpoint may be intact.
    """
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except (OSError, RuntimeError, MemoryError, OverflowError) as error:
        if is_out_of_memory(error):
            raise DeviceError(
                f"{path}: memory ran out while it was read ({type(error).__name__}: {error}); the checkpoint may be "
                "intact. Free memory, or raise the limit of the process (ulimit -v)"
            ) from error
        text = f"{path}: cannot be read: {type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in files.UNREACHABLE:
            raise UnreachableError(f"{text}; it may be intact: let this process read it, or try again") from error
        raise CheckpointError(text) from error


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises a CheckpointError unless it lists exactly the files there."""
    with error_names(path):
        return _read_manifest(path)


def _read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, as `read_manifest`, with errors that do not name the path."""
    if not files.is_directory(path):
        if not files.exists(path):
            raise CheckpointError("there is no such checkpoint")
        raise CheckpointError(
            "is not a directory, as ft.checkpoint.save writes it, but a file (those of torch.save: torch.load) or a "
            "link, which is not followed: pass where it leads to"
        )
    _require_no_run(path)
    manifest = parse(files.read(path / NAME, MAX_BYTES))
    in_manifest = {NAME, *manifest.files, *(item.file for item in manifest.tensors)}
    present = set(_files_below(path))
    problems = []
    if missing := in_manifest - present:
        problems.append(f"files are missing: {printable(listed(sorted(missing)))}")
    if unlisted := present - in_manifest:
        problems.append(f"has files that the manifest does not list: {printable(listed(sorted(unlisted)))}")
    if problems:
        raise CheckpointError("; ".join(problems))
    for name, digest in manifest.files.items():
        if hashlib.sha256(files.read(path / name, MAX_BYTES)).hexdigest() != digest:
            raise CheckpointError(f"{name}: the bytes are not those that were saved")
    return manifest


def _require_no_run(path: Path) -> None:
    """Raise a CheckpointError if a directory is that of a run, which holds checkpoints and is not one."""
    if files.exists(path / NAME):
        return
    checkpoints = [name for name in files.names(path) if files.exists(path / name / NAME)]
    if checkpoints:
        raise CheckpointError(
            f"is the directory of a run, with the checkpoints {printable(listed(checkpoints))}; pass one of "
            "them, or Checkpoints(directory, every=...).latest().path"
        )


def _files_below(path: Path, folder: str = "") -> Iterator[str]:
    """Yield the files in a directory and its folders, but not hidden ones, which other programs may write there."""
    for name in files.names(path / folder):
        if name.startswith("."):
            continue
        if files.is_directory(path / folder / name):
            yield from _files_below(path, f"{folder}{name}/")
        else:
            yield f"{folder}{name}"


@contextmanager
def _open_tensor_files(path: Path, manifest: Manifest) -> Iterator[dict[tuple[str, str], tuple[int, int]]]:
    """Context of (descriptor, offset) of each tensor by its file and key.

    Raises a CheckpointError if the size or the header of a file is not the expected one.
    """
    offsets = {}
    with ExitStack() as stack:
        for file in sorted({item.file for item in manifest.tensors}):
            expected = layout([item.info for item in manifest.tensors if item.file == file])
            descriptor = stack.enter_context(files.opened(path / file))
            length = files.size(descriptor)
            if length != expected.size:
                raise CheckpointError(
                    f"{file}: has {length:,} bytes and needs {expected.size:,}: cut off, or another file"
                )
            header = bytearray(len(expected.header))
            files.read_into(descriptor, memoryview(header), 0)
            if header != expected.header:
                raise CheckpointError(f"{file}: its header is not that of the tensors in the manifest")
            offsets.update({(file, key): (descriptor, offset) for key, offset in expected.offsets.items()})
        yield offsets


def _concurrently(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Return the results of a function for each item, called in `NUM_READERS` threads."""
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(function, items))


def _read(item: TensorEntry, descriptor: int, offset: int) -> Tensor:
    """Return a tensor, which begins at `offset` of an open file, after verifying its bytes."""
    tensor = torch.empty(item.shape, dtype=item.info.dtype)
    _check(item, descriptor, offset, as_bytes(tensor))
    if item.stride is None:
        return tensor
    return torch.empty_strided(item.shape, item.stride, dtype=tensor.dtype).copy_(tensor)


def _check(item: TensorEntry, descriptor: int, offset: int, target: memoryview | None = None) -> None:
    """Read the bytes of a tensor, into `target` if it is given. Raises a CheckpointError if their digest differs."""
    size, digest = item.info.bytes, hashlib.sha256()
    buffer = memoryview(bytearray(min(size, CHUNK) if target is None else 0))
    for start in range(0, size, CHUNK):
        chunk = buffer[: size - start] if target is None else target[start : start + CHUNK]
        files.read_into(descriptor, chunk, offset + start)
        digest.update(chunk)
    if digest.hexdigest() != item.sha256:
        raise CheckpointError(f"{item.file}: {printable(item.path)}: the bytes are not those that were saved")
