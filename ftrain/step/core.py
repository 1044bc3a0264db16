"""The core of a step: loss, gradient and update in one function of tensors, which runs eagerly or is compiled."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ftrain import backends, random, tree
from ftrain.errors import LIBRARIES, ComposeError
from ftrain.step.across_ranks import order
from ftrain.step.forward import Forward
from ftrain.step.loss_forms import report
from ftrain.step.shared_memory import copy_shared
from ftrain.step.value_and_grad import StreamingGrad, ValueAndGrad
from ftrain.types import (
    RNG,
    Core,
    GradFn,
    Gradients,
    Hyper,
    LossFn,
    Mean,
    Metrics,
    Optimizer,
    PyTree,
    TrainState,
    UpdateFn,
    replace,
)

OnFiniteCheck = Callable[[PyTree, Tensor], PyTree]


def assemble(
    step: Any,
    *,
    donate: bool = False,
    around_loss: Callable[[LossFn], LossFn] = lambda loss: loss,
    around_grad: Callable[[GradFn], GradFn] = lambda grad: grad,
    around_update: Callable[[UpdateFn], UpdateFn] = lambda update: update,
) -> Core:
    """Return the core of a `Step`.

    `around_loss` wraps the loss with its wrappers, `around_grad` the innermost gradient function, and `around_update`
    the whole update. Raises a ComposeError, from the core, for a refusal that is not read (`Gradients.accept`).
    """
    on_finite_check = {
        wrapper.name: wrapper.slot.on_finite_check
        for wrapper in step.wrappers
        if wrapper.slot and wrapper.slot.on_finite_check
    }
    grad = _grad(step, around_loss, around_grad, report_finite=bool(on_finite_check))
    update = around_update(_update(step, on_finite_check))
    text = step.base.text
    # A `torch.autograd.Function` may return a parameter as the gradient of another one. The first step finds out
    # whether one does; None until then.
    returns_params: bool | None = None

    def core(state: TrainState, batch: PyTree, hyper: Hyper, rng: Tensor | None) -> tuple[TrainState, Metrics]:
        nonlocal returns_params
        gradients = grad(state, batch, rng)
        if donate and returns_params is not False:
            unshared = copy_shared(gradients.grads, state.params)
            returns_params = any(map(operator.is_not, tree.leaves(unshared), tree.leaves(gradients.grads)))
            gradients = replace(gradients, grads=unshared)
        # The loss, a metric or a buffer may be a parameter itself, which a donated update overwrites.
        loss = gradients.loss.value
        metrics = {
            name: m.value if isinstance(m, Mean) else m.clone() if donate and isinstance(m, Tensor) else m
            for name, m in gradients.metrics.items()
        }
        if donate and not tree.is_blank(gradients.buffers):
            gradients = replace(gradients, buffers=copy_shared(gradients.buffers, state.params))
        if donate and (gradients.slots or gradients.accepted_slots):
            slots, accepted_slots = copy_shared((gradients.slots, gradients.accepted_slots), state.params)
            gradients = replace(gradients, slots=slots, accepted_slots=accepted_slots)
        if gradients.accept is not None and not step.may_refuse_updates:
            raise ComposeError(
                "Step: a gradient wrapper returned Gradients with accept, which is read only if a wrapper says so; say "
                "ft.OnGrad(wrap, may_refuse_updates=True)"
            )
        if gradients.finite is not None:
            metrics = report(metrics, text, skipped=~gradients.finite)
        new = update(state, gradients, hyper, donate=donate)
        if gradients.slots:
            new = replace(new, slots={**new.slots, **gradients.slots})
        return new, {"loss": loss, **metrics}

    return core


def _grad(
    step: Any, around_loss: Callable[[LossFn], LossFn], around_grad: Callable[[GradFn], GradFn], *, report_finite: bool
) -> GradFn:
    on_grad = [wrapper.grad for wrapper in step.wrappers if wrapper.grad]
    name, module = step.base.text, step.base.module
    # Weak references: the memory of a module may be donated to a state.
    module_params = WeakValueDictionary[str, nn.Parameter](module.named_parameters() if module else ())
    forward = Forward(around_loss(step.loss.fn), name, module_params)
    grad: GradFn
    if step.updates_in_backward:
        grad = StreamingGrad(forward, name, step.allow_unused)
    else:
        scale = next((each.loss_scale for each in on_grad if each.loss_scale), None)
        grad = ValueAndGrad(forward, name, step.allow_unused, scale, report_finite)
    grad = around_grad(grad)
    texts = {id(wrapper.grad): wrapper.text for wrapper in step.wrappers}
    for each in order(on_grad):
        grad = _with_checked_result(Gradients, each.wrap(grad), f"{texts[id(each)]}: the gradient function")
    return grad


def _with_checked_result(result_type: type, function: Any, description: str) -> Any:
    """Return a function that checks the type of the results of `function`, which a user's `wrap` returned.

    Raises a ComposeError if `function` is not a function.
    """
    if not callable(function):
        raise ComposeError(f"{description} that its wrap returned is {tree.describe(function)}; needs a function")
    # The functions of ftrain are not checked, because each call in a step takes time.
    if not inspect.isfunction(function) or function.__code__.co_filename.startswith(LIBRARIES):
        return function

    @functools.wraps(function)  # Copies its attributes too, which other wrappers use.
    def checked(*args: Any, **kwargs: Any) -> Any:
        returned = function(*args, **kwargs)
        if not isinstance(returned, result_type):
            raise ComposeError(
                f"{description} returned {tree.describe(returned)}; needs {result_type.__name__}, as the function "
                "that it wraps returns; change it with dataclasses.replace"
            )
        return returned

    return checked


def _update(step: Any, on_finite_check: Mapping[str, OnFiniteCheck]) -> UpdateFn:
    on_update = [(wrapper.text, wrapper.update) for wrapper in step.wrappers if wrapper.update]
    make_update = next((each.make_update for _, each in reversed(on_update) if each.make_update), _optimizer_update)
    update: UpdateFn = make_update(step.optimizer)
    for text, each in on_update:
        if each.wrap:
            update = _not_donating(update) if each.reads_old_state else update
            update = _with_checked_result(TrainState, each.wrap(update), f"{text}: the update function")
    if not step.may_refuse_updates:
        return update
    return _guarded(update, on_finite_check, step.optimizer if refuses_in_place(step) else None)


def _not_donating(update: UpdateFn) -> UpdateFn:
    """Return an update that keeps the old state, for a wrapper that reads it afterwards."""

    def keeping(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        return update(state, gradients, hyper, donate=False)

    return keeping


def refuses_in_place(step: Any) -> bool:
    """Return whether the optimizer of a `Step` may write to a donated state although the update may be refused.

    Its `update` then has the attribute `can_refuse`, and takes one more argument: `accept`, a 0-d bool tensor. If that
    is false, `update` changes nothing. It must not write if wrappers of the update need the old state too.
    """
    on_update = [wrapper.update for wrapper in step.wrappers if wrapper.update]
    is_alone = not any(each.wrap or each.make_update for each in on_update)
    return is_alone and bool(getattr(step.optimizer.update, "can_refuse", False))


def _optimizer_update(optimizer: Optimizer) -> UpdateFn:
    def update(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        params, opt_state = optimizer.update(gradients.grads, state.opt_state, state.params, hyper, donate=donate)
        slots = {**state.slots, **gradients.accepted_slots} if gradients.accepted_slots else state.slots
        return replace(state, params=params, opt_state=opt_state, buffers=gradients.buffers, slots=slots)

    return update


def _guarded(update: UpdateFn, on_finite_check: Mapping[str, OnFiniteCheck], refusing: Optimizer | None) -> UpdateFn:
    """Return an update that keeps the old state if a gradient wrapper refuses it, or loss or gradients are not finite.

    Whether they are finite counts if a wrapper has an `on_finite_check`. `refusing` is the optimizer of the step if it
    can refuse an update itself (`refuses_in_place`), else None.
    """

    def guarded(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        finite, accept = gradients.finite, gradients.accept
        if on_finite_check and finite is None:
            raise _dropped("finite")
        if finite is not None:
            accept = finite if accept is None else accept & finite
        if accept is None:
            raise _dropped("accept")
        old = state
        if refusing is not None:
            choosing = _optimizer_update(replace(refusing, update=partial(refusing.update, accept=accept)))
            new = choosing(state, gradients, hyper, donate=donate)
            # The optimizer has already chosen between old and new values of these. The same objects on both sides make
            # `tree.where` below return them as they are.
            old = replace(state, params=new.params, opt_state=new.opt_state)
        else:
            # Not donated: the old values are needed if the update is refused.
            new = update(state, gradients, hyper, donate=False)
        chosen: TrainState = tree.where(accept, new, old)
        if finite is None:
            return chosen
        counted = {name: count(state.slots[name], finite) for name, count in on_finite_check.items()}
        return replace(chosen, slots={**chosen.slots, **counted})

    return guarded


def _dropped(field: str) -> ComposeError:
    return ComposeError(
        f"Step: a gradient wrapper returned Gradients without {field}, which says whether to refuse the update; change "
        "the Gradients it gets with dataclasses.replace, which keeps the other fields"
    )


class Eager:
    """A `Runner` that runs a step operation by operation; `around` are further arguments of `assemble`."""

    def __init__(self, step: Any, **around: Callable[[Any], Any]) -> None:
        self._core = assemble(step, donate=step.donate, **around)
        self._loss_needs_rng, self._optimizer_needs_rng = step.base.needs_rng, step.optimizer.needs_rng
        self._backends: dict[torch.device, backends.Backend] = {}
        self.text = "eager(donate)" if step.donate else "eager"

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Hyper, key_data: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        """Return the next state and the metrics."""
        device = tree.device_of(state.params)
        rng = random.to_device(random.wrap_key_data(key_data), device) if self._loss_needs_rng else None
        if self._optimizer_needs_rng:
            hyper = {**hyper, RNG: random.to_device(random.wrap_key_data(random.update_key_data(key_data)), device)}
        backend = self._backends.get(device) or self._backends.setdefault(device, backends.of(device))
        with torch.set_grad_enabled(False), backend.seeded(random.seed_of(key_data)), backend.deterministic():
            return self._core(state, batch, hyper, rng)
