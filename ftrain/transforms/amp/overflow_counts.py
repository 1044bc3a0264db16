"""Count on the device how many elements overflow and underflow in each part of a model under a narrow dtype."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftrain import _torch, tree
from ftrain._context import setting
from ftrain.errors import ComposeError, LossError
from ftrain.random import torch_ops
from ftrain.step.blocks import forwarding, unrecorded, watched_by, within
from ftrain.step.forward import ForwardResult
from ftrain.step.loss_forms import report
from ftrain.step.swap_params import Slot, bound, preserve_attributes, slots_of
from ftrain.transforms.amp.loss_scale import NAME
from ftrain.types import Loss, LossOutput, Mean, Metrics, PyTree, replace

MODEL = "(model)"
"""The name of the module itself among its parts."""

OVERFLOW, UNDERFLOW = "overflow", "underflow"
GRAD_OVERFLOW, GRAD_UNDERFLOW = "grad_overflow", "grad_underflow"
KINDS = OVERFLOW, UNDERFLOW, GRAD_OVERFLOW, GRAD_UNDERFLOW
"""The metrics, ``<kind>/<part>``."""


def is_share(name: str) -> bool:
    """Return whether the name of a metric is ``<kind>/<part>`` with one of `KINDS`."""
    kind, _, part = name.partition("/")
    return bool(part) and kind in KINDS


HARMLESS = Tensor, int, float, complex, bool, str, bytes, torch.dtype, torch.device, type(None)
"""Types of arguments with which a part can run twice; it may write to others, such as caches."""

_forward: ContextVar[_Shares | None] = ContextVar("ftrain_watch_forward", default=None)
_backward: ContextVar[_Shares | None] = ContextVar("ftrain_watch_backward", default=None)


class _Shares:
    """Shares of elements by metric, as means, which add up over microbatches and batches."""

    def __init__(self) -> None:
        self.metrics: dict[str, Mean] = {}
        self.calls: Counter[str] = Counter()

    def add(self, kind: str, part: str, count: Tensor, total: Tensor) -> None:
        # In float32, which every device has: exact below 2 ** 24 elements, and to seven digits above.
        name, share = f"{kind}/{part}", Mean(count.to(torch.float32), total.to(torch.float32))
        self.metrics[name] = self.metrics[name].pooled(share) if name in self.metrics else share


def watched(loss: Loss, dtype: torch.dtype) -> Loss:
    """Return a loss that also reports the overflows and underflows of each part of its model in the autocast dtype.

    Raises, from the loss: a ComposeError when it ran no part that can be watched, and a LossError when a part fails in
    float32.
    """
    named_modules = () if loss.module is None else loss.module.named_modules()
    parts = [_Part(name or MODEL, module, slots_of(module), module) for name, module in named_modules]

    @contextmanager
    def scope(training: bool) -> Iterator[None]:
        has_hooks = loss.module is not None and _torch.has_forward_hooks(loss.module)
        parts_to_run = [part._replace(written=loss.module) for part in parts] if has_hooks else parts
        with loss.scope(training):
            # Another wrapper may have replaced the forward: an adapter, or a rematerialised block.
            forwards = [
                (part.module, functools.partial(_run, dtype, part, part.module.forward))
                for part in parts_to_run
                if part.module is not None
            ]
            with forwarding(forwards), watched_by(functools.partial(_run_marked, dtype)):
                yield

    def counting(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        shares = _Shares()
        with setting(_forward, shares):
            mean, metrics, new = loss.fn(params, batch, rng=rng, buffers=buffers)
        if not shares.metrics:
            raise ComposeError(
                f"with_amp: watch=True: {loss.text} ran no part that can be watched; mark the functions that it "
                "calls with ft.block(function)"
            )
        return mean, report(metrics, NAME, **shares.metrics), new

    # Otherwise Dynamo would compile the counting, once for each part.
    uncompiled: Any = torch.compiler.disable(counting)  # type: ignore[no-untyped-call]

    # `torch.compile` would compile a function that it is given itself, though it is disabled.
    def fn(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        return uncompiled(params, batch, rng=rng, buffers=buffers)  # type: ignore[no-any-return]

    return dataclasses.replace(loss, fn=fn, scope=scope)


def reporting_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that also reports the gradients of the outputs of the parts of a watched loss."""

    def watching(*args: Any) -> Any:
        shares = _Shares()

        def with_shares(metrics: Metrics) -> Metrics:
            return report(metrics, NAME, **shares.metrics)

        with setting(_backward, shares):
            result = run(*args)
        if isinstance(result, ForwardResult):
            return replace(result, finish_metrics=with_shares)
        return replace(result, metrics=with_shares(result.metrics))

    return watching


