"""The record of a wrapper: how it changes loss, gradient, update and step, and its part of the state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from torch import Tensor, nn

from ftrain.backends import Backend
from ftrain.errors import ComposeError
from ftrain.optim.schedules.call import Call
from ftrain.types import GradFn, Loss, Optimizer, PyTree, Runner, TrainState, UpdateFn

P = ParamSpec("P")
S = TypeVar("S", bound=Callable[..., Any])

OnRanks: TypeAlias = Callable[
    [Any, TrainState, PyTree], tuple[TrainState, PyTree, Callable[[Runner], Callable[..., Any]]]
]


@dataclass(frozen=True, eq=False)
class OnLoss:
    """How a wrapper changes the loss.

    Args:
        wrap: ``Loss -> Loss``; adds the wrapper's text to `Loss.wrapper_texts`.
        order: wrappers with a lower number are applied first, wherever they are listed: 0 changes the model or the
            loss, 1 gathers its parameters and gives a rank its rows (`sharded`), 2 changes how it computes. On ranks, a
            wrapper of order 2 gets parts of the parameters, and a loss of some rows with the weight of all.
    """

    wrap: Callable[[Loss], Loss]
    order: int = 0


def extend_scope(
    loss: Loss, inner: Callable[[bool], AbstractContextManager[Any]]
) -> Callable[[bool], AbstractContextManager[None]]:
    """Return a `Loss.scope` that enters the scope of a loss, and then ``inner(training)``."""

    @contextmanager
    def scope(training: bool) -> Iterator[None]:
        with loss.scope(training), inner(training):
            yield

    return scope


@dataclass(frozen=True, eq=False)
class OnGrad:
    """How a wrapper changes the gradient.

    Args:
        wrap: ``GradFn -> GradFn``. On ranks the batch is a tree that holds the rows of a rank in its field ``batch``:
            change it with `ftrain.tree.map_named`.
        reads_gradients: whether it reads gradients, and needs all of them at once.
        microbatches: the number of microbatches into which it splits a batch. Default None: it does not split it.
        compile_inner: whether a compiled step captures only the innermost gradient as a graph, which `wrap` then calls
            in a loop, instead of one graph of all calls.
        loss_scale: ``state -> 0-d tensor``, a factor of the loss; gradients are divided by it afterwards.
        may_refuse_updates: whether it sets `Gradients.accept`.
        across_ranks: whether it combines the gradients of ranks. It is then applied outside the wrappers that split the
            batch and inside all others, wherever it is listed: ranks communicate once per step.
        evaluations: the number of gradients of the whole batch that it computes in a step.
        reads_norm: whether it computes the norm of all gradients, which ranks that hold parts of them must add up.
        by_element: whether it changes each element of a gradient by itself, and reads no others except in norms by
            `ftrain.tree.global_norm`. From level 1 of `sharded` on, where ranks hold parts of gradients, a wrapper that
            reads gradients and does not say so is refused.
    """

    wrap: Callable[[GradFn], GradFn]
    reads_gradients: bool = True
    microbatches: int | None = None
    compile_inner: bool = False
    loss_scale: Callable[[TrainState], Tensor] | None = None
    may_refuse_updates: bool = False
    across_ranks: bool = False
    evaluations: int = 1
    reads_norm: bool = False
    by_element: bool = False


@dataclass(frozen=True, eq=False)
class OnUpdate:
    """How a wrapper changes the update.

    Args:
        wrap: ``UpdateFn -> UpdateFn``.
        reads_gradients: whether `wrap` reads gradients, and needs all of them at once.
        by_element: whether it changes each element by itself, as `OnGrad.by_element` says it, of the gradients, the
            parameters and the rest of the state. From level 1 of `sharded` on any other `wrap` is refused, and any
            other `optimizer` that is listed after `sharded`.
        reads_old_state: whether `wrap` reads the state after the update that it wraps. That update then does not reuse
            the memory of a donated state, so that the old and the new parameters exist at the same time.
        optimizer: ``Optimizer -> Optimizer``, replaces the optimizer of the step by one with the same `text`.
        make_update: ``Optimizer -> UpdateFn``, replaces the innermost update. It gets `Gradients` whose `stream_grads`
            runs the backward pass.
    """

    wrap: Callable[[UpdateFn], UpdateFn] | None = None
    reads_gradients: bool = True
    by_element: bool = False
    reads_old_state: bool = True
    optimizer: Callable[[Optimizer], Optimizer] | None = None
    make_update: Callable[[Optimizer], UpdateFn] | None = None


@dataclass(frozen=True, eq=False)
class OnStep:
    """How a wrapper changes the step as a whole.

    Args:
        make_runner: ``Step -> Runner``, which replaces eager execution.
        wrap_function: ``function -> function``, for plain functions ``(state, batch) -> (state, metrics)``.
        wrap_evaluation: ``EvalStep -> EvalStep``.
        donate: whether the step reuses the memory of its state.
        on_step_end: ``(Backend, steps) -> None``, called on the host after each step with the number of steps so far.
        distribute: ``(params, frozen, buffers) -> (params, frozen, buffers)``, called by `Step.init`: returns the
            tensors of the first rank on all ranks, or DTensors.
        on_ranks: ``(Step, state, batch) -> (local state, local batch, around)``: the input of this rank, and
            ``runner -> runner``, whose result is a state of all ranks.
        ranks: the number of ranks that compute the step together.
    """

    make_runner: Callable[[Any], Runner] | None = None
    wrap_function: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    wrap_evaluation: Callable[[Any], Any] | None = None
    donate: bool = False
    on_step_end: Callable[[Backend, int], None] | None = None
    distribute: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]] | None = None
    on_ranks: OnRanks | None = None
    ranks: int = 1


@dataclass(frozen=True, eq=False)
class SlotSpec:
    """The part of the state that belongs to a wrapper: ``state.slots[name]``.

    Args:
        init: ``params -> tree``, its initial value.
        on_finite_check: ``(slot, finite) -> slot``, called in every step; `finite` is a 0-d bool tensor, whether loss
            and gradients are finite. If any wrapper has one, a step where they are not finite changes only the slots of
            these wrappers.
        check: ``(slot, step, since) -> None``, called on the host by `Step.check`: raises an error if the slot shows
            that something went wrong after step `since`; the state is at step `step`.
    """

    init: Callable[[PyTree], PyTree]
    on_finite_check: Callable[[PyTree, Tensor], PyTree] | None = None
    check: Callable[[PyTree, int, int], None] | None = None


ARROWS = {"loss": OnLoss, "grad": OnGrad, "update": OnUpdate, "step": OnStep}
"""The four functions of a step in their order, and the record of a wrapper for each."""


@dataclass(frozen=True, eq=False, repr=False)
class Wrapper:
    """A transformation of a step. It does not change the functions for which it has None.

    Args:
        name: its name, also that of its slot in the state. A step has at most one wrapper of a name.
        text: the name and the options, for `print`. Default: the name.
        loss, grad, update, step: how it changes these functions.
        slot: its part of the state.
        validate: ``Step -> None``, called whenever a wrapper is added to the step: raises a ComposeError if the step
            has something that this wrapper cannot be combined with, in either order.
        require: ``(Backend, params) -> None``, raises an error if the device or the trained parameters do not support
            this wrapper.
        choice: ``() -> str``, for `print`: what it chose for the devices so far; may be empty.
        sends: ``Step -> {line of print: text}``: what ranks send to each other because of it, and with which kind of
            collective.
        innermost: whether tools that add it to a step put it inside the other wrappers.
        options: its arguments by name: two wrappers of one name with equal options do the same. Default: the arguments
            of the factory that `wrapper` decorates; else None, which means unknown.

    Raises:
        ComposeError: when `loss`, `grad`, `update`, `step` or `slot` is not its record, but a function, for example.
    """

    name: str
    text: str = ""
    _: KW_ONLY
    loss: OnLoss | None = None
    grad: OnGrad | None = None
    update: OnUpdate | None = None
    step: OnStep | None = None
    slot: SlotSpec | None = None
    validate: Callable[[Any], None] | None = None
    require: Callable[[Backend, PyTree], None] | None = None
    choice: Callable[[], str] | None = None
    sends: Callable[[Any], Mapping[str, str]] | None = None
    innermost: bool = False
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text or self.name)
        for field, cls in {**ARROWS, "slot": SlotSpec}.items():
            record = getattr(self, field)
            if record is not None and not isinstance(record, cls):
                raise ComposeError(
                    f"Wrapper: {field} of {self.name} is a {type(record).__name__}; needs "
                    f"{field}=ft.{cls.__name__}(...)"
                )

    def __repr__(self) -> str:
        return self.text

    @property
    def arrow(self) -> str:
        """The line on which it prints: the first of loss, grad, update and step that it changes."""
        return next((arrow for arrow in ARROWS if getattr(self, arrow) is not None), "update")

    @property
    def reads_gradients(self) -> bool:
        """Whether it reads gradients, and needs all of them at once."""
        grad, update = self.grad, self.update
        in_update = update is not None and update.wrap is not None and update.reads_gradients
        return in_update or (grad is not None and grad.reads_gradients)

    @property
    def may_refuse_updates(self) -> bool:
        """Whether it may refuse an update; then the old and the new state must exist at the same time."""
        counts = self.slot is not None and self.slot.on_finite_check is not None
        return counts or (self.grad is not None and self.grad.may_refuse_updates)

    def __call__(self, step: S) -> S:
        """Return the step with this wrapper applied.

        Raises a ComposeError if the step already has it, or is a plain function that it cannot wrap.
        """
        if hasattr(step, "wrapped"):
            return step.wrapped(self)  # type: ignore[no-any-return]
        wrap_function = self.step.wrap_function if self.step is not None else None
        is_module = isinstance(step, nn.Module)
        if wrap_function is not None and callable(step) and not is_module:
            return wrap_function(step)  # type: ignore[return-value]
        name = "the argument" if is_module else getattr(step, "__name__", repr(step))
        changes = "wraps" if self.arrow == "step" else f"changes the {self.arrow} of"
        raise ComposeError(
            f"{self.text}: {changes} a Step, and {name} is a {type(step).__name__}; needs a Step: "
            "make one with ft.train_step(loss_fn, optimizer), or wrap the Steps that it calls. Pass options by name"
        )


class _Factory(Protocol[P]):
    """Returns a wrapper, or, called with a step alone, the step with the default wrapper applied."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Wrapper: ...

    @overload
    def __call__(self, step: S, /) -> S: ...


