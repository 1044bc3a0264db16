"""The step: a record of loss, optimizer and wrappers that is itself a pure function. `train_step` makes one."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ftrain import _torch, backends, random, tree
from ftrain._torch import dtensor
from ftrain.errors import ComposeError, OptionError, StructureError, require_switches, warn
from ftrain.optim.schedules.call import require_number
from ftrain.step.core import Eager
from ftrain.step.initial_state import initial_parts
from ftrain.step.loss_forms import adapt, report
from ftrain.step.lowered import Lowered
from ftrain.step.state_checks import require_buffers, require_params, require_same_trainable, require_state
from ftrain.step.swap_params import to_meta_
from ftrain.step.wrapper import ARROWS, OnRanks, OnStep, SlotSpec, Wrapper
from ftrain.tree.name_patterns import Mask
from ftrain.types import (
    Loss,
    Metrics,
    Optimizer,
    PyTree,
    Runner,
    TrainState,
    consume,
    is_donatable,
    mark_donatable,
    replace,
)


def train_step(
    loss_fn: Callable[..., Any] | Loss,
    optimizer: Optimizer,
    *,
    trainable: Mask | None = None,
    allow_unused: bool = False,
) -> Step:
    """Return the step that updates parameters with an optimizer and the gradient of a loss.

    Args:
        loss_fn: ``loss_fn(params, batch)`` as `ftrain.step.loss_forms.adapt` describes it, or the loss that
            `ftrain.from_module` returned.
        optimizer: from `ftrain.optim`.
        trainable: which parameters train, as ``(name, leaf) -> bool`` or a list of name patterns; the others are
            frozen. Default: all; of a module, those that require a gradient; under `lora`, only the adapters.
        allow_unused: give parameters that the loss does not use a zero gradient instead of an error. Weight decay and
            momentum still change them; `trainable` keeps them as they are.

    Raises:
        LossError: when `loss_fn` cannot be called as a loss.
        ComposeError: when `optimizer` is not an optimizer of ftrain.
        OptionError: when `allow_unused` is not True or False.
    """
    if not isinstance(optimizer, Optimizer):
        raise ComposeError(
            f"train_step: the optimizer is {type(optimizer).__name__} {getattr(optimizer, '__name__', 'object')}; "
            "needs one of ft.optim, as in train_step(loss_fn, ft.optim.adamw(3e-4)): its state is in TrainState"
        )
    require_switches("train_step", allow_unused=allow_unused)
    return Step(adapt(loss_fn), optimizer, trainable, allow_unused)


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """A pure training step ``(state, batch) -> (state, metrics)``. Make one with `train_step`.

    It consists of four functions, ``loss -> grad -> update -> step``; each wrapper transforms one of them.
    `print` shows the pipeline, the innermost wrapper first.
    """

    base: Loss
    optimizer: Optimizer
    trainable: Mask | None = None
    allow_unused: bool = False
    wrappers: tuple[Wrapper, ...] = ()

    def __post_init__(self) -> None:
        for wrapper in self.wrappers:
            if wrapper.validate:
                wrapper.validate(self)

    def __deepcopy__(self, memo: object) -> Step:
        return self  # As for a function. The functions of a copy would still use the module of this step.

    def wrapped(self, wrapper: Wrapper) -> Step:
        """Return this step with one more wrapper around it.

        Raises a ComposeError if it already has a wrapper of that name, or one that cannot be combined with it.
        """
        if any(other.name == wrapper.name for other in self.wrappers):
            raise ComposeError(f"{wrapper.text}: the step already has the wrapper {wrapper.name}; use one:\n{self}")
        replaces = wrapper.update.optimizer if wrapper.update else None
        optimizer = replaces(self.optimizer) if replaces else self.optimizer
        if not isinstance(optimizer, Optimizer):
            raise ComposeError(f"{wrapper.text}: its optimizer returned {tree.describe(optimizer)}; needs an Optimizer")
        step = dataclasses.replace(self, optimizer=optimizer, wrappers=(*self.wrappers, wrapper))
        # Computed here, so that an error is raised where the wrapper is added.
        _ = step.loss
        return step

    @functools.cached_property
    def donating(self) -> Step:
        """The step that donates its state: this one, if it does so already."""
        if self.donate:
            return self
        donate = Wrapper("donated", step=OnStep(donate=True), options={})
        step = dataclasses.replace(self, wrappers=(*self.wrappers, donate))
        vars(step)["_origin"] = self._origin
        return step

    @functools.cached_property
    def donate(self) -> bool:
        """Whether a call reuses the memory of its state, which is then consumed."""
        return any(each.donate for each in self._on_step)

    @functools.cached_property
    def updates_in_backward(self) -> bool:
        """Whether the update runs within the backward pass, so that the gradients never all exist at once."""
        return any(wrapper.update and wrapper.update.make_update for wrapper in self.wrappers)

    @property
    def is_compiled(self) -> bool:
        """Whether a wrapper replaces eager execution."""
        return any(each.make_runner for each in self._on_step)

    @property
    def microbatches(self) -> int:
        """The number of microbatches into which wrappers split a batch."""
        return math.prod(self.splits)

    @property
    def splits(self) -> list[int]:
        """Into how many pieces wrappers split a batch, each of these pieces, and so on."""
        on_grad = [wrapper.grad for wrapper in reversed(self.wrappers) if wrapper.grad]
        return [each.microbatches for each in on_grad if each.microbatches]

    @property
    def may_refuse_updates(self) -> bool:
        """Whether an update may be refused; then the old and the new state must exist at the same time."""
        return any(wrapper.may_refuse_updates for wrapper in self.wrappers)

    @property
    def _on_step(self) -> list[OnStep]:
        return [wrapper.step for wrapper in self.wrappers if wrapper.step]

    @property
    def _slots(self) -> dict[str, SlotSpec]:
        return {wrapper.name: wrapper.slot for wrapper in self.wrappers if wrapper.slot}

    @functools.cached_property
    def loss(self) -> Loss:
        """The loss with its wrappers applied. Raises a ComposeError if one returns no `Loss`."""
        loss, on_loss = self.base, [(wrapper.text, wrapper.loss) for wrapper in self.wrappers if wrapper.loss]
        for text, each in sorted(on_loss, key=lambda pair: pair[1].order):
            loss = each.wrap(loss)
            if not isinstance(loss, Loss):
                raise ComposeError(f"{text}: its wrap returned {tree.describe(loss)}; needs a Loss, as it gets")
        return loss

    @functools.cached_property
    def runner(self) -> Runner:
        """The object that runs the step: `Eager`, unless a wrapper replaces it."""
        makers = [each.make_runner for each in self._on_step if each.make_runner]
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
        """Return the state before the first step. Without `donate` it shares no memory with the tensors passed in.

        Tensors of a module on the device ``meta`` get the values that its methods ``reset_parameters()``, or
        ``_init_weights(part)`` of transformers' models, draw from `seed`; the module itself stays on ``meta``. If the
        step divides its state over ranks, each block is divided before the next one is initialised.

        Args:
            params: a tree of floating-point tensors; not needed if the loss comes from a module. Or the path of
                safetensors, a file or a directory as Hugging Face's libraries write it, with values for the module:
                each rank reads only its parts.
            buffers: a tree of tensors that the loss carries from step to step.
            seed: of the state's random key.
            device: where the state is. Default: the device of the parameters; for a module on ``meta``,
                `ftrain.backends.default`.
            donate: do not copy: the state takes over the memory of the parameters and buffers. A module is moved to
                the device ``meta``, until `ftrain.to_module` fills it.

        Raises:
            StructureError: if there are no parameters, or one is not a floating-point tensor; if no method writes a
                tensor on ``meta``; if a tensor of the module is missing in the files, quantised, or there twice
                with different values.
            CheckpointError: if a file cannot be read.
            DeviceError: if the device is not available, or lacks something that a wrapper needs.
        """
        for name, schedule in self.optimizer.schedules.items():
            require_number(name, schedule, schedule(0), 0)
        resolved = None if device is None else backends.resolve(device)
        params, frozen, buffers = initial_parts(self, params, buffers, seed, resolved, donate)
        require_params(params)
        require_buffers(buffers)
        self._require_device(params)
        state = TrainState(
            step=torch.zeros((), dtype=torch.int64, device=tree.HOST),
            params=params,
            frozen=frozen,
            buffers=buffers,
            opt_state=self.optimizer.init(params),
            slots=self.init_slots(params),
            rng=random.key(seed),
        )
        if donate and self.base.module is not None:
            to_meta_(self.base.module)
        return mark_donatable(state)

    def init_slots(self, params: PyTree) -> dict[str, PyTree]:
        """Return the initial slots of the wrappers for these trained parameters."""
        return {name: slot.init(params) for name, slot in self._slots.items()}

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Return the next state and the metrics of this step.

        Metrics are 0-d tensors on the device (``loss``, and those that the loss and the wrappers report) and floats
        (the scheduled values, ``lr``). Nothing waits for the device, except in the first eager call, which
        checks the loss.

        Raises:
            StructureError: when the state does not have the structure of this step.
            ConsumedError: when the state was donated before.
        """
        argument, batch = state, tree.as_tree(batch)
        run: Callable[..., tuple[TrainState, Metrics]] = self.runner
        if self._on_ranks is not None:
            state, batch, around = self._on_ranks(self, state, batch)
            run = around(self.runner)
        is_new = getattr(argument, "_origin", None) is not self._origin
        if is_new:
            # The argument, because the local part of a divided state does not have the shapes of the whole leaves.
            self.require(argument)
        elif _torch.any_autocast():
            _warn_of_autocast(argument.params)
        if self.donate and not is_donatable(argument):
            # Only `init` and donating steps return states whose tensors nothing else refers to.
            state = tree.clone(state)
        count, key, hyper = state.step, state.rng, self.scheduled_values(state)
        key_data = random.step_key_data(random.key_data(key), int(count))
        with self.loss.scope(True):
            new, metrics = run(state, batch, hyper, key_data)
        if is_new:
            what = f"what {self.optimizer.text} returned"
            tree.require_same("Step", what, {"params": new.params}, {"params": argument.params})
        new = replace(new, step=count + 1, rng=key)
        vars(new)["_origin"] = self._origin
        if self.donate:
            mark_donatable(new)
            consume(argument)
        for on_step_end in self._on_step_end:
            on_step_end(backends.of(tree.device_of(new.params)), int(count) + 1)
        return new, report(metrics, self.base.text, **hyper)

    def lower(self, state: TrainState, batch: PyTree) -> Lowered:
        """Compile the step for a state and a batch like these, and return a report of its graphs; `print` shows it.

        Raises:
            ComposeError: when the step is not compiled.
            TraceError: when ``compiled(lowering="whole")`` cannot capture it.
        """
        lower = getattr(self.runner, "lower", None)
        if lower is None:
            raise ComposeError(
                f"Step.lower: the step has no graph to report; use ft.compiled()(step).lower(...):\n{self}"
            )
        lowered: list[Lowered] = []

        def run(state: TrainState, *arguments: Any) -> tuple[TrainState, Metrics]:
            lowered.append(lower(state, *arguments))
            return state, {}

        self.require(state)
        batch = tree.as_tree(batch)
        lowering: Any = run
        if self._on_ranks is not None:
            state, batch, around = self._on_ranks(self, state, batch)
            lowering = around(lowering)
        with self.loss.scope(True):
            key_data = random.step_key_data(random.key_data(state.rng), int(state.step))
            lowering(state, batch, self.scheduled_values(state), key_data)
        return lowered[0]

    def scheduled_values(self, state: TrainState) -> dict[str, float]:
        """Return the values of the schedules at the next step of a state, by name.

        Raises an OptionError if a value is not a finite number, or a learning rate is negative.
        """
        count = int(state.step)
        factors = self.optimizer.factors(state.opt_state) if self.optimizer.factors else {}
        hyper = {}
        for name, schedule in self.optimizer.schedules.items():
            scheduled: Any = schedule(count)
            try:
                value = hyper[name] = float(scheduled) * float(factors.get(name, 1.0))
            except (TypeError, ValueError, RuntimeError):
                require_number(name, schedule, scheduled, count)
                raise
            if not math.isfinite(value) or (value < 0.0 and name.endswith("lr")):
                needed = "a finite number, for a rate at least 0"
                raise OptionError(f"Step: the schedule of {name} is {value} at step {count}; needs {needed}")
        return hyper

    @functools.cached_property
    def _on_step_end(self) -> list[Callable[[backends.Backend, int], None]]:
        return [each.on_step_end for each in self._on_step if each.on_step_end]

    @functools.cached_property
    def _on_ranks(self) -> OnRanks | None:
        return next((each.on_ranks for each in self._on_step if each.on_ranks), None)

    @functools.cached_property
    def _origin(self) -> object:
        """Marks the states that this step returned, whose structure need not be checked again."""
        return object()

    def check(self, state: TrainState, since: int = 0) -> None:
        """Raise the error of a wrapper whose slot shows that something went wrong. Waits for the device.

        Only what happened after step `since`, such as that of the last check, counts. It raises a NonFiniteError, for
        example, when `skip_nonfinite` has skipped too many steps in a row.
        """
        for name, slot in self._slots.items():
            if slot.check:
                slot.check(state.slots[name], int(state.step), since)

    def require(self, state: TrainState) -> None:
        """Check that a state has the structure of this step, and is on a device where the step can run.

        Raises a StructureError with the paths that differ, or a DeviceError.
        """
        require_state("Step", state)
        require_params(state.params)
        _warn_of_autocast(state.params)
        if self._on_ranks is None and any(map(dtensor.is_dtensor, tree.leaves(state.params))):
            raise StructureError(
                "Step: the state is divided over ranks, but the step has no ft.sharded(mesh): add it to the step, or "
                "gather the state with ft.parallel.whole(state), which every rank must call"
            )
        self._require_device(state.params)
        if self.loss.adapters is None:  # With adapters, `trainable` does not say which parameters train.
            require_same_trainable(self.trainable, self.base.module, state.params, state.frozen)
        params = tree.map(_torch.on_meta, state.params)
        needed = {"opt_state": self.optimizer.init(params), "slots": self.init_slots(params)}
        what = "the state (make it with this step's own init)"
        tree.require_same("Step", what, {"opt_state": state.opt_state, "slots": state.slots}, needed)

    def _require_device(self, params: PyTree) -> None:
        backend = backends.of(tree.device_of(params))
        backends.require_current(tree.device_of(params))
        for wrapper in self.wrappers:
            if wrapper.require:
                wrapper.require(backend, params)

    def __repr__(self) -> str:
        texts = {arrow: [w.text for w in self.wrappers if w.arrow == arrow] for arrow in ARROWS}
        # `fit` runs the donating step, whose runner then knows how the step was compiled.
        ran: Step = vars(self).get("donating", self) if self.is_compiled else self
        at_end = [w.text for w in self.wrappers if w.step and w.step.on_step_end]
        lines = {
            "loss": [self.loss.text],
            "grad": [" <- ".join(["value_and_grad", *texts["grad"]])],
            "update": [" <- ".join([self.optimizer.text, *texts["update"]])],
            "step": [" <- ".join([ran.runner.text, *at_end])],
        }
        lines["loss"] += [f"[{w.choice()}]" for w in self.wrappers if w.choice and w.choice()]
        for wrapper in self.wrappers:
            for arrow, text in (wrapper.sends(self) if wrapper.sends else {}).items():
                lines[arrow] += [f"[{text}]"] if text else []
        return "\n".join(f"{arrow:<7} {' '.join(line)}" for arrow, line in lines.items())


def _warn_of_autocast(params: PyTree) -> None:
    """Warn if the caller has turned on autocast for the device of the parameters."""
    device_type = tree.device_of(params).type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        warn("Step: called within torch.autocast, which changes what it computes; leave it out, and use ft.with_amp")
