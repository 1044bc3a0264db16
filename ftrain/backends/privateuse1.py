"""Devices that a package adds to torch as PrivateUse1, in Python or in C++.

Source: https://docs.pytorch.org/tutorials/advanced/privateuseone.html and
https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html. The tests train on such a device, which is
in host memory.
"""

from __future__ import annotations

from typing import Any

import torch

from ftrain.backends.device_module import DeviceModule
from ftrain.backends.registry import Backend, Memory
from ftrain.errors import OptionError

REQUIRED = "is_available", "manual_seed", "get_rng_state", "set_rng_state"


def private_use(name: str, **fields: Any) -> Backend:
    """Return the record of a PrivateUse1 device, made from the functions of its module, ``torch.<name>``.

    Memory is that of `memory_allocated` and `max_memory_allocated`, or zero; autocast dtypes are those of
    `get_amp_supported_dtype`, or none; `synchronize` and `empty_cache` are used if they exist. The other fields are
    conservative: no TF32, no graphs, no fused kernels, no pinned memory, and ``aot_eager`` as compiler.

    Args:
        name: name of the device, as given to `torch.utils.rename_privateuse1_backend`.
        fields: fields of `Backend` that replace those above, such as `distributed`.

    Raises:
        OptionError: if torch has no such device, or its module lacks a function that a step needs.

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
    lacks = [function for function in REQUIRED if not hasattr(module, function)]
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
