"""Mixed precision: compute in a narrow dtype; parameters, gradients and optimizer state stay wide."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.errors import DeviceError, OptionError, StructureError, require_switches
from ftrain.step.autocast import DTYPES, auto_dtype, autocast, name_of, require_dtype
from ftrain.step.value_and_grad import around_forward
from ftrain.step.wrapper import OnGrad, OnLoss, SlotSpec, Wrapper, wrapper
from ftrain.transforms.amp.experts import with_narrow_experts
from ftrain.transforms.amp.float8 import in_float8, require_torchao
from ftrain.transforms.amp.loss_scale import NAME, initial_slot, next_slot, reporting_scale, scale_of
from ftrain.transforms.amp.overflow_counts import reporting_gradients, watched
from ftrain.transforms.matmul_precision import set_matmul_precision
from ftrain.types import GradFn, Loss, LossOutput, PyTree

Dtype: TypeAlias = Literal["auto", "bf16", "bfloat16", "fp16", "float16", "tf32", "fp8"] | torch.dtype
CHOICES = ("auto", "bf16", "fp16", "tf32", "fp8")


@wrapper
def with_amp(dtype: Dtype = "auto", *, watch: bool = False) -> Wrapper:
    """Run the loss in mixed precision (Micikevicius et al. 2018, arXiv:1710.03740).

    Parameters, gradients and optimizer state keep their dtype. With ``"bf16"`` and ``"fp16"`` the loss runs under
    `torch.autocast`, even where the device emulates the dtype; the log then says once that it is slow. With ``"fp16"``
    the loss is scaled as by `torch.amp.GradScaler`: a step that overflows changes only the step count and this
    wrapper's slot (`scale`, and `good`, the steps since its last change). The metric `loss_scale` is the scale of the
    step, which is never below 2**-24.

    ``"auto"`` is ``"bf16"`` on a device that multiplies in bfloat16 natively (`Backend.native_dtypes`), and float32 on
    others; `print` shows which as soon as the step has a state. Ask for ``"fp16"`` by name, for GPUs older than Ampere.

    ``"tf32"`` lets float32 matmuls run in TF32, on devices that have it. ``"fp8"`` is ``"bf16"`` in which the linear
    layers of a module, except the last one, multiply in float8 in both passes, by torchao: each tensor is scaled by its
    largest magnitude (Micikevicius et al. 2022, arXiv:2209.05433). Run on an H200, eager.

    With `watch` the metrics show what each part of the model loses to the dtype; parts are its modules, and in a pure
    function its `ft.block` functions. `ftrain.precision_report` prints them as a table. They are shares of elements, in
    [0, 1]; a tiny number is below the smallest normal one, 2**-14 in float16 and 2**-126 in bfloat16:

    * ``overflow/<part>``: outputs that are infinite or NaN, but finite when the part runs in float32 with the same
      inputs, parameters and random numbers. So it shows where an overflow starts, and not the parts after it.
    * ``underflow/<part>``: outputs that are zero or tiny, but not zero in float32.
    * ``grad_overflow/<part>``: gradients of the outputs, with the loss scale, that are infinite or NaN.
    * ``grad_underflow/<part>``: the share of tiny ones among these gradients that are not zero; 1 if all are zero.

    The results stay the same to the bit. Each part runs once more, so that a step takes several times as long; a
    split-compiled step runs a watched loss uncompiled. A part with arguments other than tensors and numbers (such as
    the caches of transformers) is not watched, but the parts inside it are.

    Args:
        dtype: ``"auto"``, ``"bf16"``, ``"fp16"``, ``"tf32"`` or ``"fp8"``, or `torch.bfloat16` or `torch.float16`.
        watch: report the overflows and underflows of each part.

    Raises:
        OptionError: for another dtype; for `watch` with ``"tf32"``, ``"fp8"`` or ``"auto"``; for ``"fp8"`` when the
            loss has no module with such layers.
        FtrainError: for ``"fp8"`` without torchao, or without torch.distributed, which torchao imports.
        ComposeError: for ``"fp8"`` with adapters; for ``"tf32"`` with `ftrain.matmul_precision`; from the step, when
            it is watched and a pure loss calls no function marked by `ft.block`.
        LossError: from the step, when it is watched and a part does not run in float32.
        DeviceError: from `Step.init`, when the device cannot compute in the dtype.
        StructureError: from `Step.init`, for trainable parameters in float16, and under ``"fp16"`` in bfloat16, whose
            gradients would vanish when they are divided by the scale. Frozen parameters may be narrow.
    """
    name = name_of(dtype)
    if name not in CHOICES:
        raise OptionError(f"with_amp: dtype is {dtype!r}; choices are {', '.join(CHOICES)}")
    require_switches("with_amp", watch=watch)
    if watch and name not in DTYPES:
        raise OptionError(f"with_amp: watch=True with {name}; watch bf16 or fp16, given by name")
    options = {"dtype": name, "watch": watch}
    if name == "fp8":
        require_torchao()
    if name == "tf32":
        text = "with_amp(tf32)"
        on_loss = OnLoss(lambda loss: set_matmul_precision(loss, text, _tf32), order=2)
        return Wrapper(NAME, text, loss=on_loss, require=_require_tf32, options=options)
    return _with_auto(options) if name == "auto" else _with_autocast(name, options)


def _with_autocast(name: str, options: Mapping[str, Any]) -> Wrapper:
    watch = options["watch"]
    scales_loss = name == "fp16"
    # What is not multiplied in float8 is computed in bfloat16.
    autocast_name = "bf16" if name == "fp8" else name
    text = f"with_amp({name}, watch)" if watch else f"with_amp({name})"

    def wrap(loss: Loss) -> Loss:
        if name == "fp8":
            loss = in_float8(loss)
        loss = with_narrow_experts(loss)
        fn = autocast(loss.fn, DTYPES[autocast_name])
        loss = dataclasses.replace(loss, fn=fn, wrapper_texts=(*loss.wrapper_texts, text), narrow=name)
        return watched(loss, DTYPES[autocast_name]) if watch else loss

    def wrap_grad(grad: GradFn) -> GradFn:
        if scales_loss:
            grad = around_forward(grad, reporting_scale)
        if watch:
            grad = around_forward(grad, reporting_gradients)
        return grad

    def require(backend: backends.Backend, params: PyTree) -> None:
        if name == "fp8" and not backend.float8():
            supported = ", ".join([*map(name_of, backend.autocast_dtypes()), "float32"])
            raise DeviceError(f"with_amp: {backend.describe()} has no matmuls in fp8; it has {supported}")
        require_dtype(NAME, autocast_name, backend)
        _require_wide(name, params)

    on_grad = None
    if scales_loss or watch:
        on_grad = OnGrad(wrap_grad, loss_scale=scale_of if scales_loss else None, by_element=True)
    slot = SlotSpec(initial_slot, next_slot) if scales_loss else None
    return Wrapper(NAME, text, loss=OnLoss(wrap, order=2), grad=on_grad, slot=slot, require=require, options=options)


def _require_wide(name: str, params: PyTree) -> None:
    """Raises a StructureError if a trained parameter is too narrow for mixed precision in the dtype of this name."""
    refused = {torch.float16, torch.bfloat16} if name == "fp16" else {torch.float16}
    for path, leaf in zip(tree.leaf_names(params), tree.leaves(params), strict=True):
        if leaf.dtype in refused:
            raise StructureError(
                f"with_amp({name}): {tree.path('params', path)} is {tree.describe(leaf)}, and so would its gradient "
                "be; mixed precision trains float32 parameters: convert them (module.float()), or freeze them with "
                "trainable=. To train in pure bfloat16, use bfloat16 parameters and leave out with_amp"
            )


def _with_auto(options: Mapping[str, Any]) -> Wrapper:
    text = "with_amp(auto)"
    # The name of a device's backend -> the name of the dtype.
    chosen: dict[str, str] = {}

    def require(backend: backends.Backend, params: PyTree) -> None:
        # Chosen here, since a compiler that traces the loss cannot trace the functions of a backend.
        chosen[backend.name] = auto_dtype(backend)
        if chosen[backend.name] == "bf16":
            _require_wide("bf16", params)

    def dtype_on(device: torch.device) -> str:
        # With only one device so far, its choice: an anatomy runs on tensors of the host instead of the device.
        if len(chosen) == 1:
            return next(iter(chosen.values()))
        return chosen[device.type] if device.type in chosen else auto_dtype(backends.of(device))

    def wrap(loss: Loss) -> Loss:
        loss = with_narrow_experts(loss)
        narrow_fn = autocast(loss.fn, torch.bfloat16)

        def fn(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            run = narrow_fn if dtype_on(tree.device_of(params)) == "bf16" else loss.fn
            return run(params, batch, rng=rng, buffers=buffers)

        return dataclasses.replace(loss, fn=fn, wrapper_texts=(*loss.wrapper_texts, text), narrow="auto")

    def choice() -> str:
        if not chosen:
            return ""
        return "auto: " + ", ".join(f"{dtype} on {device}" for device, dtype in chosen.items())

    return Wrapper(NAME, text, loss=OnLoss(wrap, order=2), require=require, choice=choice, options=options)


@contextmanager
def _tf32() -> Iterator[None]:
    # The device of the state is not known here; on others the setting has no effect on this step.
    with ExitStack() as stack:
        for name in backends.names():
            backend = backends.of(name)
            switch = backend.tf32() if backend.present else None
            if switch is not None:
                stack.enter_context(switch)
        yield


def _require_tf32(backend: backends.Backend, params: PyTree) -> None:
    if backend.tf32() is None:
        raise DeviceError(f"with_amp: {backend.describe()} has no TF32; use bf16, or leave with_amp out for float32")
