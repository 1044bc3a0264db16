"""The types that the package is built from: the training state, the weighted mean, and the functions of a step.

A training step is ``(state, batch) -> (state, metrics)``. It is made of four functions: a `LossFn`, a `GradFn`, an
`UpdateFn` and the step itself (`Core` on tensors, called by a `Runner`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import optree
from torch import Tensor, nn

from ftrain.errors import ConsumedError, StructureError

PyTree: TypeAlias = Any
"""Any nesting of dicts, lists, tuples and classes registered by `tree_class`; ``None`` is an empty tree."""

Metrics: TypeAlias = dict[str, Any]
"""Results of a step by name: `Mean`, 0-d tensor, or float where the value is known on the host."""

Schedule: TypeAlias = Callable[[int], float]
"""``step -> value``, the number of the optimizer step counting from 0; a pure function, evaluated on the host."""

Hyper: TypeAlias = Mapping[str, Any]
"""Scheduled values of one step by name: floats in eager mode, 0-d float64 tensors in a graph. If the optimizer draws
random numbers, also the key to draw them from, under the name `RNG`."""

RNG = "rng"
"""The name in `Hyper` of the key of `ftrain.random` for an optimizer that draws random numbers."""

NAMESPACE = "ftrain"
"""The optree namespace in which the classes of this package are registered."""

STATIC = {"static": True}
"""Metadata of a dataclass field that is part of the structure of a tree, not one of its children."""

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
    """Register a dataclass as a tree whose children are its fields, except those with the metadata `STATIC`.

    Use it as a decorator, above ``@dataclass``.

    Raises:
        StructureError: from the function in `TREE_CLASSES`, when it is called with other fields than the class has.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = tuple(each.name for each in fields if not each.metadata.get("static"))
    static = tuple(each.name for each in fields if each.metadata.get("static"))

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        return tuple([getattr(node, name) for name in names]), tuple([getattr(node, s) for s in static]), names

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
    """`dataclasses.replace` without a call of ``__init__`` or ``__post_init__``, in a third of the time."""
    new = object.__new__(type(record))
    values = vars(new)
    # Fields only: the mark that `mark_donatable` sets on a state does not apply to a changed one.
    for name in type(record).__dataclass_fields__:  # type: ignore[attr-defined]
        values[name] = changes[name] if name in changes else getattr(record, name)
    return new


@tree_class
@dataclass(frozen=True, eq=False)
class Mean:
    """A weighted mean, ``total / weight``, that can be accumulated.

    The sums of totals and weights over microbatches, batches or devices give the exact mean over all of them, however
    unevenly the weight is distributed.

    A mean of weight 0 contributes nothing: steps and evaluations take its total as 0, even if it is NaN, and its
    gradient with a cotangent of 0. (A loss that divides by its weight itself still has NaN in the gradient: mask before
    dividing.)

    Args:
        total: 0-d tensor, the weighted sum.
        weight: 0-d tensor, the sum of the weights (the number of tokens or examples, say); not differentiated.
        plain: whether the mean was given as one number, without its weight. An evaluation then weights it by the
            length of the batch.

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
        """``total / weight`` as a 0-d tensor; NaN if both are 0."""
        return self.total / self.weight

    def __add__(self, other: Mean) -> Mean:
        if not isinstance(other, Mean):
            return NotImplemented
        return Mean(self.total + other.total, self.weight + other.weight, self.plain and other.plain)

    def __float__(self) -> float:
        return float(self.value.detach())

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


def zero_if_empty(mean: Mean) -> Mean:
    """Return a mean whose total is 0 if its weight is 0, even if the total was NaN."""
    is_empty = (mean.weight == 0).to(mean.total.device)
    return replace(mean, total=mean.total.masked_fill(is_empty, 0))


@tree_class
@dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """The whole state of a run as one explicit tree. A step depends on this and on the batch, and on nothing else.

    Args:
        step: 0-d int64 tensor on the CPU; the number of calls of the step so far, including skipped updates.
        params: the trainable parameters.
        frozen: parameters that the loss reads and no step changes; None if there are none.
        buffers: tensors that the loss reads and replaces in each step (running statistics, say).
        opt_state: the state of the optimizer, a tree of its own structure.
        slots: the states of the wrappers, by wrapper name.
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
        # Called only when normal lookup fails, so it costs nothing for a state that was not donated.
        if name in _STATE_FIELDS:
            raise ConsumedError(
                f"TrainState.{name}: this state was donated to a step, which has reused its memory. "
                "Use the state that the step returned, keep a copy with ft.tree.clone(state) before the "
                "call, or do not donate."
            )
        raise AttributeError(f"'TrainState' object has no attribute {name!r}")


