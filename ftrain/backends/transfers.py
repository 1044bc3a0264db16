"""Tensors that are kept on the host or in files, and how they get there and back."""

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
from ftrain.errors import DeviceError, OptionError
from ftrain.tree.ops import HOST


class Blocking:
    """Copies that are over when the call is."""

    ahead = False

    def out(self, source: Tensor, target: Tensor) -> None:
        """Copy to the host."""
        target.copy_(source)

    def back(self, source: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Copy to the device."""
        copy = source.to(device)
        return lambda: copy

    def wait(self) -> None:
        """Wait for nothing."""


def copier_of(device: torch.device) -> Copier:
    """Return what copies between host and device, beside other work where the device can."""
    make = of(device).copier
    return _made(make) if make is not None else Blocking()


@functools.lru_cache(maxsize=8)
def _made(make: Callable[[], Copier]) -> Copier:
    """One for each device: streams are few."""
    return make()


def is_abstract(leaf: Tensor) -> bool:
    """Whether a tensor has a shape and a dtype but no values: on the meta device, or a `FakeTensor`."""
    return leaf.is_meta or _torch.is_fake(leaf)


def is_in_file(leaf: Tensor) -> bool:
    """Whether the memory of a tensor is that of a file."""
    return not is_abstract(leaf) and leaf.device == HOST and leaf.untyped_storage().filename is not None


def on_host(leaf: Tensor, pinned: bool) -> Tensor:
    """Return an empty tensor like another one in host memory."""
    made = torch.empty(leaf.numel(), dtype=leaf.dtype, device=HOST, pin_memory=pinned)
    return made.as_strided(leaf.shape, _dense_strides(leaf))


def in_file(leaf: Tensor, directory: Path) -> Tensor:
    """Return an empty tensor like another one whose memory is a new file, which is gone when the tensor is.

    Raises:
        DeviceError: when the disk has no room for it.
    """
    handle, path = tempfile.mkstemp(prefix="ftrain-", dir=directory)
    try:
        _reserve(handle, leaf.nbytes, directory)
        made = torch.from_file(path, shared=True, size=leaf.numel(), dtype=leaf.dtype)
    finally:
        os.close(handle)
        # What is mapped stays; where files that are open cannot be removed, it is left behind.
        with contextlib.suppress(OSError):
            os.unlink(path)
    return made.as_strided(leaf.shape, _dense_strides(leaf))


def _reserve(handle: int, size: int, directory: Path) -> None:
    # A full disk would otherwise end the process when a page is written.
    free = shutil.disk_usage(directory).free
    try:
        if size <= free and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        elif size <= free:
            os.ftruncate(handle, size)
    except OSError as error:
        raise _no_room(size, free, directory) from error
    if size > free:
        raise _no_room(size, free, directory)


def _no_room(size: int, free: int, directory: Path) -> DeviceError:
    return DeviceError(
        f"offload: {directory} has {format_bytes(free)} left, and {format_bytes(size)} more are needed for the next "
        "tensor; make room, or take another directory. A step that does not donate keeps two states"
    )


def as_directory(directory: str | os.PathLike[str]) -> Path:
    """Return a directory in which files can be made; makes it, if it is not there.

    Raises:
        OptionError: when it is none, or cannot be written.
    """
    if not isinstance(directory, str | os.PathLike):
        raise OptionError(f"offload: directory is {directory!r}, needs a path")
    found = Path(directory).expanduser()
    try:
        found.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=found):
            return found
    except OSError as error:
        raise OptionError(f"offload: directory={str(directory)!r} cannot be written: {error}") from error


def _dense_strides(leaf: Tensor) -> tuple[int, ...]:
    return torch.empty_like(leaf, device="meta").stride()
