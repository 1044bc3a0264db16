"""The types that the package is built from: the training state, the weighted mean, and the functions of a step.

A training step ``(state, batch) -> (state, metrics)`` consists of four functions: a `LossFn`, a `GradFn`, an `UpdateFn`
and the step itself (a `Core` on tensors, called by a `Runner`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import optree
from torch import Tensor, nn

from ftrain.errors import ConsumedError, LossError, StructureError

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
"""Metadata of a dataclass field that belongs to the structure of a tree and is not one of its children."""

T = TypeVar("T")

TREE_CLASSES: dict[str, Callable[[Mapping[str, Any], Sequence[Any]], Any]] = {}
"""Tag of a registered class -> function that returns an instance from its fields by name and its static values."""


def tree_tag(cls: type) -> str:
    """Return the tag of a registered class, which stands for it in checkpoints.

    That of a class of ftrain is its name alone, since the class may move to another module.
    """
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return cls.__name__
    return f"{cls.__module__}.{cls.__qualname__}"


def tree_class(cls: type[T]) -> type[T]:
    """Register a dataclass as a tree whose children are its fields, except those with the metadata `STATIC`.

    A decorator, to be put above ``@dataclass``. Raises a StructureError, when a tree is read, for other fields.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    child_names = tuple(field.name for field in fields if not field.metadata.get("static"))
    static_names = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        static = tuple([getattr(node, name) for name in static_names])
        return tuple([getattr(node, name) for name in child_names]), static, child_names

    def unflatten(static: tuple[Any, ...], children: Iterable[Any]) -> Any:
        return cls(**dict(zip(child_names, children, strict=True)), **dict(zip(static_names, static, strict=True)))

    def restore(children: Mapping[str, Any], static: Sequence[Any]) -> Any:
        if children.keys() != set(child_names) or len(static) != len(static_names):
            raise StructureError(f"{cls.__name__} has the fields {', '.join(child_names)}; found {', '.join(children)}")
        return cls(**children, **dict(zip(static_names, static, strict=True)))

    TREE_CLASSES[tree_tag(cls)] = restore
    optree.register_pytree_node(
        cls,  # type: ignore[arg-type]
        flatten,
        unflatten,  # type: ignore[arg-type]
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )
    return cls


def replace(record: T, **changes: Any) -> T:
    """`dataclasses.replace` without a call of ``__init__`` or ``__post_init__``, in a third of the time."""
    new = object.__new__(type(record))
    values = vars(new)
    # Only the fields: the mark that `mark_donatable` sets on a state does not apply to a changed one.
    for name in type(record).__dataclass_fields__:  # type: ignore[attr-defined]
        values[name] = changes[name] if name in changes else getattr(record, name)
    return new


@tree_class
@dataclass(frozen=True, eq=False)
class Mean:
    """A weighted mean, ``total / weight``, that can be accumulated.

    The sums of totals and weights over microbatches, batches or devices give the exact mean over all of them, however
    unevenly the weight is distributed.

    A mean with weight 0 contributes nothing: steps and evaluations replace its total by 0, even if it is NaN, and its
    gradient is 0. (A loss that divides by its weight still has NaN in the gradient: mask before dividing.)

    Args:
        total: 0-d tensor, the weighted sum.
        weight: 0-d tensor, the sum of the weights (such as the number of tokens or examples); not differentiated.
        plain: whether the loss returned a number without a weight; an evaluation weights it by the batch's length.

    >>> import torch
    >>> a, b = Mean(torch.tensor(6.0), torch.tensor(3.0)), Mean(torch.tensor(2.0), torch.tensor(1.0))
    >>> float(a.pooled(b))
    2.0
    """

    total: Tensor
    weight: Tensor
    plain: bool = field(default=False, metadata=STATIC)

    @property
    def value(self) -> Tensor:
        """``total / weight`` as a 0-d tensor; NaN if both are 0."""
        return self.total / self.weight

    def pooled(self, other: Mean) -> Mean:
        """Return the mean over the examples of both."""
        return Mean(self.total + other.total, self.weight + other.weight, self.plain and other.plain)

    def __add__(self, other: object) -> NoReturn:
        raise LossError(
            "Mean: there is no arithmetic with a Mean, because a sum of two is no mean over the examples of both; "
            "compute with a.value + c * b.value, or return Mean(a.total + c * b.value * a.weight, a.weight), and "
            "Mean(c * a.total, a.weight) for a multiple. To pool parts of a data set: a.pooled(b)"
        )

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__

    def __float__(self) -> float:
        return float(self.value.detach())

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