_STATE_FIELDS = frozenset(each.name for each in dataclasses.fields(TrainState))


def consume(state: TrainState) -> None:
    """Mark a state as donated: any later access to its fields raises `ConsumedError`."""
    vars(state).clear()


def mark_donatable(state: TrainState) -> TrainState:
    """Mark a state as the only owner of its tensors, so that they can be donated without a copy; return it."""
    # By identity: copying the state copies the mark as well.
    vars(state)["_owner"] = id(state)
    return state


def is_donatable(state: TrainState) -> bool:
    """Return whether a state is marked as the only owner of its tensors."""
    return vars(state).get("_owner") == id(state)


LossOutput: TypeAlias = tuple[Mean, Metrics, PyTree]
"""``(loss, metrics, buffers)``."""


class LossFn(Protocol):
    """A loss function in its full form. Users write shorter ones, which `ftrain.step.loss_forms.adapt` converts."""

    def __call__(self, params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        """Return the loss, further metrics, and the buffers for the next step. `rng` is a key, or None."""
        ...


class Adapters(Protocol):
    """Parameters that a wrapper such as `lora` adds to a model, and how they change its modules."""

    def added(self, params: PyTree, frozen: PyTree, key: Tensor) -> tuple[PyTree, PyTree]:
        """Return the trainable and the frozen parameters with adapters added, initialised from `key`."""
        ...

    def slots(self, part: nn.Module) -> Sequence[Any]:
        """Return the slots of the adapters in a submodule, each a `ftrain.step.swap_params.Slot`."""
        ...


@dataclass(frozen=True)
class LossRanks:
    """The ranks that evaluate a loss together, each on its examples.

    Args:
        rank: the number of this one.
        size: how many they are.
        sum: ``tensor -> tensor``, its sum over them.
        digest: ``tree -> number``, which tells batches apart.
        whole_batches: whether all read the same batches, or each has examples of its own.
        by_block: ``divided state -> (this rank's parts, context)``; the loss takes these and gathers block by block.
    """

    rank: int
    size: int
    sum: Callable[[Tensor], Tensor]
    digest: Callable[[PyTree], int]
    whole_batches: bool = True
    by_block: Callable[[TrainState], tuple[TrainState, AbstractContextManager[None]]] | None = None


@dataclass(frozen=True)
class Loss:
    """A loss function, and the properties of it that steps and wrappers use.

    Args:
        fn: the loss function in its full form.
        name: of the function or the module.
        scope: ``training -> context`` in which the loss is differentiated, outside of any graph; `training` is False
            in an evaluation.
        module: the `torch.nn.Module` that `fn` calls, if any.
        initial: ``() -> (params, buffers, names of the parameters that train)``, those of the module, which share its
            memory; no names: the caller chooses.
        needs_rng: whether `fn` draws random numbers, from the key `rng`.
        adapters: the parameters that a wrapper has added, if any.
        narrow: the 16-bit or 8-bit dtype in which a wrapper makes it compute, as `with_amp` names it; "" if none does.
        products: the name of the wrapper that sets the precision of its float32 matrix products; "" if none does.
        wrapper_texts: of the wrappers that it has in the description of a step, the innermost first.
        ranks: those that evaluate it together; None for one that every rank evaluates on all examples.
    """

    fn: LossFn
    name: str
    scope: Callable[[bool], AbstractContextManager[Any]] = nullcontext
    module: nn.Module | None = None
    initial: Callable[[], tuple[PyTree, PyTree, set[str] | None]] = lambda: ({}, {}, None)
    needs_rng: bool = False
    adapters: Adapters | None = None
    narrow: str = ""
    products: str = ""
    wrapper_texts: tuple[str, ...] = ()
    ranks: LossRanks | None = None

    @functools.cached_property
    def text(self) -> str:
        """Its text in the description of a step, with its wrappers."""
        return " <- ".join([self.name, *self.wrapper_texts])


@tree_class
@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients that a `GradFn` returns, with the results of the forward pass.

    Args:
        grads: gradient of the mean loss, a tree like the parameters.
        loss: the loss as a `Mean`, detached.
        metrics: what else the loss reported; `Mean` or tensor, detached.
        buffers: the buffers after the forward pass.
        finite: 0-d bool, whether the loss and every raw gradient are finite; None where it was not asked for.
        stream_grads: ``take -> None``, for an update that takes gradients one by one: runs the backward pass and calls
            ``take(index, gradient)`` for each leaf of the parameters when its gradient is complete; `grads` is None.
        accept: 0-d bool, whether the update may be made; None: it may. Read when a wrapper of the gradient has
            `OnGrad.may_refuse_updates`.
        slots: new values of slots, by the names of their wrappers, stored whether or not the update is made.
        accepted_slots: the same, stored only if the update is made.
    """

    grads: PyTree
    loss: Mean
    metrics: Metrics
    buffers: PyTree
    finite: Tensor | None = None
    stream_grads: Callable[[Callable[[int, Tensor], None]], None] | None = field(default=None, metadata=STATIC)
    accept: Tensor | None = None
    slots: dict[str, PyTree] = field(default_factory=dict)
    accepted_slots: dict[str, PyTree] = field(default_factory=dict)


GradFn: TypeAlias = Callable[[TrainState, PyTree, Tensor | None], Gradients]
"""``(state, batch, rng) -> Gradients``."""


class UpdateFn(Protocol):
    """Updates the parameters: ``(state, gradients, hyper) -> state``."""

    def __call__(self, state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
        """Return the updated state; if `donate`, it may reuse the memory of the tensors of `state`."""
        ...


class Core(Protocol):
    """The part of a step that can be compiled: all of it but `TrainState.step` and `TrainState.rng`."""

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Hyper, rng: Tensor | None
    ) -> tuple[TrainState, Metrics]:
        """Return the next state and the metrics."""
        ...


@dataclass(frozen=True)
class Optimizer:
    """An optimizer: a pair of pure functions, and the schedules that they read.

    Args:
        init: ``params -> opt_state``.
        update: ``(grads, opt_state, params, hyper, donate=) -> (params, opt_state)``.
        schedules: name -> schedule; evaluated on the host at each step and passed to `update` as `hyper`.
        text: its text in the description of a step.
        needs_rng: whether `update` draws random numbers, from the key ``hyper["rng"]``.
        factors: ``opt_state -> {name: 0-d tensor on the CPU}``: factors by which the scheduled values of these names
            are multiplied on the host.
        split: ``(params, parts) -> optimizers``: for each list of indices of leaves, one that takes these as a dict by
            name, with the bits and the names in its state that they have among all; None if that cannot be.
        offloaded: None; or for a state that is kept on the host or in files and copied to the device in parts, so that
            `update` cannot be part of a graph: ``transform -> optimizer``, the same for a transformed optimizer.
        name: of the factory, such as ``"adamw"``; empty for one that is made of others.
        by_element: whether each element is updated from its own gradient and state alone, and leaves of the state are
            0-d or of the shapes of parameters: ranks then update parts of a leaf, and else one all of it, by `split`.
        options: numbers and texts by name, also those that `text` leaves out; ranks compare them.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
    schedules: Mapping[str, Schedule]
    text: str
    needs_rng: bool = False
    factors: Callable[[PyTree], Mapping[str, Tensor]] | None = None
    split: Callable[[PyTree, Sequence[Sequence[int]]], list[Optimizer]] | None = None
    offloaded: Callable[[Callable[[Optimizer], Optimizer]], Optimizer] | None = None
    name: str = ""
    by_element: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


class Runner(Protocol):
    """Calls a `Core`, eagerly or compiled, with the scheduled values and the key that the host has computed."""

    @property
    def text(self) -> str:
        """Its text in the description of a step."""
        ...

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], words: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        """Return the next state, whose `step` and `rng` the caller sets, and the metrics; `words` are the key's."""
        ...
