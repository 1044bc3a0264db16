"""The record of a wrapper: what it does to each arrow of a step, and its part of the state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from torch import Tensor

from ftrain.backends import Backend
from ftrain.errors import ComposeError
from ftrain.types import GradFn, Loss, Optimizer, PyTree, Runner, TrainState, UpdateFn

P = ParamSpec("P")
S = TypeVar("S", bound=Callable[..., Any])


OnRanks: TypeAlias = Callable[
    [Any, TrainState, PyTree], tuple[TrainState, PyTree, Callable[[Runner], Callable[..., Any]]]
]


@dataclass(frozen=True, eq=False)
class OnLoss:
    """What a wrapper does to the loss.

    Args:
        wrap: ``Loss -> Loss``; adds how it prints to `Loss.wrapper_texts`.
        order: wrappers with a lower one are applied first, wherever they stand: 0 for what changes the model that the
            loss is of, 1 for what gathers its parameters, 2 for what changes how it computes.
    """

    wrap: Callable[[Loss], Loss]
    order: int = 2


@dataclass(frozen=True, eq=False)
class OnGrad:
    """What a wrapper does to the gradient.

    Args:
        wrap: ``GradFn -> GradFn``.
        reads_gradients: whether it looks at gradients, and needs all of them at once.
        microbatches: in how many pieces it takes a batch. Default None: it leaves the batch whole.
        compile_inner: whether a compiled step makes a graph of the innermost gradient alone, which `wrap` then calls
            in a loop, instead of one graph of all calls.
        loss_scale: ``state -> 0-d tensor``, the cotangent of the mean loss, by which gradients are divided again.
        may_refuse_updates: whether it sets `Gradients.accept`.
        across_ranks: whether it combines the gradients of ranks. It then goes around those that take a batch in pieces
            and inside of all others, wherever it stands: ranks communicate once a step.
        evaluations: how many gradients of the whole batch it takes in a step.
        reads_norm: whether it computes the norm of all gradients, which ranks that have parts of them must add up.
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


@dataclass(frozen=True, eq=False)
class OnUpdate:
    """What a wrapper does to the update.

    Args:
        wrap: ``UpdateFn -> UpdateFn``.
        reads_gradients: whether `wrap` looks at gradients, and needs all of them at once.
        optimizer: ``Optimizer -> Optimizer`` of the same `text`: what the step has as its optimizer from then on.
        make_update: ``Optimizer -> UpdateFn``, the innermost update. It gets `Gradients` whose `stream_grads` runs the
            backward pass.
    """

    wrap: Callable[[UpdateFn], UpdateFn] | None = None
    reads_gradients: bool = True
    optimizer: Callable[[Optimizer], Optimizer] | None = None
    make_update: Callable[[Optimizer], UpdateFn] | None = None


@dataclass(frozen=True, eq=False)
class OnStep:
    """What a wrapper does to the step as a whole.

    Args:
        make_runner: ``Step -> Runner``, which replaces eager execution.
        wrap_function: ``StepFn -> StepFn``, for plain functions that are no `Step`.
        donate: whether the step reuses the memory of its state.
        on_step_end: ``(Backend, steps) -> None``, called on the host after each step with the number of steps that the
            state has made.
        place: ``(params, frozen, buffers) -> (params, frozen, buffers)``, called by `Step.init`: the same on all ranks,
            or DTensors of which each has a part.
        on_ranks: ``(Step, state, batch) -> (state, batch, around)``: what this rank computes on, and
            ``runner -> runner``, which makes of the next state one of all ranks.
        ranks: how many ranks make the step together.
    """

    make_runner: Callable[[Any], Runner] | None = None
    wrap_function: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    donate: bool = False
    on_step_end: Callable[[Backend, int], None] | None = None
    place: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree, PyTree]] | None = None
    on_ranks: OnRanks | None = None
    ranks: int = 1


@dataclass(frozen=True, eq=False)
class SlotSpec:
    """The part of the state that belongs to a wrapper: ``state.slots[name]``.

    Args:
        init: ``params -> tree``, its initial value.
        on_finite_check: ``(slot, finite) -> slot``, called in every step with whether its loss and gradients are
            finite, a 0-d bool tensor. With one, a step where they are not changes nothing but the slots of the wrappers
            that have an `on_finite_check`.
        check: ``(slot, step, since) -> None``, called by `Step.check`: raises on the host what the slot shows to have
            gone wrong after step `since`, when the state has made `step` steps.
    """

    init: Callable[[PyTree], PyTree]
    on_finite_check: Callable[[PyTree, Tensor], PyTree] | None = None
    check: Callable[[PyTree, int, int], None] | None = None


ARROWS = {"loss": OnLoss, "grad": OnGrad, "update": OnUpdate, "step": OnStep}
"""The arrows of a step in their order, and what a wrapper says of each."""


