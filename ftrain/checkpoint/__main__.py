"""`python -m ftrain.checkpoint inspect|verify|diff PATH`: show, check and compare checkpoints."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftrain import tree as trees
from ftrain.backends.format_bytes import format_bytes
from ftrain.checkpoint.checkpoints import Checkpoints
from ftrain.checkpoint.journal import check, mark_of
from ftrain.checkpoint.manifest import NAME, TensorEntry
from ftrain.checkpoint.reading import load_items, read_manifest, verify
from ftrain.checkpoint.treedef import Container, dotted, items_by_path, printable
from ftrain.errors import CheckpointError


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return the exit status: 1 for damage or a difference, else 0."""
    parser = argparse.ArgumentParser(prog="python -m ftrain.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("inspect", "print the tree of the newest one"), ("verify", "check every byte of each")):
        commands.add_parser(name, help=text).add_argument(
            "path", type=Path, help="a checkpoint, or the directory of a run"
        )
    diff = commands.add_parser("diff", help="print the leaves in which two differ")
    for name in ("first", "second"):
        diff.add_argument(name, type=Path, help="a checkpoint, or the directory of a run, whose newest one counts")
    options = parser.parse_args(arguments)
    try:
        if options.command == "inspect":
            _print(*inspection(_checkpoints_at(options.path)[-1]))
            return 0
        if options.command == "verify":
            return max(_verify(path) for path in _checkpoints_at(options.path))
        first, second = _checkpoints_at(options.first)[-1], _checkpoints_at(options.second)[-1]
        differences = list(_differences(first, second))
        _print(*(differences or ["the same, to the bit"]))
        return 1 if differences else 0
    except CheckpointError as error:
        _print(*str(error).split("\n"))
        return 1


def _print(*lines: str) -> None:
    """Print lines, with control characters in names escaped."""
    print("\n".join(map(printable, lines)))


def _verify(path: Path) -> int:
    """Verify a checkpoint and the history that belongs to it, print the result, and return the exit status."""
    try:
        manifest = verify(path)
        if (mark := mark_of(manifest)) is not None:
            check(path.parent, mark)
    except CheckpointError as error:
        _print(*f"DAMAGED  {error}".split("\n"))
        return 1
    _print(f"whole    {path}: {len(manifest.tensors)} tensors")
    return 0


def _checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, or the path itself if it is a checkpoint.

    Raises a CheckpointError if there is neither.
    """
    run = Checkpoints(path, every=1)
    paths = [run.path(step) for step in run.steps()]
    if not paths and not (path / NAME).is_file():
        raise CheckpointError(f"{path}: there is no checkpoint, which is a directory with a {NAME}")
    return paths or [path]


def inspection(path: Path) -> Iterator[str]:
    """Yield the tree of a checkpoint with shapes and bytes; only its manifest is read."""
    manifest = read_manifest(path)
    yield f"{path}: step {manifest.step}, run {manifest.run or 'none'}"
    yield "  " + ", ".join(f"{name} {value}" for name, value in manifest.environment.items())
    if manifest.metrics:
        yield "  " + ", ".join(f"{name} {value}" for name, value in manifest.metrics.items())
    items = items_by_path(manifest.tree, manifest.tensors).items()
    leaves = [(dotted(tree_path), item) for tree_path, item in items if not isinstance(item, Container)]
    width = max((len(name) for name, _ in leaves), default=0)
    for name, item in leaves:
        if isinstance(item, TensorEntry):
            yield f"  {name:<{width}}  {item.dtype}{list(item.shape)}  {format_bytes(item.info.bytes)}"
        else:
            yield f"  {name:<{width}}  {item!r:.60}"
    total = sum(item.info.bytes for item in manifest.tensors)
    names = ", ".join(sorted({item.file for item in manifest.tensors}))
    yield f"  {len(manifest.tensors)} tensors, {format_bytes(total)}, in {names}"


def _differences(first: Path, second: Path) -> Iterator[str]:
    """Yield the differences of two checkpoints, leaf by leaf; none when they are the same to the bit."""
    first_items, second_items = load_items(first), load_items(second)
    for tree_path in {**first_items, **second_items}:
        if tree_path not in second_items:
            yield f"{dotted(tree_path)}: only in {first}"
        elif tree_path not in first_items:
            yield f"{dotted(tree_path)}: only in {second}"
        elif difference := _difference(first_items[tree_path], second_items[tree_path]):
            yield f"{dotted(tree_path)}: {difference}"


def _difference(first: Any, second: Any) -> str:
    """Return the difference of two items of trees as a text; "" if they are the same to the bit."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        # Compared as text, since NaN is not equal to itself.
        return "" if repr(first) == repr(second) else f"{first!r:.60}, {second!r:.60}"
    if first.dtype != second.dtype or first.shape != second.shape:
        return f"{trees.describe(first)}, {trees.describe(second)}"
    first_bytes, second_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    if torch.equal(first_bytes, second_bytes):
        return ""
    differs = (first_bytes != second_bytes).view(-1, first.element_size()).any(1)
    largest = _largest_difference(*(tensor.reshape(-1)[differs] for tensor in (first, second)))
    return f"{differs.sum().item()} of {first.numel()} elements differ, by up to {largest:.3g}"


def _largest_difference(first: Tensor, second: Tensor) -> float:
    """Return the largest absolute difference of the elements of two vectors; infinite where one of both is NaN."""
    widest = torch.complex128 if first.is_complex() else torch.float64
    apart = (first.to(widest) - second.to(widest)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    if not first.is_floating_point() and not first.is_complex():
        # float64 rounds large numbers; a difference that is large itself does not fit into int64.
        exact = (first.long() - second.long()).abs().to(widest)
        apart = torch.where(apart < 2**62, exact, apart)
    return float(apart.max().item())


if __name__ == "__main__":
    # End without an error, as other programs do, when the reader of the output ends first: `... | head -1`.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
