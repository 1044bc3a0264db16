"""What a checkpoint holds, and in what two of them differ, as lines to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftrain.backends.format_bytes import format_bytes
from ftrain.checkpoint.checkpoints import Checkpoints
from ftrain.checkpoint.journal import Mark, check, mark_of
from ftrain.checkpoint.manifest import Manifest, Stored
from ftrain.checkpoint.reading import load_contents, read_manifest
from ftrain.checkpoint.treedef import Container, contents, dotted
from ftrain.errors import CheckpointError


def found(path: Path) -> list[Path]:
    """Return the checkpoints at a path, oldest first: those of a run, or the one that it is itself.

    Raises:
        CheckpointError: when there is none.
    """
    run = Checkpoints(path, every=1)
    paths = [run.path(step) for step in run.steps()] or [path]
    if not paths[-1].is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint")
    return paths


def inspected(path: Path) -> Iterator[str]:
    """The tree of a checkpoint with shapes and bytes; nothing but the manifest is read.

    Raises:
        CheckpointError: when it is damaged.
    """
    manifest = read_manifest(path)
    yield f"{path}: step {manifest.step}, run {manifest.run or 'none'}"
    yield "  " + ", ".join(f"{name} {value}" for name, value in manifest.environment.items())
    if manifest.metrics:
        yield "  " + ", ".join(f"{name} {value}" for name, value in manifest.metrics.items())
    inside = contents(manifest.tree, manifest.tensors)
    width = max((len(dotted(at)) for at, item in inside.items() if not isinstance(item, Container)), default=0)
    for at, item in inside.items():
        if isinstance(item, Stored):
            yield f"  {dotted(at):<{width}}  {item.dtype}{list(item.shape)}  {format_bytes(item.kind.bytes)}"
        elif not isinstance(item, Container):
            yield f"  {dotted(at):<{width}}  {item!r:.60}"
    total = sum(item.kind.bytes for item in manifest.tensors)
    held = ", ".join(sorted({item.file for item in manifest.tensors}))
    yield f"  {len(manifest.tensors)} tensors, {format_bytes(total)}, in {held}"


def require_history(path: Path, manifest: Manifest) -> None:
    """Check the records of a run up to a checkpoint that `ftrain.fit` has saved; of others there are none.

    Raises:
        CheckpointError: when they are not those that were saved.
    """
    inside = contents(manifest.tree, manifest.tensors)
    noted = {name: inside.get(("run", "record", "history", name)) for name in Mark._fields}
    if (mark := mark_of(noted)) is not None:
        check(path.parent, mark)


def differences(one: Path, other: Path) -> Iterator[str]:
    """In what two checkpoints differ, leaf by leaf; nothing when they are the same to the bit.

    Raises:
        CheckpointError: when one of them is damaged.
    """
    left, right = load_contents(one), load_contents(other)
    for at in [*left, *(at for at in right if at not in left)]:
        if at not in right:
            yield f"{dotted(at)}: only in {one}"
        elif at not in left:
            yield f"{dotted(at)}: only in {other}"
        elif said := _difference(left[at], right[at]):
            yield f"{dotted(at)}: {said}"


def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        # By what is written of it, since NaN is not equal to itself.
        return "" if repr(one) == repr(other) else f"{one!r:.60}, {other!r:.60}"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{_kind(one)}, {_kind(other)}"
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    if torch.equal(*bits):
        return ""
    apart = (bits[0] != bits[1]).view(-1, one.element_size()).any(1).sum().item()
    wide = [tensor.to(torch.complex128 if one.is_complex() else torch.float64) for tensor in (one, other)]
    largest = (wide[0] - wide[1]).abs().nan_to_num(float("inf")).max().item()
    return f"{apart} of {one.numel()} elements differ, by up to {largest:.3g}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
