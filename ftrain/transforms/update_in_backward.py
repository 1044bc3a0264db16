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
    that fails in its backward pass has consumed its state, some of which is updated. In a step that is compiled whole,
    the compiler decides when a gradient is freed.

    Raises:
        ComposeError: beside a wrapper that needs all gradients at once (`clip`, `accumulate`, `skip_nonfinite`, fp16,
            and `fit(on_oom="split")`), in a split-compiled step, whose backward pass returns all gradients, or for an
            optimizer that cannot update parameters one by one (its `split` is None).
    """
    return Wrapper(NAME, f"{NAME}()", update=OnUpdate(make_update=_make_update), validate=_require_alone)


def _require_alone(step: Any) -> None:
    require_splittable(NAME, step.optimizer)
    for other in step.wrappers:
        scaled = other.grad is not None and other.grad.loss_scale is not None
        if other.reads_gradients or other.may_refuse_updates or scaled:
            raise ComposeError(
                f"{NAME}: {other.text} needs all gradients at once, and each is freed before the next one is computed; "
                f"leave out one of the two{', or use bf16, which needs no loss scale' if scaled else ''}"
            )


def _make_update(optimizer: Optimizer) -> UpdateFn:
    splitter = UpdateSplitter(NAME, optimizer, lambda leaves: by_size(leaves, GROUP_BYTES))

    def update(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        if gradients.stream_grads is None:
            raise ComposeError(f"{NAME}: a grad wrapper dropped Gradients.stream_grads; use dataclasses.replace")
        grouped = splitter.begin(state.params, state.opt_state, hyper, donate=donate)
        group_of = {place: group for group in grouped.groups for place in group.indices}
        leaves = tree.leaves(state.params)
        waiting: dict[int, dict[int, Tensor]] = {}

        def take(index: int, grad: Tensor) -> None:
            group = group_of[index]
            grads = waiting.setdefault(id(group), {})
            grads[index] = grad
            if len(grads) == len(group.indices):
                del waiting[id(group)]
                grouped.update(group, [grads[place] for place in group.indices])
                if donate:
                    # Fused kernels do not count their writes, which the checks of later reads rely on.
                    increment_version([leaves[place] for place in group.indices])

        try:
            gradients.stream_grads(take)
        except BaseException:
            if donate:
                consume(state)
            raise
        params, opt_state = grouped.finish()
        return replace(state, params=params, opt_state=opt_state, buffers=gradients.buffers)

    return update
