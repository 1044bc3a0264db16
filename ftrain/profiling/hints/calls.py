"""Record the matmuls and attention calls of a loss while it runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ftrain import random, tree
from ftrain._torch import TorchDispatchMode, dtensor, fake_like
from ftrain._torch.fake import CaptureFakeTensorMode, uninterrupted
from ftrain.backends.device_module import float32_precision
from ftrain.parallel.sharded import NAME as SHARDED
from ftrain.profiling.anatomy.predicted import fake_run
from ftrain.profiling.hints.rules import FASTEST, MIDDLE, SLOWEST, Attention, Matmul
from ftrain.profiling.module_path import RunningModule
from ftrain.profiling.step_variants import remove_wrapper
from ftrain.random import unfused
from ftrain.step.blocks import is_unrecorded
from ftrain.step.core import assemble
from ftrain.step.step import Step
from ftrain.transforms.remat.policies import ATTENTION
from ftrain.tree.wrapped_tensors import map_plain
from ftrain.types import Gradients, Hyper, LossFn, LossOutput, PyTree, TrainState, replace

_aten = torch.ops.aten
FIRST_FACTOR = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1}
"""Matmul -> index of its first factor among its arguments; the second factor follows."""

PLAIN = {"attn_mask": None, "key_padding_mask": None, "dropout_p": 0.0, "need_weights": False}
"""Argument of attention that may force a slower kernel -> the value that does not."""


def record_calls(step: Step, state: TrainState, batch: PyTree) -> tuple[list[Matmul], list[Attention]]:
    """Return the matmuls and attention calls in the forward pass of a step on one rank, over all microbatches."""
    mode = CaptureFakeTensorMode(allow_non_fake_inputs=True)
    # On one rank the local tensor is the whole tensor.
    step, state = remove_wrapper(step, SHARDED), tree.map(dtensor.local_part, replace(state, step=None, rng=None))
    key = None
    if step.base.needs_rng:
        key = random.to_device(random.wrap_key_data((0, 0)), tree.device_of(state.params))
    recorder = _Recorder(step.base.module)

    def recording(loss: LossFn) -> LossFn:
        def recorded(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            with recorder, _AttentionRecorder(recorder), recorder.running.tracked():
                return loss(params, batch, rng=rng, buffers=buffers)

        return recorded

    def skipped(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        return state

    run = assemble(step, around_loss=recording, around_update=lambda update: skipped)
    with uninterrupted():

        def fake(plain: Tensor) -> Tensor:
            return fake_like(mode, plain, tree.HOST if plain.is_meta else None)

        state, batch, key = tree.map(
            lambda leaf: map_plain(fake, leaf) if tree.is_tensor(leaf) else leaf, (state, batch, key)
        )
        with fake_run("hints", step, mode):
            run(state, batch, {}, key)
    return recorder.matmuls, recorder.attentions


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records matmuls, and which kernels of attention run."""

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.matmuls: list[Matmul] = []
        self.attentions: list[Attention] = []
        self.running = RunningModule(module)
        self._ranks: list[int] = []
        self._is_trial = False

    def run(self, call: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of a call, and the rank of the slowest attention kernel that it runs."""
        outer_ranks, self._ranks = self._ranks, []
        try:
            return call(), min(self._ranks, default=SLOWEST)
        finally:
            self._ranks = outer_ranks

    def try_rank(self, call: Callable[[], Any]) -> int:
        """Return the rank of a call that is not part of the loss, without recording its matmuls."""
        self._is_trial = True
        try:
            # Otherwise a rematerialised block would count the tensors that the call saves for its gradient.
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                return self.run(call)[1]
        finally:
            self._is_trial = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if func in ATTENTION:
            self._ranks.append(kernel_rank(func))
        if func in FIRST_FACTOR and not self._is_trial and not is_unrecorded():
            first, second = args[FIRST_FACTOR[func] :][:2]
            rows, inner = first.shape[-2:]
            columns = second.shape[-1]
            flops = 2 * first.numel() * columns
            is_float32 = first.dtype == torch.float32 and float32_precision() == "highest"
            is_exact = is_float32 or first.dtype == torch.float64
            self.matmuls.append(Matmul(self.running.name, rows, inner, columns, first.dtype, is_exact, flops))
        return returned


def kernel_rank(operation: Any) -> int:
    """Return the rank of a fused attention kernel."""
    return MIDDLE if "efficient" in operation.name() else FASTEST


class _AttentionRecorder(TorchFunctionMode):
    """Records calls of attention, with the arguments that force a slower kernel."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention runs again with other arguments, to find those that force a slower kernel.
        kwargs = kwargs or {}
        if func not in unfused.ATTENTION or is_unrecorded():
            return func(*args, **kwargs)
        returned, rank = self._recorder.run(partial(func, *args, **kwargs))
        # The default of `multi_head_attention_forward`.
        arguments: dict[str, Any] = {"need_weights": True} if "need_weights" in unfused.ATTENTION[func] else {}
        arguments |= {**dict(zip(unfused.ATTENTION[func], args, strict=False)), **kwargs}
        suspects = {
            name: arguments[name]
            for name, value in PLAIN.items()
            if name in arguments and (isinstance(arguments[name], Tensor) or arguments[name] != value)
        }
        plain = {**arguments, **{name: PLAIN[name] for name in suspects}}
        fastest = self._recorder.try_rank(partial(func, **plain)) if suspects else rank
        causes = {
            name: tree.describe(value) if isinstance(value, Tensor) else repr(value)
            for name, value in suspects.items()
            if self._recorder.try_rank(partial(func, **{**plain, name: value})) < fastest
        }
        self._recorder.attentions.append(Attention(self._recorder.running.name, rank, causes))
        return returned