def wrapper(factory: Callable[P, Wrapper]) -> _Factory[P]:
    """Decorate a factory of wrappers, so that ``clip(step)`` is short for ``clip()(step)``.

    A schedule of `ftrain.schedules` is an option and not a step, although it can be called. The wrapper's `options` are
    the arguments, unless the factory sets them. Raises a ComposeError, from the decorated factory, if it is called with
    a step and needs an argument, with a function that is not a step, or with a step and options.
    """
    signature, name = inspect.signature(factory), factory.__name__
    parameters = signature.parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]

    def build(*args: Any, **kwargs: Any) -> Wrapper:
        args = tuple(map(_as_python_number, args))
        kwargs = {key: _as_python_number(arg) for key, arg in kwargs.items()}
        built = factory(*args, **kwargs)
        if not isinstance(built, Wrapper) or built.options is not None:
            return built
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dataclasses.replace(built, options=bound.arguments)

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type | Call):
            if needed:
                raise ComposeError(f"{name}: needs the argument {needed[0]}: {name}({needed[0]})(step)")
            return build()(args[0])
        if args and hasattr(args[0], "wrapped"):
            raise ComposeError(f"{name}: got a step and options; pass the step to the wrapper: {name}(...)(step)")
        return build(*args, **kwargs)

    return make


def _as_python_number(value: Any) -> Any:
    """Return a numpy number as a Python number, because it would compute in its own precision; else the value."""
    if isinstance(value, np.integer):
        return int(value)
    return float(value) if isinstance(value, np.floating) else value
