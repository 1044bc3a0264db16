"""Update each parameter as soon as its gradient is complete, so that not all gradients exist at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from ftrain import tree
from ftrain.errors import ComposeError
from ftrain.optim.partial_update import UpdateSplitter, by_size, require_splittable
from ftrain.step.wrapper import OnUpdate, Wrapper, wrapper
from ftrain.types import Gradients, Hyper, Optimizer, TrainState, UpdateFn, consume, replace

NAME = "update_in_backward"
GROUP_BYTES = 1 << 19
"""Gradients are updated in groups of this many bytes: an update for each small one would take longer."""


@wrapper
def update_in_backward() -> Wrapper:
    """Update each parameter within the backward pass, when its gradient is complete (Lv et al. 2023, arXiv:2306.09782).

    The gradient is then freed before the next one is computed. The result is the same to the bit. With donation, a step
    that fails in its backward pass has consumed its state, since a part of it is updated already. In a step that is
    compiled whole, the compiler decides when a gradient is freed.

    Raises:
        ComposeError: together with a wrapper that needs all gradients at once (`clip`, `accumulate`, `skip_nonfinite`,
            `skip_spikes`, `sam`, fp16, and `fit(on_oom="split")`), in a split-compiled step, whose backward pass
            returns all gradients, or for an optimizer that cannot update parameters one by one (its `split` is None).
    """
    return Wrapper(NAME, f"{NAME}()", update=OnUpdate(make_update=_make_update), validate=_require_compatible)


def _require_compatible(step: Any) -> None:
    require_splittable(NAME, step.optimizer)
    for other in step.wrappers:
        scales_loss = other.grad is not None and other.grad.loss_scale is not None
        if other.reads_gradients or other.may_refuse_updates or scales_loss:
            alternative = ", or use bf16, which needs no loss scale" if scales_loss else ""
            raise ComposeError(
                f"{NAME}: {other.text} needs all gradients at once, and each is freed before the next one is computed; "
                f"leave out one of the two{alternative}"
            )


def _make_update(optimizer: Optimizer) -> UpdateFn:
    splitter = UpdateSplitter(NAME, optimizer, lambda leaves: by_size(leaves, GROUP_BYTES))

    def update(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        if gradients.stream_grads is None:
            raise ComposeError(f"{NAME}: a grad wrapper dropped Gradients.stream_grads; use dataclasses.replace")
        grouped_update = splitter.begin(state.params, state.opt_state, hyper, donate=donate)
        group_of = {index: group for group in grouped_update.groups for index in group.indices}
        leaves = tree.leaves(state.params)
        # Gradients by the identity of a group, until the group has all of them.
        incomplete: dict[int, dict[int, Tensor]] = {}

        def receive(index: int, grad: Tensor) -> None:
            group = group_of[index]
            grads = incomplete.setdefault(id(group), {})
            grads[index] = grad
            if len(grads) == len(group.indices):
                del incomplete[id(group)]
                grouped_update.update(group, [grads[i] for i in group.indices])
                if donate:
                    # Fused kernels do not increment the version counters, by which autograd detects later misuse.
                    increment_version([leaves[i] for i in group.indices])

        try:
            gradients.stream_grads(receive)
        except BaseException:
            if donate:
                consume(state)
            raise
        params, opt_state = grouped_update.finish()
        return replace(state, params=params, opt_state=opt_state, buffers=gradients.buffers)

    return update
