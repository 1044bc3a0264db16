"""Save a tree on one rank or on many. Each rank writes its own blocks, into the same files that one rank would write.

Ranks send each other only digests: another rank reads each block from the disk and compares its digest with that of
the rank that wrote it.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ftrain._torch.store import rank_and_size
from ftrain.checkpoint import files
from ftrain.checkpoint.blocks import Block, contiguous_rows, has_many_ranks, runs
from ftrain.checkpoint.layout import CHUNK, DTYPES, chunks, layout
from ftrain.checkpoint.manifest import Manifest, TensorEntry, environment
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.reading import verify_files
from ftrain.checkpoint.saving import LocalTree, local_tree, texts_by_name, write
from ftrain.checkpoint.treedef import Json, flatten
from ftrain.errors import CheckpointError, OptionError, as_path
from ftrain.tree import device_off_host
from ftrain.types import PyTree

DIGEST_DIGITS = 32
"""Number of hexadecimal digits of the sha256 of a block that ranks send each other."""


class _Target(NamedTuple):
    """A tensor of the first rank's tree: the place where it is written, its blocks by rank, and that of this rank.

    `offset` is that of the whole tensor in the file, in bytes; `local` is None if this rank writes no block.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    blocks: Mapping[int, Block]
    local: Tensor | None


def save(
    path: str | Path, tree: PyTree, *, step: int | None = None, run: str = "", texts: Mapping[str, str] | None = None
) -> None:
    """Save a tree exactly, as a new directory that is on disk when this returns.

    Parameters and buffers of a `TrainState` go to ``params/model.safetensors`` under their dotted names, which any
    reader of safetensors loads. All other tensors go to ``state.safetensors``. ``MANIFEST.json`` holds the structure,
    the other leaves, and a sha256 of every tensor. Nothing is pickled. The files are written to a temporary directory
    next to `path`, which is renamed when they are on disk: a save that fails or is killed leaves `path` as it was.

    A tree with DTensors of several ranks must be saved by all of them: each writes its own blocks, the first one also
    the undivided tensors, and none holds a whole leaf. All must see one directory; its path may differ. Any other
    tree, as at level 0 of `sharded`, is saved by the one rank that calls this.

    Args:
        path: path of the new directory, which must not exist.
        tree: a tree of dense tensors, which may be tied, strided and on any device, and bool, int, float, complex, str
            and bytes.
        step: number of training steps done, for the manifest.
        run: id of the run, for the manifest.
        texts: content of additional files by their names in the directory, such as ``{"params/config.json": ...}``.

    Raises:
        CheckpointError: when `path` exists, a leaf cannot be saved, or writing fails.
        OptionError: if an argument is not as above, or a name in `texts` is outside the directory or in use.
        RankError: when another rank failed in another way, or did not call this.
    """
    path = as_path("save", "path", path)
    if (step is not None and (type(step) is not int or step < 0)) or not isinstance(run, str):
        raise OptionError(f"save: step is {step!r} and run {run!r}; needs a whole number of at least 0, and a str")
    flat = flatten(tree)
    device = device_off_host(leaf.value for leaf in flat.leaves)
    texts, draft = texts_by_name("save", texts), Manifest(step, run, {}, environment(device), flat.treedef)
    ranks = Ranks("save", alone=not any(has_many_ranks(leaf.value) for leaf in flat.leaves))
    with ranks.all_or_none():
        content = local_tree(flat, ranks.rank)
        if ranks.size == 1:
            _write_alone(path, content, draft, texts)
        elif ranks.is_first:
            write_verified(path, content, draft, texts, ranks)
        else:
            help_write(path.parent, content, ranks)


def _write_alone(path: Path, tree: LocalTree, draft: Manifest, texts: Mapping[str, str]) -> None:
    """Write a tree that is not divided over ranks; an error gets a note if other ranks may write to the same path."""
    try:
        write(path, tree, draft, texts)
    except CheckpointError as error:
        if rank_and_size()[1] > 1:
            error.add_note(
                "Nothing in this tree is divided over ranks, as at level 0 of ft.sharded. If every rank has saved it, "
                "let one rank do so: if mesh.get_rank() == 0"
            )
        raise


def write_verified(path: Path, tree: LocalTree, draft: Manifest, texts: Mapping[str, str], ranks: Ranks) -> Manifest:
    """Write and verify a checkpoint as a new directory, on the first rank; the others call `help_write`."""
    if ranks.size == 1:
        write(path, tree, draft, texts)
        # The files that it shares with an earlier checkpoint were verified when that one was written.
        return verify_files(path, but=tree.written.files if tree.written else ())

    def write_on_ranks(directory: Path, tree: LocalTree) -> list[str]:
        return _write_and_verify(path.parent, directory.name, _make_files(directory, tree), tree, ranks)

    return write(path, tree, draft, texts, write_on_ranks)


def help_write(parent: Path, tree: LocalTree, ranks: Ranks) -> None:
    """Write and verify the share of a rank that is not the first; `parent` is the directory of the checkpoints."""
    _write_and_verify(parent, "", [], tree, ranks)


