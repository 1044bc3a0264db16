"""Records of devices whose module, ``torch.<name>``, has the functions of `torch.cuda`.

Torch requires them of `torch.accelerator` (https://docs.pytorch.org/docs/stable/accelerator.html) and of a PrivateUse1
device, which a package adds to torch in Python or in C++ (https://docs.pytorch.org/docs/stable/accelerator/index.html,
https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html). The tests train on such a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ftrain.backends.copying import StreamCopier
from ftrain.backends.generators import AnyGenerator, Generator, save_generators, seeded
from ftrain.backends.graph_recorder import GraphRecorder
from ftrain.backends.registry import Backend, Memory, Recorder
from ftrain.errors import OptionError

HALF_DTYPES = torch.bfloat16, torch.float16
REQUIRED_OF_PRIVATE_USE = "is_available", "manual_seed", "get_rng_state", "set_rng_state"


class DeviceModule:
    """The module of a device type. It is looked up at each use, since the vendor's package may be imported later."""

    def __init__(self, name: str) -> None:
        self._name = name

    def record(self, **fields: Any) -> Backend:
        """Return the record of the device: `fields`, and for other fields of `Backend` what its module reports."""
        defaults: dict[str, Any] = {
            "name": self._name,
            "available": lambda: bool(self.module.is_available()),
            "describe": lambda: str(self.module.get_device_name()),
            "autocast_dtypes": self.autocast_dtypes,
            "seeded": self.seeded,
            "generators": lambda: save_generators(self.generator),
            "synchronize": lambda: self.module.synchronize(),
            "memory": lambda: Memory(int(self.module.memory_allocated()), int(self.module.max_memory_allocated())),
            "free": self.free,
            "empty_cache": lambda: self.module.empty_cache(),
        }
        return Backend(**{**defaults, **fields})

    @property
    def module(self) -> Any:
        """``torch.<name>``."""
        return torch.get_device_module(self._name)

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """The 16-bit dtypes of autocast."""
        supported = self.module.get_amp_supported_dtype()
        return tuple(dtype for dtype in HALF_DTYPES if dtype in supported)

    @property
    def generator(self) -> AnyGenerator:
        """The device's generator."""
        return Generator(self.module.get_rng_state, self.module.set_rng_state, self.module.manual_seed)

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Context in which the generators of host and device are seeded."""
        return seeded(seed, self.generator)

    def free(self) -> int | None:
        """Free bytes, including those of the cache; None if the module does not report them."""
        if not (hasattr(self.module, "mem_get_info") and hasattr(self.module, "memory_reserved")):
            return None
        cached = int(self.module.memory_reserved()) - int(self.module.memory_allocated())
        return int(self.module.mem_get_info()[0]) + cached

    def copier(self) -> StreamCopier:
        """Return a copier with a stream of its own."""
        return StreamCopier(self.module)

    def recorder(self, **options: Any) -> Recorder:
        """Return a recorder of device graphs, which passes `options` to ``torch.<name>.graph``."""
        return GraphRecorder(self.module, self._name, options)


def private_use(name: str, **fields: Any) -> Backend:
    """Return the record of a PrivateUse1 device, made from the functions of its module, ``torch.<name>``.

    Memory is that of `memory_allocated` and `max_memory_allocated`, or zero; autocast dtypes are those of
    `get_amp_supported_dtype`, or none; `synchronize` and `empty_cache` are used if they exist. Other fields are
    conservative where `fields` does not give them: no TF32, no graphs, no fused kernels, no pinned memory, gloo, and
    ``aot_eager`` as compiler.

    Raises an OptionError if torch has no such device, or its module lacks a function that a step needs.

    >>> private_use("npux")
    Traceback (most recent call last):
    ftrain.errors.OptionError: backends.private_use: torch has no module torch.npux; import the package that adds it ...
    """
    try:
        module = torch.get_device_module(name)
    except RuntimeError as error:
        raise OptionError(
            f"backends.private_use: torch has no module torch.{name}; import the package that adds it first, or give "
            f"your own to torch._register_device_module({name!r}, module)"
        ) from error
    lacks = [function for function in REQUIRED_OF_PRIVATE_USE if not hasattr(module, function)]
    if lacks:
        raise OptionError(f"backends.private_use: torch.{name} lacks {', '.join(lacks)}, which a step needs")
    fallbacks: dict[str, Any] = {
        "get_device_name": {"describe": lambda: name},
        "get_amp_supported_dtype": {"autocast_dtypes": tuple},
        "synchronize": {"synchronize": torch.accelerator.synchronize},
        "max_memory_allocated": {"memory": lambda: Memory(current=0, peak=0)},
        "empty_cache": {"empty_cache": None},
    }
    defaults: dict[str, Any] = {"platform": "PrivateUse1", "distributed": "gloo", "compile_backend": "aot_eager"}
    for function, fallback in fallbacks.items():
        if not hasattr(module, function):
            defaults |= fallback
    return DeviceModule(name).record(**{**defaults, **fields})


@contextmanager
def allow_tf32(switch: Any) -> Iterator[None]:
    """Context in which the `allow_tf32` of an object such as `torch.backends.mkldnn` is True."""
    previous = switch.allow_tf32
    switch.allow_tf32 = True
    try:
        yield
    finally:
        switch.allow_tf32 = previous


def float32_precision() -> str:
    """Return the precision of `torch.set_float32_matmul_precision`, or the newer settings of torch that replaced it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # None of the getter's words ("highest", "high", "medium") says that the precision was set for one device only,
        # or as "tf32" for all.
        cuda, mkldnn = (switch.fp32_precision for switch in _switches())
        return f"cuda {cuda}, mkldnn {mkldnn}"


@contextmanager
def float32_matmul_precision(precision: str) -> Iterator[None]:
    """Context that sets `torch.set_float32_matmul_precision`: ``"high"`` allows TF32. Its end restores the setting.

    Raises an OptionError if a newer setting of torch was used, since torch then cannot return the old precision.
    """
    try:
        previous = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        raise OptionError(
            "with_amp('tf32'), matmul_precision: torch.backends.fp32_precision, or that of a single device, was set to "
            f"another precision ({float32_precision()}), so that torch cannot return the precision of float32 matmuls; "
            "do not set it, or leave out these wrappers"
        ) from error
    newer_settings = [(switch, switch.fp32_precision) for switch in _switches()]
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)
        for switch, value in newer_settings:
            _restore(switch, value)


def _switches() -> tuple[Any, Any]:
    """Return the objects whose `fp32_precision` is changed by `torch.set_float32_matmul_precision`, too."""
    mkldnn: Any = torch.backends.mkldnn
    return torch.backends.cuda.matmul, mkldnn.matmul


def _restore(switch: Any, value: str) -> None:
    """Set the `fp32_precision` of a switch to `value` again.

    "none" inherits `torch.backends.fp32_precision`. It is kept if it gives `value`, so that the switch still inherits.
    """
    switch.fp32_precision = "none"
    if switch.fp32_precision != value:
        switch.fp32_precision = value
