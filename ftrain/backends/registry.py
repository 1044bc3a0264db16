"""The registry of devices: one frozen record per platform, looked up by name or by device."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch
from ftrain.errors import DeviceError, OptionError

ENTRY_POINT_GROUP = "ftrain.backends"
DEFAULT_VARIABLE = "FTRAIN_BACKEND"
"""The environment variable that names the default backend."""

Recorder: TypeAlias = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], None], Sequence[Tensor]]]
"""``work -> (replay, outputs)``: records what `work` does on the device; each replay writes the same outputs."""


class Copier(Protocol):
    """Copies tensors between the host and a device."""

    @property
    def ahead(self) -> bool:
        """Whether copies run while the device computes."""

    def out(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` to the host after the work that is queued so far; `target` is complete after `wait`."""

    def back(self, source: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Start a copy to the device; return a function that waits for the copy and returns it."""

    def wait(self) -> None:
        """Wait for all copies to the host."""


@dataclass(frozen=True)
class Memory:
    """Bytes in use on a device: current, and peak so far."""

    current: int
    peak: int


@dataclass(frozen=True)
class Backend:
    """What ftrain needs to know about a device platform. Fields without a default are required.

    Args:
        name: the device type as torch spells it ("cpu", "cuda").
        available: whether this machine has such a device.
        describe: returns the name of the hardware, for messages.
        autocast_dtypes: the dtypes that mixed precision can use on this machine.
        seeded: context that seeds torch's global generators with a 63-bit seed and restores them when it ends. Every
            step runs in it; on a device that queues work lazily, its end launches the work.
        generators: saves the states of these generators, and returns a function that restores them.
        synchronize: waits until the device has done all queued work.
        memory: returns the bytes in use.
        distributed: name of the `torch.distributed` backend.
        reduce_scatter: whether that backend has a true reduce-scatter. One that runs an all-reduce, and so sends twice
            as much, does not count. Without it, ranks use an all-to-all and add, and also gather by all-to-all.
        emulated_dtypes: those of `autocast_dtypes` whose matmuls convert to float32 and back, which is slower than
            float32.
        free: returns the free bytes, including those of the cache; None if the device does not report them.
        multiple: ``dtype -> int``; matmuls are fastest when the lengths of their axes are multiples of it.
        tf32: returns a context in which float32 matmuls may use TF32; None if the device has no TF32.
        empty_cache: returns cached memory to the device; None if there is no cache to empty.
        caches_memory: whether freed memory is cached, so that allocation costs almost nothing. Default: whether there
            is an `empty_cache`.
        compile_backend: backend of `torch.compile`.
        pinned_memory: whether page-locked host memory speeds up copies to the device.
        fused_optimizers: whether torch's fused optimizer kernels support the device.
        fused_found_inf: whether these kernels do nothing if their argument `found_inf` is 1.
        recorder: returns a `Recorder` of device graphs; None if there are none.
        copier: returns a `Copier` that copies while the device computes; None if there is none.
        deterministic: context in which kernels add in a fixed order, not in the order in which threads finish, so that
            the same call returns the same bits. Every step runs in it.
        float64: whether the device computes in float64.
        float8: whether the device of this machine multiplies in float8 (e4m3, e5m2), as `torch._scaled_mm` does.
        out_dtype: whether `torch.addmm` of tensors in 16 bits can return float32, by its argument `out_dtype`.
        immediate: whether the device has done its work when a call returns, so that reading a value never waits.
        platform: the hardware, for messages, where `name` does not say it.
        package: the vendor's package that adds the device to torch, imported when the backend is requested by name.
        install: how to install that package, for messages.
    """

    name: str
    available: Callable[[], bool]
    describe: Callable[[], str]
    autocast_dtypes: Callable[[], tuple[torch.dtype, ...]]
    seeded: Callable[[int], AbstractContextManager[None]]
    generators: Callable[[], Callable[[], None]]
    synchronize: Callable[[], None]
    memory: Callable[[], Memory]
    distributed: str
    reduce_scatter: bool = True
    emulated_dtypes: Callable[[], tuple[torch.dtype, ...]] = tuple
    free: Callable[[], int | None] = lambda: None
    multiple: Callable[[torch.dtype], int] = lambda dtype: 1
    tf32: Callable[[], AbstractContextManager[None] | None] = lambda: None
    empty_cache: Callable[[], None] | None = None
    caches_memory: bool | None = None
    compile_backend: str = "inductor"
    pinned_memory: bool = False
    fused_optimizers: bool = False
    fused_found_inf: bool = False
    recorder: Callable[[], Recorder] | None = None
    copier: Callable[[], Copier] | None = None
    deterministic: Callable[[], AbstractContextManager[None]] = nullcontext
    float64: bool = True
    float8: Callable[[], bool] = lambda: False
    out_dtype: bool = False
    immediate: bool = False
    platform: str = ""
    package: str = ""
    install: str = ""

    def __post_init__(self) -> None:
        if self.caches_memory is None:
            object.__setattr__(self, "caches_memory", self.empty_cache is not None)

    @property
    def native_dtypes(self) -> tuple[torch.dtype, ...]:
        """Those of `autocast_dtypes` that are not emulated: matmuls in them are at least as fast as in float32."""
        emulated = self.emulated_dtypes()
        return tuple(dtype for dtype in self.autocast_dtypes() if dtype not in emulated)

    @property
    def present(self) -> bool:
        """Whether this machine has the device; False if the vendor's package would have to be imported to know."""
        return (not self.package or self.package in sys.modules) and self.available()

    @property
    def device(self) -> torch.device:
        """The device that new tensors go to."""
        return torch.device(self.name)


_records: dict[str, Backend] = {}
_load_errors: dict[str, str] = {}
"""The errors of entry points that did not load, by name of the backend."""
_scanned = False
"""Whether the entry points of other packages have been read."""


def register(backend: Backend) -> None:
    """Add a backend, or replace the one of the same name.

    Raises an OptionError if it is not a `Backend`, or if torch has no device type of that name and the record has no
    `package` that adds it.
    """
    if not isinstance(backend, Backend):
        raise OptionError(f"backends.register: found {backend!r}; needs a Backend record")
    if not backend.package and not _is_device(backend.name):
        raise OptionError(
            f"backends.register: torch has no device type {backend.name!r}; import the package that adds it first, or "
            "name it in the record as its `package`"
        )
    _records[backend.name] = backend


def names() -> list[str]:
    """Return the registered names, including those of other packages."""
    _load_entry_points()
    return sorted(_records)


def get(name: str) -> Backend:
    """Return the backend of that name, after importing the vendor's package.

    Raises a DeviceError for an unknown name or a device that this machine lacks; the message lists the available ones,
    or says what to install.
    """
    if name not in _records:
        _load_entry_points()
    backend = _records.get(name)
    if backend is None:
        raise _unknown(name)
    if backend.package:
        _import(backend)
    if not backend.available():
        present = ", ".join(known for known in names() if _records[known].present)
        raise DeviceError(f"backends.get: this machine has no {name!r} device; available are {present}")
    return backend


def of(device: torch.device | str) -> Backend:
    """Return the backend of a device. Raises a DeviceError if no backend is registered for its type."""
    # No availability check: every step calls this, for tensors that are on the device already.
    name = device.type if isinstance(device, torch.device) else str(device).split(":")[0]
    return _records.get(name) or get(name)


def resolve(device: torch.device | str) -> torch.device:
    """Return the device with a name such as ``"cuda"`` or ``"cuda:1"``.

    Raises a DeviceError if the device is unknown, unavailable, or not the current device of its type.
    """
    backend = get(str(device).split(":")[0])
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(
            f"backends.resolve: {device!r} is not the name of a device; write {backend.name!r}, or '{backend.name}:0'"
        ) from error
    require_current(resolved)
    return resolved


def require_current(device: torch.device) -> None:
    """Check that a device with an index is the current one of its type. Raises a DeviceError if not.

    Backends use the generators, streams and memory of the current device.
    """
    if device == torch.device(device.type):
        return
    try:
        module: Any = torch.get_device_module(device.type)
    except RuntimeError:
        return
    # A module without `current_device` has one device. Fake tensors may be on a device that this machine lacks.
    if not hasattr(module, "current_device") or not module.is_available():
        return
    index = module.current_device()
    if isinstance(index, int) and index != device.index:
        raise DeviceError(
            f"backends: {device} is not the current device ({device.type}:{index}), whose generators, streams and "
            f"memory are used; call torch.{device.type}.set_device({device.index}) first, or let the process see only "
            "that device"
        )


def widest(device: torch.device) -> torch.dtype:
    """Return the most precise dtype of a device: float64, or float32 if it has no float64."""
    record = _records.get(device.type)
    return torch.float64 if record is None or record.float64 else torch.float32


def default() -> Backend:
    """Return the backend that the environment variable `FTRAIN_BACKEND` names, else an accelerator, else the CPU.

    No vendor's package is imported for this. Raises a DeviceError if the named backend is not available.
    """
    name = os.environ.get(DEFAULT_VARIABLE)
    if name:
        try:
            return get(name)
        except DeviceError as error:
            raise DeviceError(f"{DEFAULT_VARIABLE}={name}: {error}") from error
    accelerators = (known for known in names() if known != "cpu" and _records[known].present)
    return get(next(accelerators, "cpu"))


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def _import(backend: Backend) -> None:
    try:
        importlib.import_module(backend.package)
    except Exception as error:
        # The missing module is the package or a parent of it; otherwise something that the package imports is missing.
        is_absent = isinstance(error, ModuleNotFoundError) and f"{backend.package}.".startswith(f"{error.name}.")
        why = "is not installed" if is_absent else f"does not load ({type(error).__name__}: {error})"
        raise DeviceError(
            f"backends.get: {backend.name!r} ({backend.platform}) needs {backend.package}, which {why}"
            + (f"; install it: {backend.install}" if backend.install else "")
        ) from error


def _unknown(name: str) -> DeviceError:
    records = (_records[known] for known in names())
    registered = ", ".join(record.name + (f" ({record.platform})" if record.platform else "") for record in records)
    hint = ""
    if name in _load_errors:
        hint = f", and the package that adds it does not load: {_load_errors[name]}"
    elif name and name == _torch.privateuse1_name():
        hint = f"; torch has it: ftrain.backends.register(ftrain.backends.private_use({name!r}))"
    return DeviceError(f"backends.get: no backend {name!r}; registered are {registered}{hint}")


def _load_entry_points() -> None:
    """Register the backends of other packages, once: a scan takes milliseconds, and every step may call `default`."""
    global _scanned
    if _scanned:
        return
    _scanned = True
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry_point.name in _records:
            continue
        try:
            register(entry_point.load())
        except Exception as error:
            # Reported when this backend is requested; until then the error of another package is ignored.
            _load_errors[entry_point.name] = f"{type(error).__name__}: {error}"
