"""The step: an open record of loss, optimizer and wrappers, which is itself a pure function."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftrain import _torch, backends, random, tree
from ftrain.errors import ComposeError, OptionError, StructureError
from ftrain.step.eager import Eager
from ftrain.step.lowered import Lowered
from ftrain.step.module import module_state
from ftrain.step.purity import as_tree
from ftrain.step.swap_params import to_meta_
from ftrain.step.trainable_params import chooser, require_params
from ftrain.step.update import guarded, optimize
from ftrain.step.value_and_grad import adapt, report, value_and_grad
from ftrain.step.wrapper import S, Wrapper
from ftrain.tree.name_patterns import Mask
from ftrain.types import (
    Core,
    GradFn,
    Hyper,
    Loss,
    LossFn,
    Mean,
    Metrics,
    Optimizer,
    PyTree,
    Runner,
    TrainState,
    UpdateFn,
    consume,
    is_own,
    own,
    replace,
)

ARROWS = ("loss", "grad", "update", "step")


def compose(step: S, *wrappers: Callable[[Any], Any]) -> S:
    """Apply wrappers to a step, the first one innermost.

    Raises:
        ComposeError: for anything among them that is not a wrapper.
    """
    for position, wrap in enumerate(wrappers):
        if not callable(wrap) or isinstance(wrap, Step):
            raise ComposeError(f"compose: argument {position + 1} is {wrap!r}; needs a wrapper such as ft.clip(1.0)")
        step = wrap(step)
    return step


def train_step(
    loss_fn: Callable[..., Any] | Loss,
    optimizer: Optimizer,
    *,
    trainable: Mask | None = None,
    allow_unused: bool = False,
) -> Step:
    """Return the step that follows the gradient of a loss with an optimizer.

    Args:
        loss_fn: ``loss_fn(params, batch)`` as `ftrain.step.value_and_grad.adapt` describes it, or what
            `ftrain.from_module` made.
        optimizer: from `ftrain.optim`.
        trainable: which parameters train, as ``(name, leaf) -> bool`` or a list of name patterns; the
            others are frozen. Without it all do, of a module those that require a gradient; under `lora` none
            but the adapters.
        allow_unused: give parameters that the loss does not use a zero gradient instead of an error.

    Raises:
        LossError: when `loss_fn` cannot be called as a loss.
        ComposeError: when `optimizer` is none of ours.
    """
    if not isinstance(optimizer, Optimizer):
        raise ComposeError(
            f"train_step: the optimizer is {type(optimizer).__name__}; needs one of ftrain.optim, such as "
            "ft.optim.adamw(3e-4), which keeps its state in the TrainState"
        )
    return Step(adapt(loss_fn), optimizer, trainable, allow_unused)


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """A pure training step ``(state, batch) -> (state, metrics)`` whose parts stay open to wrappers.

    Made by `train_step`. It works in four arrows, ``loss -> grad -> update -> step``, and each wrapper
    transforms one of them. `print` shows the pipeline, innermost first.
    """

    base: Loss
    optimizer: Optimizer
    trainable: Mask | None = None
    allow_unused: bool = False
    wrappers: tuple[Wrapper, ...] = ()

    def __post_init__(self) -> None:
        for wrapper in self.wrappers:
            if wrapper.suits:
                wrapper.suits(self)

    def wrapped(self, wrapper: Wrapper) -> Step:
        """Return this step with one more wrapper around it.

        Raises:
            ComposeError: when it has a wrapper of that name already, or one with which that does not go.
        """
        if any(other.name == wrapper.name for other in self.wrappers):
            raise ComposeError(f"{wrapper.text}: the step has a {wrapper.name} already:\n{self}")
        optimizer = wrapper.optimizer(self.optimizer) if wrapper.optimizer else self.optimizer
        step = dataclasses.replace(self, optimizer=optimizer, wrappers=(*self.wrappers, wrapper))
        # Built at once, so that whatever does not fit is an error where it is written.
        _ = step.loss
        return step

    @functools.cached_property
    def donating(self) -> Step:
        """The step that donates: itself, if it does so already."""
        if self.donate:
            return self
        donate = Wrapper("donated", "donated", "step", donate=True)
        step = dataclasses.replace(self, wrappers=(*self.wrappers, donate))
        vars(step)["_origin"] = self._origin
        return step

    @functools.cached_property
    def donate(self) -> bool:
        """Whether a call reuses the memory of its state, which is then consumed."""
        return any(wrapper.donate for wrapper in self.wrappers)

    @functools.cached_property
    def pulls(self) -> bool:
        """Whether the update is made within the backward pass, from gradients that never all exist."""
        return any(wrapper.optimize for wrapper in self.wrappers)

    @functools.cached_property
    def loss(self) -> Loss:
        """The loss with the wrappers of its arrow applied."""
        loss = self.base
        for transform in (*(each.model for each in self.wrappers), *(each.loss for each in self.wrappers)):
            loss = transform(loss) if transform else loss
        return loss

    def assemble(
        self,
        *,
        donate: bool = False,
        around_loss: Callable[[LossFn], LossFn] = lambda loss: loss,
        around_grad: Callable[[GradFn], GradFn] = lambda grad: grad,
        around_update: Callable[[UpdateFn], UpdateFn] = lambda update: update,
    ) -> Core:
        """Put the arrows together to one function of tensors; a compiler may wrap them, of gradients the innermost."""
        grad, update = self._grad(around_loss, around_grad), around_update(self._update())

        def core(state: TrainState, batch: PyTree, hyper: Hyper, rng: Tensor | None) -> tuple[TrainState, Metrics]:
            gradients = grad(state, batch, rng)
            metrics = {name: _value(metric) for name, metric in gradients.metrics.items()}
            if gradients.finite is not None:
                metrics = report(metrics, self.base.text, skipped=~gradients.finite)
            # A metric may be a parameter itself, which a donated update overwrites.
            if donate:
                metrics = {name: m.clone() if isinstance(m, Tensor) else m for name, m in metrics.items()}
                gradients = replace(gradients, buffers=_apart(gradients.buffers, state.params))
            return update(state, gradients, hyper, donate=donate), {"loss": gradients.loss.value, **metrics}

        return core

    def _grad(self, around_loss: Callable[[LossFn], LossFn], around_grad: Callable[[GradFn], GradFn]) -> GradFn:
        grad = value_and_grad(
            around_loss(self.loss.fn),
            name=self.base.text,
            allow_unused=self.allow_unused,
            scale=next((wrapper.scale for wrapper in self.wrappers if wrapper.scale), None),
            watch=bool(self._guards),
            late=self.pulls,
        )
        for transform in (around_grad, *(wrapper.grad for wrapper in self.wrappers)):
            grad = transform(grad) if transform else grad
        return grad

    def _update(self) -> UpdateFn:
        makers = [wrapper.optimize for wrapper in self.wrappers if wrapper.optimize]
        update = (makers[-1] if makers else optimize)(self.optimizer)
        for wrapper in self.wrappers:
            update = wrapper.update(update) if wrapper.update else update
        return guarded(update, self._guards) if self._guards else update

    @property
    def _guards(self) -> dict[str, Callable[[PyTree, Tensor], PyTree]]:
        return {wrapper.name: wrapper.account for wrapper in self.wrappers if wrapper.account}

    @functools.cached_property
    def runner(self) -> Runner:
        """What executes the step: eagerly, unless a wrapper brings something else."""
        makers = [wrapper.step for wrapper in self.wrappers if wrapper.step]
        return makers[-1](self) if makers else Eager(self)

    def init(
        self,
        params: PyTree = None,
        *,
        buffers: PyTree = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        donate: bool = False,
    ) -> TrainState:
        """Return the state before the first step; it shares no memory with what it is made from.

        Args:
            params: a tree of floating-point tensors; not needed when the loss comes from a module.
            buffers: a tree of tensors that the loss carries from step to step.
            seed: of the state's random key.
            device: where the state lives; where the parameters are, unless told.
            donate: do not copy: the memory of the parameters and buffers becomes the state's. A module is
                left with shapes only, on the device ``meta``, until `ftrain.to_module` fills it.

        Raises:
            StructureError: for no parameters, or a parameter that is not a floating-point tensor.
            DeviceError: when the device is not there or cannot do what a wrapper needs.
        """
        module = self.base.module
        if module is None and params is None:
            raise StructureError(f"Step.init: {self.base.text} is no module; pass the parameters: step.init(params)")
        own_params, own_buffers, names = module_state(module) if module is not None else ({}, {}, None)
        adapters, trainable = self.loss.adapters, self.trainable
        if adapters is not None and trainable is None:
            trainable = []
        if names is not None and not names and trainable is None:
            raise StructureError(
                f"Step.init: there is no parameter to train: none of {type(module).__name__} requires a gradient; set "
                "requires_grad, or say which train with trainable="
            )
        params = own_params if params is None else params
        if names is not None:
            names |= set(tree.leaf_names(params)) - own_params.keys()
        buffers = own_buffers if buffers is None else buffers
        chosen = chooser(trainable, names, params)
        params, buffers = (tree.take if donate else tree.clone)((params, buffers))
        params, frozen = tree.split(params, chosen)
        if adapters is not None:
            params, frozen = adapters.added(params, frozen, random.key(seed))
        require_params(params)
        frozen = frozen if tree.leaves(frozen) else None
        parts = params, frozen, buffers
        if device is not None:
            place = backends.resolve(device)
            parts = tuple(tree.to(part, place) for part in parts)
        params, frozen, buffers = parts
        self._require_device(params)
        state = TrainState(
            step=torch.zeros((), dtype=torch.int64),
            params=params,
            frozen=frozen,
            buffers=buffers,
            opt_state=self.optimizer.init(params),
            slots={wrapper.name: wrapper.slot(params) for wrapper in self.wrappers if wrapper.slot},
            rng=random.key(seed),
        )
        if donate and module is not None:
            to_meta_(module)
        return own(state)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Return the next state and the metrics of this step.

        Metrics are 0-d tensors on the device (``loss``, what the loss and the wrappers report) and
        floats (the scheduled values, ``lr``); nothing waits for the device.

        Raises:
            StructureError: when the state is not of this step's structure.
            ConsumedError: when the state was donated before.
        """
        given = state
        if getattr(state, "_origin", None) is not self._origin:
            self.require(state)
        if self.donate and not is_own(state):
            # Others may hold the tensors of a state that was not made by `init` or a donating step.
            state = tree.clone(state)
        count, key, hyper, words = state.step, state.rng, *self._known_to_the_host(state)
        with self.loss.scope(True):
            new, metrics = self.runner(state, as_tree(batch), hyper, words)
        new = replace(new, step=count + 1, rng=key)
        vars(new)["_origin"] = self._origin
        if self.donate:
            own(new)
            consume(given)
        for act in self._afterwards:
            act(backends.of(tree.device_of(new.params)), int(count) + 1)
        return new, report(metrics, self.base.text, **hyper)

    def lower(self, state: TrainState, batch: PyTree) -> Lowered:
        """Compile the step for a state and a batch like these, and say what it consists of: `print` shows it.

        Raises:
            ComposeError: when the step is not compiled.
            TraceError: when ``compiled(lowering="whole")`` cannot capture it.
        """
        lower = getattr(self.runner, "lower", None)
        if lower is None:
            raise ComposeError(f"Step.lower: the step is not compiled; use ft.compiled()(step).lower(...):\n{self}")
        self.require(state)
        with self.loss.scope(True):
            return lower(state, as_tree(batch), *self._known_to_the_host(state))  # type: ignore[no-any-return]

    def _known_to_the_host(self, state: TrainState) -> tuple[dict[str, float], tuple[int, int]]:
        """The scheduled values of a step, and the words of its key."""
        count = int(state.step)
        hyper = {name: float(schedule(count)) for name, schedule in self.optimizer.schedules.items()}
        if self.optimizer.factors is not None:
            for name, factor in self.optimizer.factors(state.opt_state).items():
                hyper[name] *= float(factor)
        for name, value in hyper.items():
            if not math.isfinite(value):
                raise OptionError(f"Step: the schedule of {name} is {value} at step {count}; needs a finite number")
        return hyper, random.fold_in_words(random.words(state.rng), count)

    @functools.cached_property
    def _afterwards(self) -> list[Callable[[backends.Backend, int], None]]:
        return [wrapper.after for wrapper in self.wrappers if wrapper.after]

    @functools.cached_property
    def _origin(self) -> object:
        """Marks the states this step made, whose structure need not be checked again."""
        return object()

    def check(self, state: TrainState, since: int = 0) -> None:
        """Raise what the wrappers' slots show to be wrong; waits for the device.

        Args:
            state: the state to look at.
            since: look at what has happened after this step, such as that of the last check.

        Raises:
            NonFiniteError: when `skip_nonfinite` has skipped too many steps in a row.
        """
        for wrapper in self.wrappers:
            if wrapper.check:
                wrapper.check(state.slots[wrapper.name], int(state.step), since)

    def require(self, state: TrainState) -> None:
        """Check that a state has the structure this step works on, and is where it can run.

        Raises:
            StructureError: naming the paths that differ.
        """
        if not isinstance(state, TrainState):
            raise StructureError(f"Step: the state is {type(state).__name__}; needs the TrainState of step.init()")
        require_params(state.params)
        self._require_device(state.params)
        params = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), state.params)
        needed = {
            "opt_state": self.optimizer.init(params),
            "slots": {wrapper.name: wrapper.slot(params) for wrapper in self.wrappers if wrapper.slot},
        }
        tree.require_same("Step", "the state", {"opt_state": state.opt_state, "slots": state.slots}, needed)

    def _require_device(self, params: PyTree) -> None:
        backend = backends.of(tree.device_of(params))
        backends.require_current(tree.device_of(params))
        for wrapper in self.wrappers:
            if wrapper.require:
                wrapper.require(backend, params)

    @property
    def _ran(self) -> Step:
        """What shows how this step is compiled: the step that `fit` made of it, if it did."""
        made: Step = vars(self).get("donating", self)
        return made if any(wrapper.step for wrapper in self.wrappers) else self

    def __repr__(self) -> str:
        texts = {arrow: [w.text for w in self.wrappers if w.arrow == arrow] for arrow in ARROWS}
        choices = [f"[{w.choice()}]" for w in self.wrappers if w.choice and w.choice()]
        lines = {
            "loss": " ".join([self.loss.text, *choices]),
            "grad": " <- ".join(["value_and_grad", *texts["grad"]]),
            "update": " <- ".join([self.optimizer.text, *texts["update"]]),
            "step": " <- ".join([self._ran.runner.text, *(w.text for w in self.wrappers if w.after)]),
        }
        return "\n".join(f"{arrow:<7} {line}" for arrow, line in lines.items())


def _apart(buffers: PyTree, params: PyTree) -> PyTree:
    """Copy the buffers that share memory with parameters, which a donated update overwrites."""
    if tree.is_blank(buffers):
        return buffers
    held = {_torch.storage_id(leaf) for leaf in tree.leaves(params)}
    return tree.map(lambda leaf: leaf.clone() if _torch.storage_id(leaf) in held else leaf, buffers)


def _value(metric: Any) -> Any:
    return metric.value if isinstance(metric, Mean) else metric