def _write_and_verify(parent: Path, name: str, tensors: Sequence[Json], tree: LocalTree, ranks: Ranks) -> list[str]:
    """Write and verify tensors on all ranks, and return their digests.

    The first rank sends the others the name of the directory in `parent`, and the tensors of `_make_files`.
    """
    name, tensors = ranks.on_first(lambda: (name, tensors))
    directory = parent / name
    targets: list[_Target] = []

    def write_blocks() -> list[str]:
        targets.extend(_targets(tensors, tree, ranks))
        with _opened(directory, targets, files.opened_to_write) as opened:
            return [_write_block(opened[target.file], target, ranks.rank) for target in targets]

    digests_of_blocks = ranks.gather(write_blocks)

    def verify() -> list[str]:
        with _opened(directory, targets, files.opened) as opened:
            return [
                _verified(opened[target.file], target, [digests[number] for digests in digests_of_blocks])
                for number, target in enumerate(targets)
                if number % ranks.size == ranks.rank
            ]

    shares = ranks.gather(verify)
    return [shares[number % ranks.size][number // ranks.size] for number in range(len(targets))]


def _make_files(directory: Path, tree: LocalTree) -> list[Json]:
    """Make the files with their headers and sizes.

    Returns for each tensor: path, dtype, shape, file, offset in the file, and whether it is divided over ranks.
    """
    offsets: dict[tuple[str, str], int] = {}
    entries = {number: tree.entries[number] for number in tree.to_write}
    for file in sorted({entry.file for entry in entries.values()}):
        file_layout = layout([entry.info for entry in entries.values() if entry.file == file])
        with files.created(directory / file) as descriptor:
            files.write(descriptor, file_layout.header)
            files.resize(descriptor, file_layout.size)
        offsets.update({(file, key): offset for key, offset in file_layout.offsets.items()})
    return [
        [*_signature(entry), entry.file, offsets[entry.file, entry.key], number in tree.blocks]
        for number, entry in entries.items()
    ]


def _signature(entry: TensorEntry) -> list[Json]:
    return [entry.path, entry.dtype, list(entry.shape)]


def _targets(tensors: Sequence[Json], tree: LocalTree, ranks: Ranks) -> Iterator[_Target]:
    """Yield a target for each of `tensors`, the results of `_make_files` on the first rank.

    Raises a CheckpointError if this rank has not the same divided tensors in the same order. Undivided tensors may
    differ: the first rank alone writes them.
    """
    divided = iter([number for number in tree.to_write if number in tree.blocks])
    # The number of each tensor in the tree of this rank; -1 for an undivided one that another rank writes.
    numbers = tree.to_write if ranks.is_first else [-1] * len(tensors)
    for number, (*signature, file, offset, is_divided) in zip(numbers, tensors, strict=True):
        path, dtype, shape = signature
        blocks: Mapping[int, Block] = {0: Block((0,) * len(shape), tuple(shape))}
        local = tree.locals.get(number)
        if is_divided:
            number_here = next(divided, -1)
            if number_here < 0 or _signature(tree.entries[number_here]) != signature:
                raise CheckpointError(
                    f"save: the first rank saves {path}, {dtype}{shape}, and rank {ranks.rank} something else in its "
                    "place; every rank must save the same state"
                )
            blocks, local = tree.blocks[number_here], tree.locals.get(number_here)
        yield _Target(path, DTYPES[dtype], tuple(shape), file, offset, blocks, local)


@contextmanager
def _opened(
    directory: Path, targets: Sequence[_Target], opening: Callable[[Path], AbstractContextManager[int]]
) -> Iterator[dict[str, int]]:
    """Context of the descriptors of all files of `targets` by name, each opened with `opening`.

    Raises a CheckpointError in place of an error of the system.
    """
    try:
        with ExitStack() as stack:
            names = sorted({target.file for target in targets})
            yield {name: stack.enter_context(opening(directory / name)) for name in names}
    except OSError as error:
        raise CheckpointError(
            f"save: {directory} could not be written on every rank: {error}; all ranks must see one directory. Earlier "
            "checkpoints are unchanged"
        ) from error


def _write_block(descriptor: int, target: _Target, rank: int) -> str:
    """Write the block of this rank, and return the digest of its bytes; "" if this rank writes none."""
    if target.local is None:
        return ""
    digest, itemsize = hashlib.sha256(), target.dtype.itemsize
    for start, row in contiguous_rows(target.local, target.blocks[rank], target.shape):
        offset = target.offset + start * itemsize
        for chunk in chunks(row):
            digest.update(chunk)
            files.write_at(descriptor, chunk, offset)
            offset += len(chunk)
    return digest.hexdigest()[:DIGEST_DIGITS]


def _verified(descriptor: int, target: _Target, digests: Sequence[str]) -> str:
    """Return the digest of a tensor that is read from the disk.

    `digests` are those of its blocks by rank, as `_write_block` returned them. Raises a CheckpointError if one differs.
    """
    whole, by_rank = hashlib.sha256(), {rank: hashlib.sha256() for rank in target.blocks}
    buffer, itemsize = memoryview(bytearray(CHUNK)), target.dtype.itemsize
    # The runs of all ranks in the order of the file: the digest of the whole tensor needs its bytes in this order.
    runs_of_ranks = (zip(runs(block, target.shape), repeat(rank)) for rank, block in target.blocks.items())
    for (start, length), rank in heapq.merge(*runs_of_ranks):
        for first in range(0, length * itemsize, CHUNK):
            chunk = buffer[: length * itemsize - first]
            files.read_into(descriptor, chunk, target.offset + start * itemsize + first)
            whole.update(chunk)
            by_rank[rank].update(chunk)
    for rank, digest in by_rank.items():
        if digest.hexdigest()[:DIGEST_DIGITS] != digests[rank]:
            raise CheckpointError(f"save: {target.file}: {target.path}: on the disk is not what rank {rank} wrote")
    return whole.hexdigest()
