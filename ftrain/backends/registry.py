"""The registry: one frozen record for each device platform, looked up by name or by device."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ftrain.errors import DeviceError, OptionError

ENTRY_POINTS = "ftrain.backends"
CHOICE = "FTRAIN_BACKEND"


Recorder: TypeAlias = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], None], Sequence[Tensor]]]
"""``work -> (replay, outputs)``: records what `work` does on the device; each replay writes the same outputs."""


@dataclass(frozen=True)
class Memory:
    """Bytes in use on a device, now and at most so far."""

    current: int
    peak: int


@dataclass(frozen=True)
class Backend:
    """What a device platform offers; the only place where platforms differ.

    Args:
        name: the device type as torch spells it ("cpu", "cuda").
        available: whether this machine has such a device.
        describe: the product's name, for messages.
        autocast_dtypes: the dtypes that mixed precision can use on this machine.
        seeded: context that seeds torch's global generators (a 63-bit seed) and puts them back as
            they were.
        synchronize: wait until the device has done all queued work.
        memory: bytes in use.
        distributed: the name of the `torch.distributed` backend.
        tf32: makes a context in which float32 products may use TF32, or None where there is no TF32.
        empty_cache: give cached memory back to the device; None where there is no such thing.
        compile_backend: the compiler that suits the device.
        pinned_memory: whether page-locked host memory speeds up copies to the device.
        fused_optimizers: whether torch's fused optimizer kernels run here.
        recorder: makes a `Recorder`, which records work that is then replayed; None where there is no such thing.
    """

    name: str
    available: Callable[[], bool]
    describe: Callable[[], str]
    autocast_dtypes: Callable[[], tuple[torch.dtype, ...]]
    seeded: Callable[[int], AbstractContextManager[None]]
    synchronize: Callable[[], None]
    memory: Callable[[], Memory]
    distributed: str
    tf32: Callable[[], AbstractContextManager[None] | None] = lambda: None
    empty_cache: Callable[[], None] | None = None
    compile_backend: str = "inductor"
    pinned_memory: bool = False
    fused_optimizers: bool = False
    recorder: Callable[[], Recorder] | None = None

    @property
    def device(self) -> torch.device:
        """The device that new tensors go to."""
        return torch.device(self.name)


_records: dict[str, Backend] = {}
_broken: dict[str, str] = {}


def register(backend: Backend) -> None:
    """Add a backend under its name, or replace the one that has it.

    Raises:
        OptionError: when it is no `Backend`, or torch knows no device type of its name.
    """
    if not isinstance(backend, Backend):
        raise OptionError(f"backends.register: found {backend!r}; needs a Backend record")
    try:
        torch.device(backend.name)
    except RuntimeError as error:
        raise OptionError(
            f"backends.register: torch has no device type {backend.name!r}; import the package that adds it first"
        ) from error
    _records[backend.name] = backend


def names() -> list[str]:
    """Return the registered names, those of other packages included."""
    _load_entry_points()
    return sorted(_records)


def get(name: str) -> Backend:
    """Return the backend of that name, which must be available on this machine.

    Raises:
        DeviceError: for an unknown or unavailable name; the message lists what there is.
    """
    if name not in _records:
        _load_entry_points()
    backend = _records.get(name)
    if backend is None:
        broken = f", and the package that brings it does not load: {_broken[name]}" if name in _broken else ""
        raise DeviceError(f"backends.get: no backend {name!r}; registered are {', '.join(names())}{broken}")
    if not backend.available():
        usable = ", ".join(other for other in names() if _records[other].available())
        raise DeviceError(f"backends.get: this machine has no {name!r} device; available are {usable}")
    return backend


def of(device: torch.device | str) -> Backend:
    """Return the backend that serves a `torch.device`.

    Raises:
        DeviceError: when none is registered for its type.
    """
    # No availability check: this is asked in every step, of tensors that are already there.
    name = device.type if isinstance(device, torch.device) else device.split(":")[0]
    return _records.get(name) or get(name)


def resolve(device: torch.device | str) -> torch.device:
    """Return the device that a name such as ``"cuda"`` or ``"cuda:1"`` stands for, if it is there.

    Raises:
        DeviceError: for an unknown or unavailable device; the message lists what there is.
    """
    backend = get(str(device).split(":")[0])
    return backend.device if str(device) == backend.name else torch.device(device)


def default() -> Backend:
    """Return the backend that `FTRAIN_BACKEND` names, else an available accelerator, else the CPU.

    Raises:
        DeviceError: when the one that is named is not there.
    """
    chosen = os.environ.get(CHOICE)
    if chosen:
        try:
            return get(chosen)
        except DeviceError as error:
            raise DeviceError(f"{CHOICE}={chosen}: {error}") from error
    accelerators = (name for name in names() if name != "cpu" and _records[name].available())
    return get(next(accelerators, "cpu"))


def _load_entry_points() -> None:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name in _records:
            continue
        try:
            register(point.load())
        except Exception as error:
            # Somebody else's package: said when its backend is asked for, and in nobody's way until then.
            _broken[point.name] = f"{type(error).__name__}: {error}"
