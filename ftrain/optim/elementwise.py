"""Make an optimizer from the formula of its family: in place in eager mode, many leaves at a time, and in graphs.

A formula is written once, with the methods of a tensor. Eagerly it gets a `Column`, which passes each operation on
to torch's kernels for many tensors; inside a graph it gets one leaf after another, and the compiler fuses them. What
it writes is always its own: the old state where that was donated, else a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch, backends, tree
from ftrain.errors import DeviceError, OptionError, StructureError, require_range
from ftrain.optim.grouping import Group, Plan, Planner, copies, like, pick, settled
from ftrain.optim.schedules import as_schedule
from ftrain.optim.state_dtype import Lifted, Storage
from ftrain.tree.name_patterns import Mask, as_select, everything, require_matches
from ftrain.types import RNG, Hyper, Optimizer, PyTree, Schedule

Number: TypeAlias = Tensor | float
"""A float in eager mode; a 0-d tensor where it comes from the state, or inside a graph."""

Some: TypeAlias = Any
"""A tensor, or a `Column`: what formulas are written for."""

COUNT, NONE = "count", torch.zeros(())
"""Name of the 0-d state that counts updates, and what it begins as: float32, as torch's kernels want it."""


class Column:
    """Tensors of one dtype and device that take every operation together.

    A method of it is torch's function for many tensors: ``a.lerp_(b, 0.1)`` is ``torch._foreach_lerp_(a, b, 0.1)``.
    It has no operators, which would allocate where a formula means to write. In graphs, where a compiler fuses what it
    sees of each tensor, it is the method of one after another.
    """

    __slots__ = ("eager", "tensors")

    def __init__(self, tensors: list[Tensor], *, eager: bool = True) -> None:
        self.tensors, self.eager = tensors, eager

    def __getattr__(self, name: str) -> Callable[..., Column]:
        function = getattr(torch, f"_foreach_{name}") if self.eager else partial(_one_by_one, name)

        def apply(*others: Some, **constants: float) -> Column:
            found = function(self.tensors, *[getattr(other, "tensors", other) for other in others], **constants)
            return self if name.endswith("_") else self.like(list(found))

        return apply

    def like(self, tensors: list[Tensor]) -> Column:
        """Return a column of other tensors."""
        return Column(tensors, eager=self.eager)


def _one_by_one(name: str, tensors: list[Tensor], *others: Any, **constants: float) -> list[Tensor]:
    columns = [other if isinstance(other, list) else [other] * len(tensors) for other in others]
    return [getattr(tensor, name)(*each, **constants) for tensor, *each in zip(tensors, *columns, strict=True)]


@dataclass(slots=True)
class Part:
    """Leaves of one dtype and device, or a single one, and what belongs to them.

    Args:
        leaf: the parameters, to be written.
        grad: their gradients, not to be written.
        state: the moments by name, to be written.
        decay: whether weight decay applies.
        like: any of the leaves.
    """

    leaf: Some
    grad: Some
    state: Mapping[str, Some]
    decay: bool
    like: Tensor

    def descent(self, *, maximize: bool = False, l2: float = 0.0) -> Some:
        """The gradient of what is made small: that of minus the loss to `maximize` it, and of L2 weight decay."""
        grad = self.grad.neg() if maximize else self.grad
        return grad.add(self.leaf, alpha=l2) if l2 and self.decay else grad


class Columns(NamedTuple):
    """The leaves of a tree, their gradients, and the moments by name."""

    leaves: list[Tensor]
    grads: list[Tensor]
    moments: Mapping[str, list[Tensor]]


Rule: TypeAlias = Callable[..., None]
"""``(part, *constants)``: update one part in place."""

Constants: TypeAlias = Callable[[Number, Mapping[str, Tensor]], tuple[Number, ...]]
"""``(rate, shared) -> constants``: what all leaves share; may write the 0-d tensors of the state."""

Fused: TypeAlias = Callable[[Part, float, Mapping[str, Tensor]], None]
"""``(part, rate, shared)``: update one part, of lists of tensors, in place with one of torch's fused kernels."""