@tree_class
@dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """The whole state of a run as one explicit tree. A step depends on this and on the batch, and on nothing else.

    Args:
        step: 0-d int64 tensor on the CPU; the number of calls of the step so far, including skipped updates.
        params: the trainable parameters.
        frozen: parameters that the loss reads and no step changes; None if there are none.
        buffers: tensors that the loss reads and replaces in each step (such as running statistics).
        opt_state: the state of the optimizer, any tree.
        slots: the states of the wrappers by their names.
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

    def __copy__(self) -> TrainState:
        return copy.deepcopy(self)  # The tensors of a state are overwritten when it is donated.

    def __getattr__(self, name: str) -> NoReturn:
        # Python calls this only when the attribute is missing, so it costs nothing for a state that was not donated.
        if name in type(self).__dataclass_fields__:
            raise ConsumedError(
                f"TrainState.{name}: this state, or one whose memory it shares, was donated to a step, which has "
                "reused it. Use the state that the step returned, keep a copy with ft.tree.clone(state) before the "
                "call, or do not donate."
            )
        raise AttributeError(f"'TrainState' object has no attribute {name!r}")


DERIVED: WeakKeyDictionary[TrainState, WeakSet[TrainState]] = WeakKeyDictionary()
"""State -> the states that share tensors with it, and are consumed with it."""


def consume(state: TrainState) -> None:
    """Mark a state as donated: any later access to its fields raises `ConsumedError`."""
    for derived in DERIVED.pop(state, ()):
        consume(derived)
    vars(state).clear()


def mark_donatable(state: TrainState) -> TrainState:
    """Mark a state as the only owner of its tensors, and return it. A step may donate them without a copy."""
    vars(state)["_owner"] = id(state)  # The mark is not valid for another state with the same attributes.
    return state


def is_donatable(state: TrainState) -> bool:
    """Whether a state is marked as the only owner of its tensors."""
    return vars(state).get("_owner") == id(state)


LossOutput: TypeAlias = tuple[Mean, Metrics, PyTree]
"""``(loss, metrics, buffers)``."""


class LossFn(Protocol):
    """A loss function in its full form; `ftrain.step.loss_forms.adapt` converts the shorter forms of users to it."""

    def __call__(self, params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
        """Return the loss, further metrics, and the buffers for the next step. `rng` is a key, or None."""


class Adapters(Protocol):
    """The parameters that a wrapper such as `lora` adds to a model."""

    def added(self, params: PyTree, frozen: PyTree, key: Tensor) -> tuple[PyTree, PyTree]:
        """Return the trainable and the frozen parameters with adapters added, initialised from `key`."""

    def slots(self, part: nn.Module) -> Sequence[Any]:
        """Return the `ftrain.step.swap_params.Slot` of each adapter in a submodule."""


@dataclass(frozen=True)
class LossRanks:
    """The `size` ranks that evaluate a loss together, each on its examples.

    Args:
        rank: the rank of this process.
        sum: ``tensor -> tensor``, an all-reduce.
        digest: ``tree -> int``, a hash that differs between batches.
        whole_batches: whether all ranks read the same batches; else each reads its own examples.
        by_block: ``divided state -> (local state, context)``; within the context the loss takes the local state and
            gathers its parameters block by block.
    """

    rank: int
    size: int
    sum: Callable[[Tensor], Tensor]
    digest: Callable[[PyTree], int]
    whole_batches: bool = True
    by_block: Callable[[TrainState], tuple[TrainState, AbstractContextManager[None]]] | None = None


@dataclass(frozen=True, repr=False)
class Loss:
    """A loss function, and the properties of it that steps and wrappers use.

    Args:
        name: the name of the function or the module.
        scope: ``training -> context`` in which the loss and its gradient are computed, outside of any graph; `training`
            is False in an evaluation.
        module: the `torch.nn.Module` that `fn` calls, or None.
        initial: ``() -> (params, buffers, names of the trainable parameters)`` of the module, which share its memory.
            The names are None if there is no module.
        needs_rng: whether `fn` draws random numbers from the key `rng`.
        adapters: the parameters that a wrapper has added, or None.
        narrow: the name of the 16-bit or 8-bit dtype in which a wrapper runs the loss, as in `with_amp`; "" if none.
        matmul_precision: the text of the wrapper that sets the precision of float32 matrix products; "" if none.
        wrapper_texts: the texts of its wrappers, the innermost first.
        ranks: the ranks that evaluate it together; None if every rank evaluates it on all examples.
        on_compiled: ``fn -> fn``, applied to `fn` after `torch.compile`: its module then keeps the tensors of a run
            until the end of `scope`, as it does for a loss that is not compiled.
    """

    fn: LossFn
    name: str
    scope: Callable[[bool], AbstractContextManager[Any]] = nullcontext
    module: nn.Module | None = None
    initial: Callable[[], tuple[PyTree, PyTree, set[str] | None]] = lambda: ({}, {}, None)
    needs_rng: bool = False
    adapters: Adapters | None = None
    narrow: str = ""
    matmul_precision: str = ""
    wrapper_texts: tuple[str, ...] = ()
    ranks: LossRanks | None = None
    on_compiled: Callable[[LossFn], LossFn] = lambda fn: fn

    @functools.cached_property
    def text(self) -> str:
        """Its name and its wrappers, for `print`."""
        return " <- ".join([self.name, *self.wrapper_texts])

    def __repr__(self) -> str:
        return self.text


@tree_class
@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients that a `GradFn` returns, with the results of the forward pass.

    Args:
        grads: gradient of the mean loss, a tree like the parameters.
        loss: the loss as a `Mean`, detached.
        metrics: the other metrics of the loss; `Mean` or tensor, detached.
        buffers: the buffers after the forward pass.
        finite: 0-d bool, whether the loss and every unscaled gradient are finite; None if no wrapper needs it.
        stream_grads: ``take -> None``, for an update that takes gradients one by one: runs the backward pass and calls
            ``take(index, gradient)`` for each leaf of the parameters when its gradient is complete; `grads` is None.
        accept: 0-d bool, whether to apply the update. Default None: apply it. Only read if a wrapper of the gradient
            has `OnGrad.may_refuse_updates`.
        slots: new values of slots by the names of their wrappers, stored whether or not the update is applied.
        accepted_slots: the same, stored only if the update is applied.
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


Core: TypeAlias = Callable[[TrainState, PyTree, Hyper, Tensor | None], tuple[TrainState, Metrics]]
"""``(state, batch, hyper, rng) -> (state, metrics)``: the part of a step that can be compiled, without
`TrainState.step` and `TrainState.rng`."""


@dataclass(frozen=True, repr=False)
class Optimizer:
    """An optimizer: a pair of pure functions, and the schedules that they read.

    Args:
        init: ``params -> opt_state``.
        update: ``(grads, opt_state, params, hyper, donate=) -> (params, opt_state)``.
        schedules: name -> schedule; evaluated on the host at each step and passed to `update` as `hyper`.
        text: the name and the options, for `print`.
        needs_rng: whether `update` draws random numbers from the key ``hyper["rng"]``.
        factors: ``opt_state -> {name: 0-d tensor on the CPU}``: the scheduled values of these names are multiplied by
            these factors on the host.
        split: ``(params, parts) -> optimizers``: for each list of indices of leaves, an optimizer that takes these
            leaves as a dict by name. Its updates and the names in its state are those of the whole optimizer. None if
            it cannot be split. An optimizer with another `update` needs another `split`, on ranks for example.
        offloaded: None if the state is on the device. If it is on the host or in files, so that `update` cannot be
            part of a graph: ``transform -> optimizer``, the same for a transformed optimizer.
        name: the name of the factory, such as ``"adamw"``; empty for a combination of optimizers.
        by_element: whether each element is updated from its own gradient and state alone, and leaves of the state are
            0-d or have the shapes of parameters. Ranks then update shards of a leaf, and else whole leaves by `split`.
        options: numbers and texts by name, including those that `text` omits; ranks compare them.
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

    def __repr__(self) -> str:
        return self.text


class Runner(Protocol):
    """Calls a `Core`, eagerly or compiled, with the scheduled values and the key data that the host has computed."""

    @property
    def text(self) -> str:
        """Its name and options, for `print`."""

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Mapping[str, float], key_data: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        """Return the next state, whose `step` and `rng` the caller sets, and the metrics."""
