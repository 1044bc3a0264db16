"""The step: an open record of loss, optimizer and wrappers, which is itself a pure function."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ftrain import _torch, backends, random, tree
from ftrain._torch import dtensor
from ftrain.errors import ComposeError, OptionError, StructureError
from ftrain.optim.schedules.call import require_numbers
from ftrain.step.across_ranks import order
from ftrain.step.eager import Eager
from ftrain.step.initial_state import initial_parts
from ftrain.step.loss_forms import report
from ftrain.step.lowered import Lowered, Lowering
from ftrain.step.purity import as_tree
from ftrain.step.shared_memory import copy_shared
from ftrain.step.state_argument import require_state
from ftrain.step.swap_params import to_meta_
from ftrain.step.trainable_params import require_choice, require_params
from ftrain.step.update import guarded, optimize
from ftrain.step.value_and_grad import value_and_grad
from ftrain.step.wrapper import ARROWS, OnGrad, OnRanks, OnStep, OnUpdate, SlotSpec, Wrapper
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
    is_donatable,
    mark_donatable,
    replace,
)


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
            if wrapper.validate:
                wrapper.validate(self)

    def wrapped(self, wrapper: Wrapper) -> Step:
        """Return this step with one more wrapper around it.

        Raises:
            ComposeError: when it has a wrapper of that name already, or one with which that does not go.
        """
        if any(other.name == wrapper.name for other in self.wrappers):
            raise ComposeError(f"{wrapper.text}: the step has a {wrapper.name} already:\n{self}")
        replaces = wrapper.update.optimizer if wrapper.update else None
        optimizer = replaces(self.optimizer) if replaces else self.optimizer
        step = dataclasses.replace(self, optimizer=optimizer, wrappers=(*self.wrappers, wrapper))
        # Built at once, so that whatever does not fit is an error where it is written.
        _ = step.loss
        return step

    @functools.cached_property
    def donating(self) -> Step:
        """The step that donates: itself, if it does so already."""
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
        """Whether the update is made within the backward pass, from gradients that never all exist."""
        return any(each.make_update for each in self._on_update)

    @property
    def is_compiled(self) -> bool:
        """Whether a wrapper replaces eager execution."""
        return any(each.make_runner for each in self._on_step)

    @property
    def microbatches(self) -> int:
        """In how many pieces, one after the other, wrappers take a batch."""
        return math.prod(each.microbatches or 1 for each in self._on_grad)

    @property
    def may_refuse_updates(self) -> bool:
        """Whether an update may be taken back, for which the old and the new state must exist at once."""
        return any(wrapper.may_refuse_updates for wrapper in self.wrappers)

    @property
    def _on_grad(self) -> list[OnGrad]:
        return [wrapper.grad for wrapper in self.wrappers if wrapper.grad]

    @property
    def _on_update(self) -> list[OnUpdate]:
        return [wrapper.update for wrapper in self.wrappers if wrapper.update]

    @property
    def _on_step(self) -> list[OnStep]:
        return [wrapper.step for wrapper in self.wrappers if wrapper.step]

    @functools.cached_property
    def loss(self) -> Loss:
        """The loss with the wrappers of its arrow applied."""
        loss, parts = self.base, [wrapper.loss for wrapper in self.wrappers if wrapper.loss]
        for part in sorted(parts, key=lambda part: part.order):
            loss = part.wrap(loss)
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
            # A metric, or a buffer, may be a parameter itself, which a donated update overwrites.
            metrics = {
                name: m.value if isinstance(m, Mean) else m.clone() if donate and isinstance(m, Tensor) else m
                for name, m in gradients.metrics.items()
            }
            if donate and not tree.is_blank(gradients.buffers):
                gradients = replace(gradients, buffers=copy_shared(gradients.buffers, state.params))
            if gradients.finite is not None:
                metrics = report(metrics, self.base.text, skipped=~gradients.finite)
            new = update(state, gradients, hyper, donate=donate)
            if gradients.slots:
                new = replace(new, slots={**new.slots, **gradients.slots})
            return new, {"loss": gradients.loss.value, **metrics}

        return core

    def _grad(self, around_loss: Callable[[LossFn], LossFn], around_grad: Callable[[GradFn], GradFn]) -> GradFn:
        grad = value_and_grad(
            around_loss(self.loss.fn),
            name=self.base.text,
            allow_unused=self.allow_unused,
            scale=next((each.loss_scale for each in self._on_grad if each.loss_scale), None),
            watch=bool(self._on_finite_checks),
            late=self.updates_in_backward,
            # Weak: the memory of a module may be given to a state.
            module_params=WeakValueDictionary(self.base.module.named_parameters() if self.base.module else ()),
        )
        grad = around_grad(grad)
        for each in order(self._on_grad):
            grad = each.wrap(grad)
        return grad

    def _update(self) -> UpdateFn:
        makers = [each.make_update for each in self._on_update if each.make_update]
        update = (makers[-1] if makers else optimize)(self.optimizer)
        for each in self._on_update:
            update = each.wrap(update) if each.wrap else update
        return guarded(update, self._on_finite_checks) if self.may_refuse_updates else update

    @property
    def _on_finite_checks(self) -> dict[str, Callable[[PyTree, Tensor], PyTree]]:
        return {name: slot.on_finite_check for name, slot in self._slots.items() if slot.on_finite_check}

    @functools.cached_property
    def runner(self) -> Runner:
        """What executes the step: eagerly, unless a wrapper brings something else."""
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
        """Return the state before the first step; it shares no memory with what it is made from.

        The tensors of a module that are on the device ``meta`` get the values that its methods ``reset_parameters()``,
        or ``_init_weights(part)`` of transformers' models, draw from `seed`; the module itself stays on ``meta``.
        Where the step divides its state over ranks, each block is divided before the next one is made.

        Args:
            params: a tree of floating-point tensors; not needed when the loss comes from a module. Or the path of
                safetensors, a file or a directory as Hugging Face's libraries write it, with values for the module:
                each rank reads its parts only.
            buffers: a tree of tensors that the loss carries from step to step.
            seed: of the state's random key.
            device: where the state lives. Default: the device of the parameters; for a module on ``meta`` that of
                `ftrain.backends.default`.
            donate: do not copy: the memory of the parameters and buffers becomes the state's. A module is
                left with shapes only, on the device ``meta``, until `ftrain.to_module` fills it.

        Raises:
            StructureError: for no parameters, or a parameter that is not a floating-point tensor; for a tensor on
                ``meta`` that no method writes; for files without some tensor of the module.
            CheckpointError: when a file cannot be read.
            DeviceError: when the device is not there or cannot do what a wrapper needs.
        """
        require_numbers(self.optimizer.schedules)
        place = None if device is None else backends.resolve(device)
        params, frozen, buffers = initial_parts(self, params, buffers, seed, place, donate)
        require_params(params)
        self._require_device(params)
        state = TrainState(
            step=torch.zeros((), dtype=torch.int64),
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

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Return the next state and the metrics of this step.

        Metrics are 0-d tensors on the device (``loss``, what the loss and the wrappers report) and
        floats (the scheduled values, ``lr``); nothing waits for the device.

        Raises:
            StructureError: when the state is not of this step's structure.
            ConsumedError: when the state was donated before.
        """
        argument, batch = state, as_tree(batch)
        run: Callable[..., tuple[TrainState, Metrics]] = self.runner
        if self._on_ranks is not None:
            state, batch, around = self._on_ranks(self, state, batch)
            run = around(self.runner)
        if getattr(argument, "_origin", None) is not self._origin:
            # As all ranks have it: a part does not tell the shape of a leaf.
            self.require(argument)
        if self.donate and not is_donatable(argument):
            # Others may hold the tensors of a state that was not made by `init` or a donating step.
            state = tree.clone(state)
        count, key, hyper, words = state.step, state.rng, *self._known_to_the_host(state)
        with self.loss.scope(True):
            new, metrics = run(state, batch, hyper, words)
        new = replace(new, step=count + 1, rng=key)
        vars(new)["_origin"] = self._origin
        if self.donate:
            mark_donatable(new)
            consume(argument)
        for on_step_end in self._on_step_end:
            on_step_end(backends.of(tree.device_of(new.params)), int(count) + 1)
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
        batch, lowering = as_tree(batch), Lowering(lower)
        run: Callable[..., tuple[TrainState, Metrics]] = lowering
        self.require(state)
        if self._on_ranks is not None:
            state, batch, around = self._on_ranks(self, state, batch)
            run = around(lowering)
        with self.loss.scope(True):
            run(state, batch, *self._known_to_the_host(state))
        return lowering.result

    def _known_to_the_host(self, state: TrainState) -> tuple[dict[str, float], tuple[int, int]]:
        """The scheduled values of a step, and the words of its key."""
        count = int(state.step)
        factors = self.optimizer.factors(state.opt_state) if self.optimizer.factors else {}
        hyper = {}
        for name, schedule in self.optimizer.schedules.items():
            value = hyper[name] = float(schedule(count)) * float(factors.get(name, 1.0))
            if not math.isfinite(value):
                raise OptionError(f"Step: the schedule of {name} is {value} at step {count}; needs a finite number")
        return hyper, random.words_of_step(random.key_data(state.rng), count)

    @functools.cached_property
    def _on_step_end(self) -> list[Callable[[backends.Backend, int], None]]:
        return [each.on_step_end for each in self._on_step if each.on_step_end]

    @functools.cached_property
    def _on_ranks(self) -> OnRanks | None:
        return next((each.on_ranks for each in self._on_step if each.on_ranks), None)

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
        for name, slot in self._slots.items():
            if slot.check:
                slot.check(state.slots[name], int(state.step), since)

    def init_slots(self, params: PyTree) -> dict[str, PyTree]:
        """Return the initial slots of the wrappers, for these trained parameters."""
        return {name: slot.init(params) for name, slot in self._slots.items()}

    @property
    def _slots(self) -> dict[str, SlotSpec]:
        return {wrapper.name: wrapper.slot for wrapper in self.wrappers if wrapper.slot}

    def require(self, state: TrainState) -> None:
        """Check that a state has the structure this step works on, and is where it can run.

        Raises:
            StructureError: naming the paths that differ.
        """
        require_state("Step", state)
        require_params(state.params)
        if self._on_ranks is None and any(map(dtensor.is_dtensor, tree.leaves(state.params))):
            raise StructureError(
                "Step: the state is divided over ranks, and the step has no ft.sharded(mesh): add it to the step, or "
                "take ft.parallel.whole(state), which every rank must call"
            )
        self._require_device(state.params)
        if self.loss.adapters is None:  # Beside which other parameters train than beside none.
            require_choice(self.trainable, self.base.module, state.params, state.frozen)
        params = tree.map(_torch.on_meta, state.params)
        needed = {
            "opt_state": self.optimizer.init(params),
            "slots": self.init_slots(params),
        }
        tree.require_same("Step", "the state", {"opt_state": state.opt_state, "slots": state.slots}, needed)

    def _require_device(self, params: PyTree) -> None:
        backend = backends.of(tree.device_of(params))
        backends.require_current(tree.device_of(params))
        for wrapper in self.wrappers:
            if wrapper.require:
                wrapper.require(backend, params)

    def __repr__(self) -> str:
        texts = {arrow: [w.text for w in self.wrappers if w.arrow == arrow] for arrow in ARROWS}
        # What shows how it is compiled: the step that `fit` made of it, if it did.
        ran: Step = vars(self).get("donating", self) if self.is_compiled else self
        at_end = [w.text for w in self.wrappers if w.step and w.step.on_step_end]
        lines = {
            "loss": [self.loss.text],
            "grad": [" <- ".join(["value_and_grad", *texts["grad"]])],
            "update": [" <- ".join([self.optimizer.text, *texts["update"]])],
            "step": [" <- ".join([ran.runner.text, *at_end])],
        }
        lines["loss"] += [f"[{w.choice()}]" for w in self.wrappers if w.choice and w.choice()]
        for sent in (w.sends(self) for w in self.wrappers if w.sends):
            for arrow, text in sent.items():
                lines[arrow] += [f"[{text}]"] if text else []
        return "\n".join(f"{arrow:<7} {' '.join(line)}" for arrow, line in lines.items())
