"""Formats in which a state is saved and loaded; all of them read every byte when they load."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

from ftrain import checkpoint

State = dict[str, Tensor]


class Format(NamedTuple):
    """Saves a state to a new path, and loads it into new memory; `load` also gets a state of the same shapes."""

    save: Callable[[State, Path], Any]
    load: Callable[[Path, State], Any]


def _ours_unsynced(state: State, path: Path) -> None:
    """Save without waiting for the disk; the difference is the cost of `fsync`."""
    with mock.patch("os.fsync", return_value=None):
        checkpoint.save(path, state)


def _distributed(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that there is only one process.
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
        # It returns memory maps of the file; cloning reads them.
        lambda path, like: {name: leaf.clone() for name, leaf in load_file(path).items()},
    ),
    "torch.save": Format(lambda state, path: torch.save(state, path), lambda path, like: torch.load(path)),
    "DCP": Format(_distributed, _from_distributed),
}


def remove(path: Path) -> None:
    """Remove a saved state, which is a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def make_state(size: int) -> State:
    """Return a state of about `size` bytes: parameters and two moments of a transformer with 24 layers."""
    # float32, 12 * width**2 elements a layer, 24 layers, and three copies.
    width = max(16, int((size / (4 * 12 * 24 * 3)) ** 0.5))
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return {
        f"{part}.{layer}.{name}": torch.randn(shape)
        for part in ("params", "mu", "nu")
        for layer in range(24)
        for name, shape in {**shapes, "norm": (width,)}.items()
    }