def _run_marked(dtype: torch.dtype, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function marked as a block; the calls of functions of one name are numbered."""
    shares = _forward.get()
    if shares is None:
        return run(*args, **kwargs)
    shares.calls[name] += 1
    return _run(dtype, _Part(f"{name}.{shares.calls[name] - 1}"), run, *args, **kwargs)


class _Part(NamedTuple):
    """A part of a model: its name, and if it is a module, that, the slots of its tensors, and what it may write to.

    A hook of a part may write to any attribute of the model, as one that keeps the outputs of layers in a list does.
    """

    name: str
    module: nn.Module | None = None
    slots: Sequence[Slot] = ()
    written: nn.Module | None = None


def _run(dtype: torch.dtype, part: _Part, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a part, and count its overflows and underflows in the dtype."""
    shares = _forward.get()
    arguments = (args, kwargs)
    # Without `_forward` it is a recomputation in the backward pass, which the forward pass has counted.
    if shares is None or not all(isinstance(leaf, HARMLESS) for leaf in tree.leaves(arguments)):
        return run(*args, **kwargs)
    with unrecorded():
        wide = _in_float32(part, run, arguments)
    returned = run(*args, **kwargs)
    with unrecorded():
        for narrow, exact in zip(_tensors(returned), wide, strict=False):
            _count(shares, part.name, dtype, narrow, exact)
    return returned


def _count(shares: _Shares, name: str, dtype: torch.dtype, narrow: Tensor, exact: Tensor) -> None:
    if narrow.shape != exact.shape or not narrow.numel():
        return
    values = narrow.detach()
    size = _full(narrow, narrow.numel())
    if narrow.dtype != dtype:  # Computed in a wider dtype, it loses nothing.
        for kind in (OVERFLOW, UNDERFLOW):
            shares.add(kind, name, torch.zeros_like(size), size)
        return
    shares.add(OVERFLOW, name, (~values.isfinite() & exact.isfinite()).sum(), size)
    shares.add(UNDERFLOW, name, (_is_tiny(values) & (exact != 0)).sum(), size)
    gradients = _backward.get()
    if gradients is not None and narrow.requires_grad:
        narrow.register_hook(functools.partial(_count_gradient, gradients, name))  # type: ignore[no-untyped-call]


def _count_gradient(shares: _Shares, name: str, gradient: Tensor) -> None:
    gradient = gradient.detach()
    size = _full(gradient, gradient.numel())
    shares.add(GRAD_OVERFLOW, name, (~gradient.isfinite()).sum(), size)
    is_nonzero = gradient != 0
    nonzeros = is_nonzero.sum()
    # Some zeros are intended, as those of ReLU and dropout. A gradient in which all are zero has vanished.
    has_vanished = nonzeros == 0
    tiny = torch.where(has_vanished, size, (_is_tiny(gradient) & is_nonzero).sum())
    shares.add(GRAD_UNDERFLOW, name, tiny, torch.where(has_vanished, size, nonzeros))


def _is_tiny(values: Tensor) -> Tensor:
    return values.abs() < torch.finfo(values.dtype).smallest_normal


def _full(like: Tensor, value: int) -> Tensor:
    return torch.full((), value, dtype=torch.int64, device=like.device)


def _in_float32(part: _Part, run: Callable[..., Any], arguments: Any) -> list[Tensor]:
    """Return the outputs of a part in float32 for the same inputs, parameters and random numbers; change no state."""
    tensors = [leaf for leaf in tree.leaves(arguments) if isinstance(leaf, Tensor)]
    tensors += [slot.tensors[slot.key] for slot in part.slots]
    device = tensors[0].device if tensors else tree.HOST
    # Copies: a part may write to its arguments.
    args, kwargs = tree.map(lambda leaf: _widened(leaf, copy=True) if isinstance(leaf, Tensor) else leaf, arguments)
    values = [_widened(slot.tensors[slot.key], copy=slot.is_buffer) for slot in part.slots]
    with (
        # The part may cache an attribute, such as a mask, which would then be float32.
        preserve_attributes(part.written),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        # So the narrow run draws the same random numbers.
        torch_ops.rng_snapshot(device)(),
        bound(part.slots, values),
        setting(_forward, None),
    ):
        try:
            return _tensors(within(None, run, *args, **kwargs))
        except RuntimeError as error:
            raise LossError(
                "with_amp: watch=True runs each part of the model a second time in float32, and "
                f"{part.name} fails there: {error}"
            ) from error


def _widened(tensor: Tensor, *, copy: bool) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wide, copy=copy)


def _tensors(returned: Any) -> list[Tensor]:
    """Return the floating-point tensors in the output of a part, which may be a mapping of another class than dict."""
    if isinstance(returned, Tensor):
        return [returned] if returned.is_floating_point() else []
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if not isinstance(returned, list | tuple):
        return []
    return [tensor for item in returned for tensor in _tensors(item)]
