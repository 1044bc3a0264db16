"""The module of a device, ``torch.<name>``, in which vendors provide the functions of `torch.cuda`.

The names are those that torch requires of a PrivateUse1 device
(https://docs.pytorch.org/docs/stable/accelerator/index.html) and of `torch.accelerator`
(https://docs.pytorch.org/docs/stable/accelerator.html).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ftrain.backends.copying import StreamCopier
from ftrain.backends.generators import Generator, save_generators, seeded
from ftrain.backends.graph_recorder import GraphRecorder
from ftrain.backends.registry import Backend, Memory, Recorder
from ftrain.errors import OptionError

NARROW = torch.bfloat16, torch.float16


class DeviceModule:
    """The module of a device, looked up when it is used, after the vendor's package was imported.

    Args:
        name: the device type.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def record(self, **fields: Any) -> Backend:
        """Make the record of the device from its module.

        Args:
            fields: fields of `Backend` that the module does not define, mainly `distributed`, and those that differ
                from `torch.cuda`.

        Raises:
            OptionError: for a field of the wrong type.
        """
        defaults: dict[str, Any] = {
            "name": self._name,
            "available": self.available,
            "describe": self.describe,
            "autocast_dtypes": self.autocast_dtypes,
            "seeded": self.seeded,
            "generators": self.generators,
            "synchronize": self.synchronize,
            "memory": self.memory,
            "free": self.free,
            "empty_cache": self.empty_cache,
        }
        return Backend(**{**defaults, **fields})

    @property
    def module(self) -> Any:
        """``torch.<name>``."""
        return torch.get_device_module(self._name)

    def available(self) -> bool:
        """Whether this machine has such a device."""
        return bool(self.module.is_available())

    def describe(self) -> str:
        """The name of the hardware."""
        return str(self.module.get_device_name())

    def autocast_dtypes(self) -> tuple[torch.dtype, ...]:
        """The 16-bit dtypes of autocast, from a function that torch requires of every PrivateUse1 device."""
        supported = self.module.get_amp_supported_dtype()
        return tuple(dtype for dtype in NARROW if dtype in supported)

    @property
    def generator(self) -> Generator:
        """The functions of the device's generator."""
        return Generator(self.module.get_rng_state, self.module.set_rng_state, self.module.manual_seed)

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Context in which the generators of the host and of the device are seeded."""
        return seeded(seed, self.generator)

    def generators(self) -> Callable[[], None]:
        """Save the generators of the host and of the device, and return a function that restores them."""
        return save_generators(self.generator)

    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""
        self.module.synchronize()

    def memory(self) -> Memory:
        """Bytes of tensors: current and peak."""
        return Memory(current=int(self.module.memory_allocated()), peak=int(self.module.max_memory_allocated()))

    def free(self) -> int | None:
        """Free bytes, including those of the cache; None if the module does not report them."""
        if not (hasattr(self.module, "mem_get_info") and hasattr(self.module, "memory_reserved")):
            return None
        cached = int(self.module.memory_reserved()) - int(self.module.memory_allocated())
        return int(self.module.mem_get_info()[0]) + cached

    def empty_cache(self) -> None:
        """Return cached memory to the device."""
        self.module.empty_cache()

    def copier(self) -> StreamCopier:
        """Copy on a stream of the device."""
        return StreamCopier(self.module)

    def recorder(self, **options: Any) -> Recorder:
        """Return a function that records in the vendor's graph, which has the interface of `torch.cuda.CUDAGraph`.

        If the vendor's package is too old to have graphs, that function raises DeviceError, a RuntimeError.

        Args:
            options: options of ``torch.<name>.graph``.
        """
        return GraphRecorder(self.module, self._name, options)


@contextmanager
def allow_tf32(switch: Any) -> Iterator[None]:
    """Context in which an object's `allow_tf32` is True, such as `torch.backends.mkldnn`."""
    previous = switch.allow_tf32
    switch.allow_tf32 = True
    try:
        yield
    finally:
        switch.allow_tf32 = previous


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Context with this precision of `torch.set_float32_matmul_precision`; TF32 is ``"high"``.

    Raises:
        OptionError: when the precision of a single device was set, as torch then has no common one to restore.
    """
    try:
        previous = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        raise OptionError(
            "torch.backends has an fp32_precision that was set for one device; torch then refuses to say what the "
            "precision of float32 products is. Leave that alone, or leave out with_amp('tf32') and matmul_precision"
        ) from error
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)
