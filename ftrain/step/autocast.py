"""Compute a loss in 16 bits: `torch.autocast`, and the dtypes that a device supports."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.errors import DeviceError, log_on_first_rank
from ftrain.tree import dtype_name
from ftrain.types import LossFn, LossOutput, PyTree

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def name_of(dtype: Any) -> str:
    """Return the short name of a dtype: ``"bf16"`` for `torch.bfloat16`, ``"bfloat16"`` and ``"bf16"``.

    >>> name_of(torch.float16), name_of("float16"), name_of("fp8")
    ('fp16', 'fp16', 'fp8')
    """
    name = dtype_name(dtype)
    return {"bfloat16": "bf16", "float16": "fp16"}.get(name, name)


def require_dtype(function: str, name: str, backend: backends.Backend) -> None:
    """Check that a device can compute in ``"bf16"`` or ``"fp16"``. Raises a DeviceError that lists its dtypes."""
    supported = backend.autocast_dtypes()
    if DTYPES[name] not in supported:
        choices = ", ".join([*map(name_of, supported), "float32"])
        raise DeviceError(f"{function}: {backend.describe()} cannot compute in {name}; use one of {choices}")
    if DTYPES[name] in backend.emulated_dtypes():
        _warn_of_emulation(function, name, backend.describe())


@functools.cache
def _warn_of_emulation(function: str, name: str, device: str) -> None:
    """Log that a dtype is emulated, once in a process."""
    log_on_first_rank(
        "%s: %s is emulated on %s, and may take ten times as long as float32; use 'auto', which is bf16 if the device "
        "computes in it natively, and else float32",
        function,
        name,
        device,
    )


def auto_dtype(backend: backends.Backend) -> str:
    """Return the dtype that ``"auto"`` means on a device: ``"bf16"`` if it is native there, else ``"float32"``."""
    return "bf16" if torch.bfloat16 in backend.native_dtypes else "float32"


def autocast(loss: LossFn, dtype: torch.dtype) -> LossFn:
    """Return a loss that runs under `torch.autocast` on the device of its parameters."""

    def cast(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        with torch.autocast(tree.device_of(params).type, dtype=dtype):
            return loss(params, batch, rng=rng, buffers=buffers)

    return cast