def leafwise(
    name: str,
    lr: float | Schedule,
    rule: Rule,
    *,
    state: Mapping[str, Callable[[Tensor], Tensor]],
    shared: Mapping[str, Tensor] | None = None,
    constants: Constants | None = None,
    fused: Fused | None = None,
    half: bool = True,
    foreach: bool = True,
    alike: bool = False,
    storage: Storage | None = None,
    weight_decay: float,
    decay_mask: Mask,
    options: Mapping[str, float | bool] | None = None,
) -> Optimizer:
    """Return the optimizer of a formula.

    Args:
        name: of the family.
        lr: learning rate, a number or a schedule.
        rule: the formula.
        state: the moments by name, and what each begins as for a leaf.
        shared: the 0-d tensors of the state by name, and what they begin as; `COUNT` counts the updates.
        constants: works out what the rule needs of these and the rate; the rate alone, unless given.
        fused: the formula as a kernel of torch's; used eagerly where leaves and device allow.
        half: whether that kernel is right in 16 bits.
        foreach: whether the rule takes many leaves at a time in eager mode.
        alike: the rule takes all leaves of one shape at a time, in graphs too.
        storage: how parameters and moments are stored, where that is not as they are computed; the rule then works
            element by element, and writes vectors.
        weight_decay: applied by the rule itself; where it is 0, the mask does not part the leaves into groups.
        decay_mask: which leaves decay.
        options: what else is printed, where it is not zero or false.

    Raises:
        OptionError: for a negative learning rate, or no mask; at `init`, for a pattern that matches nothing.
    """
    if isinstance(lr, int | float) and lr < 0:
        require_range(name, "lr", lr, 0.0)
    schedule, decays = as_schedule(lr), as_select(f"{name}: decay_mask", decay_mask)
    family = _Family(name, rule, state, shared or {}, constants, fused, foreach, alike, storage)
    mask, align = decays if weight_decay else everything, storage.align if storage else 0
    planner = Planner(mask, half=half, align=align, alike=alike)

    def init(params: PyTree) -> PyTree:
        require_matches(decays, params)
        return family.init(params)

    def apart(params: PyTree, parts: Sequence[Sequence[int]]) -> list[Optimizer]:
        planners = planner.among(params, len(parts))
        return [replace(whole, init=family.init, update=partial(family.update, each)) for each in planners]

    shown = {**(options or {}), "weight_decay": weight_decay}
    texts = [key if value is True else f"{key}={value:g}" for key, value in shown.items() if value]
    text = f"{name}({', '.join([repr(schedule), *texts, *(storage.shown if storage else ())])})"
    draws = storage is not None and storage.stochastic
    update = partial(family.update, planner)
    whole = Optimizer(init, update, {"lr": schedule}, text, needs_rng=draws, apart=apart, name=name)
    return whole


