"""The vocabulary: the state, the weighted mean, and the four functions that a training step is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import optree
from torch import Tensor, nn

from ftrain.errors import ConsumedError, StructureError

PyTree: TypeAlias = Any
"""Any nesting of dicts, lists, tuples and registered classes; ``None`` is an empty tree."""

Metrics: TypeAlias = dict[str, Any]
"""Named results of a step: 0-d tensors, or floats that the host knew anyway."""

Schedule: TypeAlias = Callable[[int], float]
"""The value at optimizer step k, counted from 0: a pure function evaluated on the host."""

Hyper: TypeAlias = Mapping[str, Any]
"""Scheduled values of one step: floats in eager mode, 0-d float64 tensors inside a graph; and `RNG`, where needed."""

RNG = "rng"
"""Under which `Hyper` has the key of `ftrain.random` from which an optimizer may draw in this step."""

NAMESPACE = "ftrain"
"""The optree namespace in which this package's classes are registered."""

STATIC = {"static": True}
"""Metadata of a field that belongs to the structure of a tree and not to its leaves."""

T = TypeVar("T")

TREE_CLASSES: dict[str, Callable[[Mapping[str, Any], Sequence[Any]], Any]] = {}
"""Tag of a registered class -> function that makes an instance from its fields by name and its static values."""