@dataclass(frozen=True, eq=False)
class Wrapper:
    """One transformation of a step. An arrow that is None is left alone.

    Args:
        name: its name, which is also the name of its slot in the state. A step has one wrapper of a name.
        text: how it prints. Default: the name.
        loss: what it does to the loss.
        grad: what it does to the gradient.
        update: what it does to the update.
        step: what it does to the step as a whole.
        slot: its part of the state.
        validate: ``Step -> None``, called whenever the step gets another wrapper: raises a ComposeError when the step
            has something that this one cannot be combined with, in either order.
        require: ``(Backend, params) -> None``, raises when the device or the trained parameters cannot do this.
        choice: ``() -> str``, what it has chosen for the devices that it has met, for `print`; empty where there is
            nothing to say.
        sends: ``Step -> {arrow: text}``, what ranks send to each other in a step because of it, and with which kind of
            collective, for `print`: on which lines.
        innermost: whether tools that add it to a step put it inside of the other wrappers.
        options: the arguments that make it what it is, by name: two wrappers of one name with equal options do the
            same. Default: the arguments of the factory, when `wrapper` decorates it, and else None: not known.

    Raises:
        ComposeError: when an arrow is given something else than its record, such as a function.
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
        for arrow, kind in ARROWS.items():
            part = getattr(self, arrow)
            if part is not None and not isinstance(part, kind):
                raise ComposeError(
                    f"Wrapper: {arrow} of {self.name} is a {type(part).__name__}; needs {arrow}=ft.{kind.__name__}(...)"
                )

    @property
    def arrow(self) -> str:
        """The arrow on whose line it prints: the first of loss, grad, update and step that it acts on."""
        return next((arrow for arrow in ARROWS if getattr(self, arrow) is not None), "update")

    @property
    def reads_gradients(self) -> bool:
        """Whether it looks at gradients, and needs all of them at once."""
        grad, update = self.grad, self.update
        in_update = update is not None and update.wrap is not None and update.reads_gradients
        return in_update or (grad is not None and grad.reads_gradients)

    @property
    def may_refuse_updates(self) -> bool:
        """Whether it may take an update back, for which the old and the new state must exist at once."""
        counts = self.slot is not None and self.slot.on_finite_check is not None
        return counts or (self.grad is not None and self.grad.may_refuse_updates)

    def __call__(self, step: S) -> S:
        """Return the step with this wrapper applied.

        Raises:
            ComposeError: for a second application, or for a plain function this cannot act on.
        """
        if hasattr(step, "wrapped"):
            return step.wrapped(self)  # type: ignore[no-any-return]
        if self._wrap_function is not None and callable(step):
            return self._wrap_function(step)  # type: ignore[return-value]
        name = getattr(step, "__name__", repr(step))
        raise ComposeError(
            f"{self.text}: acts on the {self.arrow} inside of a Step, and {name} is a {type(step).__name__}; "
            "by the time a plain function returns, its update has happened. Build it with ft.train_step(loss_fn, "
            "optimizer), or wrap the Steps it is made of"
        )

    @property
    def _wrap_function(self) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
        return self.step.wrap_function if self.step else None


def _no_step(bare: Wrapper, value: Any, options: list[str]) -> ComposeError:
    return ComposeError(
        f"{bare.name}: {getattr(value, '__name__', repr(value))} is no Step, for which a function given by position is "
        f"taken. Give options by name ({', '.join(f'{name}=' for name in options)}), or make the step with "
        f"ft.train_step(loss_fn, optimizer): {bare.name} acts on the {bare.arrow} inside of it"
    )


class _Factory(Protocol[P]):
    """A factory of wrappers, or one of them applied to a step at its defaults."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Wrapper: ...

    @overload
    def __call__(self, step: S, /) -> S: ...


def wrapper(factory: Callable[P, Wrapper]) -> _Factory[P]:
    """Let a factory of wrappers also be applied bare: ``clip(step)`` for ``clip()(step)``.

    The wrapper's `options` are the arguments, unless the factory sets them.

    Raises:
        ComposeError: from the factory, when it is applied bare and needs an argument, or to what is no step; for a
            step among options.
    """
    signature = inspect.signature(factory)
    parameters = signature.parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]

    def build(*args: Any, **kwargs: Any) -> Wrapper:
        built = factory(*args, **kwargs)
        if not isinstance(built, Wrapper) or built.options is not None:
            return built
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dataclasses.replace(built, options=bound.arguments)

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type):
            if needed:
                name = factory.__name__
                raise ComposeError(
                    f"{name}: cannot be applied bare, for it needs {needed[0]}: {name}({needed[0]})(step)"
                )
            bare = build()
            if parameters and bare._wrap_function is None and not hasattr(args[0], "wrapped"):
                raise _no_step(bare, args[0], [each.name for each in parameters])
            return bare(args[0])
        if args and hasattr(args[0], "wrapped"):
            name = factory.__name__
            raise ComposeError(f"{name}: a step goes behind the options: {name}(...)(step)")
        return build(*args, **kwargs)

    return make