@dataclass(frozen=True)
class _Family:
    """What `leafwise` was told of a formula, and how it is applied."""

    name: str
    rule: Rule
    state: Mapping[str, Callable[[Tensor], Tensor]]
    shared: Mapping[str, Tensor]
    constants: Constants | None
    fused: Fused | None
    foreach: bool
    alike: bool
    storage: Storage | None

    def init(self, params: PyTree) -> PyTree:
        device = next((leaf.device for leaf in tree.leaves(params)), NONE.device)
        exact = any(value.dtype == torch.float64 for value in self.shared.values())
        if exact and backends.widest(device) != torch.float64:
            raise DeviceError(
                f"{self.name}: sums weights in float64, and {backends.of(device).describe()} has none; take another "
                "optimizer"
            )
        scalars = {key: value.to(device, copy=True) for key, value in self.shared.items()}
        if self.storage:
            return {**scalars, **self.storage.begin(self.state, params)}
        return {**scalars, **{key: tree.map(begin, params) for key, begin in self.state.items()}}

    def update(
        self, planner: Planner, grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        names = self.storage.names if self.storage else [*self.state]
        _require_state(self.name, opt_state, {*self.shared, *names})
        (leaves, gradients, *moments), spec = planner.columns(params, grads, *[opt_state[key] for key in names])
        plan = planner.of(spec, leaves, gradients, *moments)
        scalars = {key: opt_state[key] for key in self.shared}
        donate = donate and plan.writable
        if not donate:
            leaves, *moments = [copies(column) for column in (leaves, *moments)]
            scalars = {key: value.clone() for key, value in scalars.items()}
        self._write(plan, Columns(leaves, gradients, dict(zip(names, moments, strict=True))), scalars, hyper)
        if donate:
            return params, opt_state
        params, _, *trees = tree.unflatten(spec, list(itertools.chain(leaves, gradients, *moments)))
        return params, {**scalars, **dict(zip(names, trees, strict=True))}

    def _write(self, plan: Plan, mine: Columns, scalars: Mapping[str, Tensor], hyper: Hyper) -> None:
        rate = hyper["lr"]
        eager = not isinstance(rate, Tensor)
        if COUNT in scalars:
            scalars[COUNT].add_(1)
        kernel = self.fused if eager and plan.fusible else None
        if eager and not plan.aligned and (self.storage or kernel):
            mine = mine._replace(grads=like(mine.grads, mine.leaves))
        vectors = None
        if self.storage:
            vectors = self.storage.lifted(plan, *mine, _key(self.name, self.storage, hyper), eager=eager)
        if kernel is not None:
            for part in _lifted(list, vectors) if vectors else _parts(pick, plan.groups, mine):
                kernel(part, rate, scalars)
            return
        constants = (rate,) if self.constants is None else _settle(self.constants(rate, scalars), rate)
        if eager:
            constants = tuple(map(_number, constants))
        cast, together = _caster(constants), self.foreach and eager
        if self.alike or together:
            parts = _parts(partial(_column, eager), plan.blocks, mine)
        else:
            parts = _singles(plan.decays, mine)
        if vectors:
            parts = _lifted(Column if together else _single, vectors)
        for part in parts:
            self.rule(part, *cast(part.like))


def _require_state(name: str, opt_state: PyTree, keys: set[str]) -> None:
    if not isinstance(opt_state, Mapping) or opt_state.keys() != keys:
        found = ", ".join(map(str, opt_state)) if isinstance(opt_state, Mapping) else type(opt_state).__name__
        raise StructureError(
            f"{name}: the optimizer state has {found or 'nothing'}, needs {', '.join(sorted(keys)) or 'nothing'}; "
            "it is of another optimizer, or of this one with other options"
        )


def _settle(values: tuple[Number, ...], rate: Number) -> tuple[Number, ...]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not isinstance(rate, Tensor) or not tensors:
        return values
    stored = iter(settled(*(value.to(rate.dtype) for value in tensors)))
    return tuple(next(stored) if isinstance(value, Tensor) else value for value in values)


def _number(value: Number) -> Number:
    """Return the number that a constant is, where that is to wait for nothing; kernels take it as it is."""
    if not isinstance(value, Tensor) or torch.compiler.is_compiling() or not backends.of(value.device).immediate:
        return value
    # In a graph it would be a constant, and a batch of them is no number.
    if _torch.is_capturing() or _torch.is_transformed(value):
        return value
    # Without a value, any will do.
    return 1.0 if _torch.is_fake(value) else value.item()


def _caster(values: tuple[Number, ...]) -> Callable[[Tensor], tuple[Number, ...]]:
    """Return what puts the constants into the dtype and onto the device of a leaf, once for each of these."""
    found: dict[tuple[torch.dtype, torch.device], tuple[Number, ...]] = {}

    def cast(leaf: Tensor) -> tuple[Number, ...]:
        kind = leaf.dtype, leaf.device
        if kind not in found:
            found[kind] = tuple(
                value.to(leaf.device, leaf.dtype) if isinstance(value, Tensor) else value for value in values
            )
        return found[kind]

    return cast


def _parts(make: Callable[[list[int], list[Tensor]], Some], groups: list[Group], mine: Columns) -> Iterator[Part]:
    for indices, decay in groups:
        moments = {key: make(indices, column) for key, column in mine.moments.items()}
        yield Part(make(indices, mine.leaves), make(indices, mine.grads), moments, decay, mine.leaves[indices[0]])


def _key(name: str, storage: Storage, hyper: Hyper) -> Tensor | None:
    if storage.stochastic and RNG not in hyper:
        raise OptionError(f"{name}: stochastic rounding needs a key, hyper[{RNG!r}], as a step gives; found none")
    return hyper[RNG] if storage.stochastic else None


def _lifted(make: Callable[[list[Tensor]], Some], vectors: Iterator[Lifted]) -> Iterator[Part]:
    """Parts of vectors, leaf by leaf: kernels may round the last elements of a vector otherwise than those before."""
    for leaf, grad, moments, sizes, decay in vectors:
        state = {key: make(list(moment.split_with_sizes(sizes))) for key, moment in moments.items()}
        pieces = [make(list(vector.split_with_sizes(sizes))) for vector in (leaf, grad)]
        yield Part(pieces[0], pieces[1], state, decay, leaf)


def _single(leaves: list[Tensor]) -> Tensor:
    (leaf,) = leaves
    return leaf


def _column(eager: bool, indices: list[int], leaves: list[Tensor]) -> Column:
    return Column(pick(indices, leaves), eager=eager)


def _singles(decays: list[bool], mine: Columns) -> Iterator[Part]:
    for index, (leaf, grad, decay) in enumerate(zip(mine.leaves, mine.grads, decays, strict=True)):
        yield Part(leaf, grad, {key: column[index] for key, column in mine.moments.items()}, decay, leaf)


# What formulas are made of.


def require_ranges(function: str, high: float = float("inf"), **values: float) -> None:
    """Check that constants lie in [0, `high`).

    Raises:
        OptionError: naming the function, the argument, its value and the range.
    """
    for name, value in values.items():
        require_range(function, name, value, 0.0, high)


def average(mean: Some, grad: Some, decay: float) -> Some:
    """``mean <- decay mean + (1 - decay) grad``, in place."""
    return mean.lerp_(grad, 1 - decay)


def average_squares(mean: Some, grad: Some, decay: float) -> Some:
    """``mean <- decay mean + (1 - decay) grad^2``, in place."""
    return mean.mul_(decay).addcmul_(grad, grad, value=1 - decay)


def descend(leaf: Some, step: Some, rate: Number) -> Some:
    """``leaf <- leaf - rate step``, in place; the rate may be a tensor."""
    if not isinstance(rate, Tensor):
        return leaf.add_(step, alpha=-rate)
    return leaf.addcmul_(step, each, value=-1) if (each := _each(leaf, rate)) else leaf.sub_(step.mul(rate))


def approach(leaf: Some, other: Some, share: Number) -> Some:
    """``leaf <- leaf + share (other - leaf)``, in place; the share may be a tensor."""
    if not isinstance(share, Tensor):
        return leaf.lerp_(other, share)
    return leaf.lerp_(other, each) if (each := _each(leaf, share)) else leaf.add_(other.sub(leaf).mul_(share))


def combine(leaf: Some, other: Some, share: Number) -> Some:
    """``leaf + share other``, of new memory."""
    if not isinstance(share, Tensor):
        return leaf.add(other, alpha=share)
    return leaf.addcmul(other, each) if (each := _each(leaf, share)) else other.mul(share).add_(leaf)


def _each(column: Some, value: Tensor) -> Column | None:
    """A tensor for each of many, where torch takes these one after another anyway: one pass for two or three."""
    if not isinstance(column, Column) or not column.eager or backends.of(column.tensors[0].device).caches_memory:
        return None
    return Column([value] * len(column.tensors))


def descend_quotient(leaf: Some, step: Some, denominator: Some, rate: Number) -> Some:
    """``leaf <- leaf - rate step / denominator``, in place; the rate may be a tensor.

    The rate goes to the step: divided into the denominator, a rate of zero would make 0 / 0.
    """
    if isinstance(rate, Tensor):
        return leaf.addcdiv_(step.mul(rate), denominator, value=-1)
    return leaf.addcdiv_(step, denominator, value=-rate)
