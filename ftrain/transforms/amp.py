"""Mixed precision: compute in a narrow dtype, keep parameters, gradients and optimizer state wide."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.errors import DeviceError, OptionError
from ftrain.types import Loss, LossFn, LossOutput, PyTree, TrainState
from ftrain.wrapper import Wrapper, wrapper

NAME = "with_amp"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", "bfloat16": "bf16", "float16": "fp16"}
CHOICES = ("bf16", "fp16", "tf32")

INITIAL_SCALE = 2.0**16
GROWTH = 2.0
GROWTH_INTERVAL = 2000
"""The constants of `torch.amp.GradScaler`."""


@wrapper
def with_amp(dtype: str | torch.dtype = "bf16") -> Wrapper:
    """Run the loss in mixed precision (Micikevicius et al. 2018, arXiv:1710.03740).

    Parameters, gradients and optimizer state keep their dtype. With ``"bf16"`` and ``"fp16"`` the loss
    runs under `torch.autocast`. With ``"fp16"`` the gradient is taken with a cotangent that adapts, as in
    `torch.amp.GradScaler`: a step that overflows changes nothing but this wrapper's `scale` and `good`
    (steps since the last change) and the step count. ``"tf32"`` lets float32 products run in TF32.

    Args:
        dtype: ``"bf16"``, ``"fp16"`` or ``"tf32"``, or the `torch.dtype`.

    Raises:
        OptionError: for another dtype.
        DeviceError: from `Step.init`, when the device cannot compute in it.
    """
    name = NAMES.get(dtype, dtype)
    if name not in CHOICES:
        raise OptionError(f"with_amp: dtype is {dtype!r}; choices are {', '.join(CHOICES)}")
    text = f"with_amp({name})"
    if name == "tf32":
        return Wrapper(NAME, text, "loss", loss=_with_tf32, require=_require_tf32)

    def wrap(loss: Loss) -> Loss:
        return dataclasses.replace(loss, fn=autocast(loss.fn, DTYPES[name]), text=f"{loss.text} <- {text}")

    def require(backend: backends.Backend) -> None:
        require_dtype(NAME, name, backend)

    scaling = {"slot": _slot, "scale": _scale, "account": _account} if name == "fp16" else {}
    return Wrapper(NAME, text, "loss", loss=wrap, require=require, **scaling)  # type: ignore[arg-type]


def require_dtype(function: str, name: str, backend: backends.Backend) -> None:
    """Check that a device can compute in ``"bf16"`` or ``"fp16"``.

    Raises:
        DeviceError: naming the device and what it has.
    """
    able = backend.autocast_dtypes()
    if DTYPES[name] not in able:
        other = ", ".join([*(NAMES[choice] for choice in able), "float32"])
        raise DeviceError(f"{function}: {backend.describe()} cannot compute in {name}; it has {other}")


def autocast(loss: LossFn, dtype: torch.dtype) -> LossFn:
    """Run a loss under `torch.autocast` on the device of its parameters."""

    def cast(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        with torch.autocast(tree.device_of(params).type, dtype=dtype):
            return loss(params, batch, rng=rng, buffers=buffers)

    return cast


def _with_tf32(loss: Loss) -> Loss:
    def scope(training: bool) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(loss.scope(training))
        stack.enter_context(backends.default().tf32() or ExitStack())
        return stack

    return dataclasses.replace(loss, scope=scope, text=f"{loss.text} <- with_amp(tf32)")


def _require_tf32(backend: backends.Backend) -> None:
    if backend.tf32() is None:
        raise DeviceError(f"with_amp: {backend.describe()} has no TF32; use bf16, or leave with_amp out for float32")


def _slot(params: PyTree) -> PyTree:
    device = tree.device_of(params)
    return {
        "scale": torch.full((), INITIAL_SCALE, dtype=torch.float32, device=device),
        "good": torch.zeros((), dtype=torch.int64, device=device),
    }


def _scale(state: TrainState) -> Tensor:
    return state.slots[NAME]["scale"]  # type: ignore[no-any-return]


def _account(slot: PyTree, finite: Tensor) -> PyTree:
    good = slot["good"] + 1
    larger = slot["scale"] * GROWTH
    grow = good >= GROWTH_INTERVAL
    grown = torch.where(grow & torch.isfinite(larger), larger, slot["scale"])
    return {
        "scale": torch.where(finite, grown, slot["scale"] / GROWTH),
        "good": torch.where(finite & ~grow, good, 0),
    }
