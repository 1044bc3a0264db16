"""The matrix products and attention calls of a loss, recorded while it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ftrain import random, tree
from ftrain._torch import FakeTensorMode, TorchDispatchMode, fake_like
from ftrain.profiling.anatomy.predicted import fake_run
from ftrain.profiling.hints.facts import FASTEST, MIDDLING, SLOWEST, Attention, Product
from ftrain.step.module_path import Running
from ftrain.step.recording import is_aside
from ftrain.step.step import Step
from ftrain.transforms.remat.policies import ATTENTION
from ftrain.types import Gradients, Hyper, LossFn, LossOutput, PyTree, TrainState, UpdateFn, replace

_aten = torch.ops.aten
FACTORS = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1}
"""Where the two factors of a product stand among its arguments."""

POSITIONS = {
    F.scaled_dot_product_attention: {3: "attn_mask", 4: "dropout_p"},
    F.multi_head_attention_forward: {10: "dropout_p"},
}
PLAIN = {"attn_mask": None, "key_padding_mask": None, "dropout_p": 0.0, "need_weights": False}
"""Arguments of attention that may force a slower kernel, with the values that do not."""

DEFAULTS = {(F.multi_head_attention_forward, "need_weights"): True}
"""Defaults of torch that differ from `PLAIN`."""


def watch(step: Step, state: TrainState, batch: PyTree) -> tuple[list[Product], list[Attention]]:
    """Return the products and attention calls of the loss of a step, in all its microbatches.

    Raises:
        TraceError: when the step asks for the value of a tensor.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state = replace(state, step=None, rng=None)
    state, batch = tree.map(
        lambda leaf: _fake_on_device(mode, leaf) if isinstance(leaf, Tensor) else leaf, (state, batch)
    )
    key = None
    if step.base.needs_rng:
        key = random.to_device(random.from_words((0, 0)), tree.device_of(state.params))
        key = _fake_on_device(mode, key)
    seen = _Seen(step.base.module)

    def watching(loss: LossFn) -> LossFn:
        def watched(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            with seen, seen.attention, seen.running.followed():
                return loss(params, batch, rng=rng, buffers=buffers)

        return watched

    def skipping(update: UpdateFn) -> UpdateFn:
        def skipped(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            return state

        return skipped

    core = step.assemble(around_loss=watching, around_update=skipping)
    with fake_run("hints", step, mode):
        core(state, batch, {}, key)
    return seen.products, seen.attentions


def _fake_on_device(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    return fake_like(mode, tensor, tree.HOST if tensor.is_meta else None)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records products, and which kernels of attention run."""

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []
        self.attentions: list[Attention] = []
        self.attention = _Calls(self)
        self.running = Running(module)
        self._kernels: list[int] = []
        self._silent = False

    def rank(self, call: Callable[[], Any], *, silent: bool) -> tuple[Any, int]:
        """Return the result of a call, and the rank of the attention kernel that it ran."""
        outer_kernels, self._kernels, self._silent = self._kernels, [], silent
        try:
            # What such a call saves for a gradient must not count as saved by a rematerialised block.
            with saved_tensors_hooks(_same, _same) if silent else nullcontext():
                returned = call()
            return returned, min(self._kernels, default=SLOWEST)
        finally:
            self._kernels, self._silent = outer_kernels, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        returned = func(*args, **(kwargs or {}))
        if func in ATTENTION:
            self._kernels.append(MIDDLING if "efficient" in func.name() else FASTEST)
        if func in FACTORS and not self._silent and not is_aside():
            left, right = args[FACTORS[func] :][:2]
            *many, rows, inner = left.shape
            columns, exact = right.shape[-1], _is_exact(left.dtype)
            flops = 2 * rows * inner * columns * (many[0] if many else 1)
            self.products.append(Product(self.running.name, rows, inner, columns, left.dtype, exact, flops))
        return returned


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _is_exact(dtype: torch.dtype) -> bool:
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # The user has set precisions for single devices, which torch cannot report; a hint is not needed then.
        exact = False
    return dtype == torch.float64 or (dtype == torch.float32 and exact)


class _Calls(TorchFunctionMode):
    """Finds the arguments that force a slower kernel, for each call of attention."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; attention again without each argument that may matter."""
        kwargs = dict(kwargs or {})
        if func not in POSITIONS or is_aside():
            return func(*args, **kwargs)
        returned, rank = self._seen.rank(lambda: func(*args, **kwargs), silent=False)
        causes: list[str] = []
        for names in _suspects(func, args, kwargs):
            # Where several arguments each force it, leaving out one of them changes nothing.
            if len(names) > 1 and causes:
                break
            if self._seen.rank(_without(func, args, kwargs, names), silent=True)[1] > rank:
                causes += names
        values = {name: _describe(_argument(func, args, kwargs, name)) for name in causes}
        self._seen.attentions.append(Attention(self._seen.running.name, rank, values))
        return returned


def _argument(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    place = next((index for index, each in POSITIONS[func].items() if each == name), len(args))
    return args[place] if place < len(args) else kwargs.get(name, DEFAULTS.get((func, name), PLAIN[name]))


def _describe(value: Any) -> str:
    return tree.describe(value) if isinstance(value, Tensor) else repr(value)


def _suspects(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[list[str]]:
    """Return the arguments that may force a slower kernel: one by one, and then all together."""
    values = {name: _argument(func, args, kwargs, name) for name in PLAIN}
    suspects = [name for name, value in values.items() if isinstance(value, Tensor) or value != PLAIN[name]]
    single = [[name] for name in suspects]
    return [*single, suspects] if len(suspects) > 1 else single


def _without(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]) -> Callable[[], Any]:
    """Return the call with plain values for some of its arguments."""
    places = {name: index for index, name in POSITIONS[func].items() if index < len(args)}
    positional, named = list(args), dict(kwargs)
    for name in names:
        if name in places:
            positional[places[name]] = PLAIN[name]
        else:
            named[name] = PLAIN[name]
    return partial(func, *positional, **named)
