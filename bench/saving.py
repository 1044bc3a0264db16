"""Ways to save a state and to load it again, each ending with all bytes read."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

from ftrain import checkpoint
from ftrain.checkpoint import files

State = dict[str, Tensor]


class Format(NamedTuple):
    """How to save a state to a path that is not there, and how to get it back in memory of its own."""

    save: Callable[[State, Path], Any]
    load: Callable[[Path, State], Any]


def _ours_unsynced(state: State, path: Path) -> None:
    """What the protocol costs: the same without waiting for the disk."""
    system, files.os = files.os, _Unsynced()  # type: ignore[attr-defined]
    try:
        checkpoint.save(path, state)
    finally:
        files.os = system  # type: ignore[attr-defined]


class _Unsynced:
    def __getattr__(self, name: str) -> Any:
        return (lambda descriptor: None) if name == "fsync" else getattr(os, name)


def _distributed(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That it is one process.
        dcp.save(state, checkpoint_id=path, no_dist=True)


def _from_distributed(path: Path, like: State) -> State:
    state = {name: torch.empty_like(leaf) for name, leaf in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


OURS, UNSYNCED = "checkpoint.save", "checkpoint.save, no fsync"
FORMATS = {
    OURS: Format(lambda state, path: checkpoint.save(path, state), lambda path, like: checkpoint.load(path)),
    UNSYNCED: Format(_ours_unsynced, lambda path, like: checkpoint.load(path)),
    "safetensors": Format(
        lambda state, path: save_file(state, path),
        # What it gives is a map of the file, of which nothing has been read.
        lambda path, like: {name: leaf.clone() for name, leaf in load_file(path).items()},
    ),
    "torch.save": Format(lambda state, path: torch.save(state, path), lambda path, like: torch.load(path)),
    "DCP": Format(_distributed, _from_distributed),
}


def remove(path: Path) -> None:
    """Remove what a way has saved."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def make_state(size: int) -> State:
    """A state of about so many bytes, in tensors of the sizes that a transformer has."""
    width = max(16, int((size / (4 * 12 * 24 * 3)) ** 0.5))
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return {
        f"{part}.{layer}.{name}": torch.randn(shape)
        for part in ("params", "mu", "nu")
        for layer in range(24)
        for name, shape in {**shapes, "norm": (width,)}.items()
    }
