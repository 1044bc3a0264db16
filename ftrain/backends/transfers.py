"""Tensors in host memory or in files, and copies between them and a device."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ftrain import _torch
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.registry import Copier, of
from ftrain.errors import DeviceError, OptionError, as_path
from ftrain.tree import HOST


class BlockingCopier:
    """A `Copier` whose copies are complete when the call returns."""

    ahead = False

    def out(self, source: Tensor, target: Tensor) -> None:
        """Copy to the host."""
        target.copy_(source)

    def back(self, source: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Copy to the device."""
        copy = source.to(device)
        return lambda: copy

    def wait(self) -> None:
        """Return at once: all copies are complete."""


def copier_of(device: torch.device) -> Copier:
    """Return the copier of a device."""
    make = of(device).copier
    return _cached(make) if make is not None else BlockingCopier()


@functools.lru_cache(maxsize=8)
def _cached(make: Callable[[], Copier]) -> Copier:
    """Return one copier for each device, since streams are a limited resource."""
    return make()


def is_abstract(leaf: Tensor) -> bool:
    """Whether a tensor has a shape and a dtype but no values: on the meta device, or a `FakeTensor`."""
    return leaf.is_meta or _torch.is_fake(leaf)


def is_in_file(leaf: Tensor) -> bool:
    """Whether the memory of a tensor is a memory-mapped file."""
    return not is_abstract(leaf) and leaf.device == HOST and leaf.untyped_storage().filename is not None


def on_host(leaf: Tensor, pinned: bool) -> Tensor:
    """Return an uninitialized tensor in host memory, with the shape, dtype and dense strides of another."""
    return torch.empty_like(leaf, device=HOST, pin_memory=pinned)


def in_file(leaf: Tensor, directory: Path) -> Tensor:
    """Return an uninitialized tensor like another, in a new memory-mapped file that is removed with the tensor.

    Raises a DeviceError if the disk is too full.
    """
    handle, path = tempfile.mkstemp(prefix="ftrain-", dir=directory)
    try:
        _reserve(handle, leaf.nbytes, directory)
        mapped = torch.from_file(path, shared=True, size=leaf.numel(), dtype=leaf.dtype)
    finally:
        os.close(handle)
        # The mapping stays valid. Some systems cannot remove an open file.
        with contextlib.suppress(OSError):
            os.unlink(path)
    return mapped.as_strided(leaf.shape, torch.empty_like(leaf, device="meta").stride())


def _reserve(handle: int, size: int, directory: Path) -> None:
    """Allocate the blocks of a file now: on a full disk, the first write to the mapped memory kills the process."""
    free = shutil.disk_usage(directory).free
    cause = None
    if size <= free:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)
            else:
                os.ftruncate(handle, size)
            return
        except OSError as error:
            cause = error
    raise DeviceError(
        f"offload: {directory} has {format_bytes(free)} left, and the next tensor needs {format_bytes(size)}; free "
        "some space, or use another directory. A step that does not donate keeps two states"
        + (f". The system says: {cause}" if cause else "")
    ) from cause


def as_directory(directory: str | os.PathLike[str]) -> Path:
    """Create a directory for offloaded tensors if it does not exist, and return its path.

    Raises an OptionError if it is not a path, or cannot be written.
    """
    path = as_path("offload", "directory", directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise OptionError(f"offload: directory={str(directory)!r} cannot be written: {error}") from error