def tree_tag(kind: type) -> str:
    """Return the tag of a registered class, by which checkpoints name it.

    A class of ftrain has its name alone, so that it can move to another module without changing the file format. A
    class of a user has its module too, so that it is never taken for one of ftrain with the same name.
    """
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def tree_class(kind: type[T]) -> type[T]:
    """Register a dataclass as a tree of its fields, except those marked `STATIC`.

    Raises:
        StructureError: from the function in `TREE_CLASSES`, when it is called with other fields than the class has.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = tuple(each.name for each in fields if not each.metadata.get("static"))
    static = tuple(each.name for each in fields if each.metadata.get("static"))

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        return (
            tuple([getattr(node, name) for name in names]),
            tuple([getattr(node, s) for s in static]),
            names,
        )

    def unflatten(values: tuple[Any, ...], children: Iterable[Any]) -> Any:
        return kind(**dict(zip(names, children, strict=True)), **dict(zip(static, values, strict=True)))

    def restore(children: Mapping[str, Any], values: Sequence[Any]) -> Any:
        if children.keys() != set(names) or len(values) != len(static):
            raise StructureError(f"{kind.__name__} has the fields {', '.join(names)}; found {', '.join(children)}")
        return kind(**children, **dict(zip(static, values, strict=True)))

    TREE_CLASSES[tree_tag(kind)] = restore
    optree.register_pytree_node(
        kind,  # type: ignore[arg-type]
        flatten,
        unflatten,  # type: ignore[arg-type]
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )
    return kind


def replace(record: T, **changes: Any) -> T:
    """`dataclasses.replace` for records without `__post_init__`, at a third of its time: steps do it often."""
    new = object.__new__(type(record))
    fields = type(record).__dataclass_fields__  # type: ignore[attr-defined]
    # Fields only, since a state has marks of its own that a changed one must not inherit.
    vars(new).update({name: changes[name] if name in changes else getattr(record, name) for name in fields})
    return new


@tree_class
@dataclass(frozen=True, eq=False)
class Mean:
    """An average that can still be added up: ``total / weight``.

    Sums of totals and weights over microbatches, batches or devices give the exact mean over all of
    them, however unevenly the weight is spread. What has weight 0 counts for nothing: steps and evaluations take its
    total as 0, be it NaN, and its gradient with a cotangent of 0. (A loss that divides by its weight on the way has NaN
    in the gradient even so; mask before dividing.)

    Args:
        total: 0-d tensor, the weighted sum.
        weight: 0-d tensor, the sum of the weights (of tokens or examples, say); not differentiated.
        plain: the average was given as one number, and of how many examples is not known; an
            evaluation then weighs it by the length of the batch.

    >>> import torch
    >>> a, b = Mean(torch.tensor(6.0), torch.tensor(3.0)), Mean(torch.tensor(2.0), torch.tensor(1.0))
    >>> float(a + b)
    2.0
    """

    total: Tensor
    weight: Tensor
    plain: bool = field(default=False, metadata=STATIC)

    @property
    def value(self) -> Tensor:
        """``total / weight`` as a 0-d tensor; NaN where both are zero, for nothing has no mean."""
        return self.total / self.weight

    def __add__(self, other: Mean) -> Mean:
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.total + other.total, self.weight + other.weight, self.plain and other.plain)

    def __float__(self) -> float:
        return float(self.value.detach())

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


def counted(mean: Mean) -> Mean:
    """Return a mean whose total is 0 where its weight is: what counts for nothing adds nothing, not even NaN."""
    nothing = (mean.weight == 0).to(mean.total.device)
    return replace(mean, total=mean.total.masked_fill(nothing, 0))


@tree_class
@dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """Everything a run consists of, as one explicit tree: what is not in it does not exist.

    Args:
        step: 0-d int64 on the CPU; calls of the step so far, skipped ones included.
        params: what the optimizer moves.
        frozen: parameters that the loss reads and nothing moves; None when there are none.
        buffers: what a loss carries from step to step (running statistics).
        opt_state: the optimizer's own tree.
        slots: the wrappers' own state, by wrapper name.
        rng: int64 tensor of shape (2,) on the CPU, a key of `ftrain.random`.
    """

    step: Tensor
    params: PyTree
    frozen: PyTree
    buffers: PyTree
    opt_state: PyTree
    slots: dict[str, PyTree]
    rng: Tensor

    def __repr__(self) -> str:
        if "step" not in vars(self):
            return "TrainState(consumed)"
        leaves = optree.tree_leaves(self.params, namespace=NAMESPACE)
        count = sum(leaf.numel() for leaf in leaves)
        return f"TrainState(step={int(self.step)}, params={count:,} in {len(leaves)} leaves, slots={list(self.slots)})"

    def __getattr__(self, name: str) -> NoReturn:
        # Reached only when normal lookup fails, so a live state pays nothing for this.
        if name in _STATE_FIELDS:
            raise ConsumedError(
                f"TrainState.{name}: this state was donated to a step, which has reused its memory. "
                "Use the state that the step returned, keep a copy with ft.tree.clone(state) before the "
                "call, or do not donate."
            )
        raise AttributeError(f"'TrainState' object has no attribute {name!r}")


_STATE_FIELDS = frozenset(each.name for each in dataclasses.fields(TrainState))


def consume(state: TrainState) -> None:
    """Mark a donated state: any later use of its fields raises `ConsumedError`."""
    vars(state).clear()


def own(state: TrainState) -> TrainState:
    """Note that nobody else has the tensors of a state, so that they can be donated as they are."""
    # By identity, since a copy of the state takes the mark along.
    vars(state)["_owner"] = id(state)
    return state


def is_own(state: TrainState) -> bool:
    """Whether nobody else has the tensors of a state."""
    return vars(state).get("_owner") == id(state)


LossOutput: TypeAlias = tuple[Mean, Metrics, PyTree]
"""``(loss, metrics, buffers)``."""


class LossFn(Protocol):
    """A loss in its full form; `ftrain.step.value_and_grad.adapt` makes one from the short forms that users write."""

    def __call__(self, params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        """Return the loss, further metrics, and the buffers for the next step."""
        ...


class Adapters(Protocol):
    """Parameters beside those of the base, and what they make of the modules that they belong to."""

    def added(self, params: PyTree, frozen: PyTree, key: Tensor) -> tuple[PyTree, PyTree]:
        """Return the trainable and the frozen parameters, with the adapters among the trainable ones."""
        ...

    def slots(self, part: nn.Module) -> Sequence[Any]:
        """Return the places of the adapters in a part of the module: more `ftrain.slots.Slot`."""
        ...


@dataclass(frozen=True)
class Loss:
    """A loss function and what else is known about it.

    Args:
        fn: the loss in its full form.
        text: how it prints.
        scope: context in which it must be differentiated, given whether this is training; entered on
            the host around the whole step, and outside of any graph.
        module: the `torch.nn.Module` that `fn` binds, if any.
        needs_rng: whether `fn` takes a key.
        adapters: what a wrapper has added to its parameters, if any has.
        narrow: the narrow dtype in which a wrapper lets it compute, by the name that `with_amp` has for it.
        products: the wrapper that sets the precision of its float32 products.
    """

    fn: LossFn
    text: str
    scope: Callable[[bool], AbstractContextManager[Any]] = lambda training: nullcontext()
    module: nn.Module | None = None
    needs_rng: bool = False
    adapters: Adapters | None = None
    narrow: str = ""
    products: str = ""


@tree_class
@dataclass(frozen=True, eq=False)
class Gradients:
    """What a `GradFn` returns.

    Args:
        grads: gradient of the mean loss, a tree like the parameters.
        loss: the loss as a `Mean`, detached.
        metrics: what else the loss reported; `Mean` or tensor, detached.
        buffers: the buffers after the forward pass.
        finite: 0-d bool, whether the loss and every raw gradient are finite; None when nobody asked.
        pull: where gradients are wanted one by one: ``take -> None``, which makes the backward pass and calls
            ``take(index, gradient)`` for each leaf of the parameters when its gradient is complete; `grads` is None.
    """

    grads: PyTree
    loss: Mean
    metrics: Metrics
    buffers: PyTree
    finite: Tensor | None = None
    pull: Callable[[Callable[[int, Tensor], None]], None] | None = field(default=None, metadata=STATIC)


GradFn: TypeAlias = Callable[[TrainState, PyTree, Tensor | None], Gradients]
"""``(state, batch, rng) -> Gradients``."""


class UpdateFn(Protocol):
    """Moves the parameters: ``(state, gradients, hyper) -> state``."""

    def __call__(self, state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        """Return the updated state; may overwrite the tensors of `state` when `donate` is true."""
        ...


class Core(Protocol):
    """The whole step on tensors, without `step` and `rng`, which belong to the host."""

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Hyper, rng: Tensor | None
    ) -> tuple[TrainState, Metrics]:
        """Return the next state and the metrics."""
        ...


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions and the schedules they read.

    Args:
        init: ``params -> opt_state``.
        update: ``(grads, opt_state, params, hyper, donate=) -> (params, opt_state)``.
        schedules: name -> schedule; evaluated on the host each step and handed to `update` as `hyper`.
        text: how it prints.
        needs_rng: whether `update` draws, from the key ``hyper["rng"]``.
        factors: ``opt_state -> {name: 0-d tensor on the CPU}``, by which the scheduled values of these names are
            multiplied on the host.
        apart: ``(params, parts) -> optimizers``: for each part, indices of some of the leaves, the optimizer of
            these alone. It is given them as a dict by their names, and computes what this one does for them among
            all, to the bit; its state holds leaves of the names that they have in the whole one. None where a leaf
            cannot be updated without the others.
        visits: whether its state lives elsewhere and is on the device in parts only, so that no graph can hold it.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
    schedules: Mapping[str, Schedule]
    text: str
    needs_rng: bool = False
    factors: Callable[[PyTree], Mapping[str, Tensor]] | None = None
    apart: Callable[[PyTree, Sequence[Sequence[int]]], list[Optimizer]] | None = None
    visits: bool = False


class Runner(Protocol):
    """Runs the tensor part of a step, eagerly or compiled, with what the host has worked out."""

    @property
    def text(self) -> str:
        """How it prints."""
        ...

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], words: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        """Return the next state, without `step` and `rng`, and the metrics."""
        ...
