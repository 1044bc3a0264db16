"""The record of a wrapper: which parts of a step it transforms, and what it keeps in the state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from torch import Tensor

from ftrain.backends import Backend
from ftrain.errors import ComposeError
from ftrain.types import GradFn, Loss, Optimizer, PyTree, Runner, TrainState, UpdateFn

P = ParamSpec("P")
S = TypeVar("S", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Wrapper:
    """One transformation of a step. A field that is None leaves that part of the step alone.

    Args:
        name: its name, which is also the name of its slot in the state.
        text: how it prints.
        arrow: the line it prints on and the part it acts on: loss, grad, update or step.
        model: ``Loss -> Loss``, what becomes of the model that the loss is of; applied before the `loss` of every
            wrapper, wherever this one stands.
        loss: ``Loss -> Loss``; appends its own text.
        grad: ``GradFn -> GradFn``.
        update: ``UpdateFn -> UpdateFn``.
        optimizer: ``Optimizer -> Optimizer``, of the same `text`; what the step has as its optimizer from then on.
        optimize: ``Optimizer -> UpdateFn``, the innermost update, which then gets `Gradients` to be pulled.
        pieces: in how many pieces its `grad` takes a batch.
        loops: whether its `grad` calls the innermost one, of which alone a compiled step makes a graph then, instead of
            a graph of all the calls.
        reads_gradients: whether its `grad` or `update` looks at gradients, and needs all of them at once.
        suits: ``Step -> None``, raises a ComposeError when the step has what this wrapper does not go with, whichever
            of them was first.
        step: ``Step -> Runner``, which replaces eager execution.
        function: ``StepFn -> StepFn``, for plain functions that are no `Step`.
        donate: whether the step reuses the memory of its state.
        slot: ``params -> tree``, its own part of the initial state.
        scale: ``state -> 0-d tensor``, the cotangent of the mean loss.
        account: ``(slot, finite) -> slot``. With one, a step whose loss or gradients are not finite
            changes nothing but the slots of the wrappers that account for it.
        after: ``(Backend, steps) -> None``, called on the host after each step, when the state has made so many.
        check: ``(slot, step, since) -> None``, raises on the host what the slot shows to have gone wrong after step
            `since`, when the state has made `step` steps.
        require: ``(Backend, params) -> None``, raises when the device or the trained parameters cannot do this.
        choice: ``() -> str``, what it has chosen for the devices that it has met, for `print`; empty before.
    """

    name: str
    text: str
    arrow: str
    model: Callable[[Loss], Loss] | None = None
    loss: Callable[[Loss], Loss] | None = None
    grad: Callable[[GradFn], GradFn] | None = None
    update: Callable[[UpdateFn], UpdateFn] | None = None
    optimizer: Callable[[Optimizer], Optimizer] | None = None
    optimize: Callable[[Optimizer], UpdateFn] | None = None
    pieces: int | None = None
    loops: bool = False
    reads_gradients: bool = True
    suits: Callable[[Any], None] | None = None
    step: Callable[[Any], Runner] | None = None
    function: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    donate: bool = False
    slot: Callable[[PyTree], PyTree] | None = None
    scale: Callable[[TrainState], Tensor] | None = None
    account: Callable[[PyTree, Tensor], PyTree] | None = None
    after: Callable[[Backend, int], None] | None = None
    check: Callable[[PyTree, int, int], None] | None = None
    require: Callable[[Backend, PyTree], None] | None = None
    choice: Callable[[], str] | None = None

    def __call__(self, step: S) -> S:
        """Return the step with this wrapper applied.

        Raises:
            ComposeError: for a second application, or for a plain function this cannot act on.
        """
        if hasattr(step, "wrapped"):
            return step.wrapped(self)  # type: ignore[no-any-return]
        if self.function is not None and callable(step):
            return self.function(step)  # type: ignore[return-value]
        name = getattr(step, "__name__", repr(step))
        raise ComposeError(
            f"{self.text}: acts on the {self.arrow} inside of a Step, and {name} is a {type(step).__name__}; "
            "by the time a plain function returns, its update has happened. Build it with ft.train_step(loss_fn, "
            "optimizer), or wrap the Steps it is made of"
        )


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

    Raises:
        ComposeError: from the factory, when it is applied bare and needs an argument, or to what is no step; for a
            step among options.
    """
    parameters = inspect.signature(factory).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type):
            if needed:
                name = factory.__name__
                raise ComposeError(
                    f"{name}: cannot be applied bare, for it needs {needed[0]}: {name}({needed[0]})(step)"
                )
            bare = factory()  # type: ignore[call-arg]
            if parameters and bare.function is None and not hasattr(args[0], "wrapped"):
                raise _no_step(bare, args[0], [each.name for each in parameters])
            return bare(args[0])
        if args and hasattr(args[0], "wrapped"):
            name = factory.__name__
            raise ComposeError(f"{name}: a step goes behind the options: {name}(...)(step)")
        return factory(*args, **kwargs)

    return make
