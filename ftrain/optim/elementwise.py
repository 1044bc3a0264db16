"""Make an optimizer from a formula, which is written once, with the in-place methods of a tensor.

In eager mode the formula gets a `Column`, which calls torch's kernels for many tensors; in a graph it gets one leaf
after another, and the compiler fuses the operations. It writes to the old state if that was donated, else to a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch, backends, tree
from ftrain.errors import DeviceError, OptionError, StructureError, require_range
from ftrain.optim.column import Column, Some
from ftrain.optim.grouping import Group, Plan, Planner
from ftrain.optim.schedules import as_schedule
from ftrain.optim.state_dtype import Storage, Vectors
from ftrain.tree.name_patterns import Mask, as_select, everything, require_matches
from ftrain.types import RNG, Hyper, Optimizer, PyTree, Schedule

Number: TypeAlias = Tensor | float
"""A float in eager mode; a 0-d tensor if it comes from the state, or in a graph."""

COUNT, ZERO_COUNT = "count", torch.zeros((), dtype=torch.float32, device=tree.HOST)
"""Name of the 0-d state that counts updates, and its initial value: float32, as torch's fused kernels need."""

REDUCED = 16
"""Number of elements of a reduction that Inductor does not unroll."""


@dataclass(slots=True)
class Part:
    """Leaves of one dtype and device, or a single leaf, with their gradients and moments.

    Args:
        leaf: the parameters, which the formula writes.
        grad: their gradients, which it only reads.
        state: the moments by name, which it writes.
        decay: whether weight decay applies.
        like: one of the leaves.
    """

    leaf: Some
    grad: Some
    state: Mapping[str, Some]
    decay: bool
    like: Tensor

    def descent(self, *, maximize: bool = False, l2: float = 0.0) -> Some:
        """Return the gradient to descend: negated to `maximize` the loss, and with that of L2 weight decay."""
        grad = self.grad.neg() if maximize else self.grad
        return grad.add(self.leaf, alpha=l2) if l2 and self.decay else grad


Rule: TypeAlias = Callable[..., None]
"""``(part, *constants)``: update one part in place."""

Constants: TypeAlias = Callable[[Number, Mapping[str, Tensor]], tuple[Number, ...]]
"""``(rate, shared) -> constants``, the same for all leaves; may write the 0-d tensors of the state."""

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
    by_element: bool = False,
    storage: Storage | None = None,
    weight_decay: float,
    decay_mask: Mask,
    shown: Mapping[str, float | bool] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Return an optimizer that applies a formula.

    Args:
        name: name of the factory, such as ``"adamw"``.
        lr: learning rate, a number or a schedule.
        rule: the formula.
        state: the moments by name, as functions ``leaf -> initial value``.
        shared: the 0-d tensors of the state by name, with their initial values; `COUNT` counts the updates.
        constants: computes the further arguments of the rule. Default: the learning rate alone.
        fused: the formula as a fused kernel of torch; used in eager mode if leaves and device allow it.
        half: whether that kernel is correct in 16 bits.
        foreach: whether the rule takes many leaves at a time in eager mode.
        alike: whether the rule takes all leaves of one shape at a time, in graphs too.
        by_element: whether the rule updates each element by itself, so that ranks can update parts of a leaf.
        storage: how parameters and moments are stored, if in fewer bits than they are computed in; the rule must then
            be elementwise, and gets vectors.
        weight_decay: weight decay, applied by the rule itself; with 0, the mask does not split the leaves into groups.
        decay_mask: which leaves decay.
        shown: further options, which the text of the optimizer shows if they are not zero or false.
        options: further options, which it does not show. Ranks compare all options.

    Raises:
        OptionError: a negative learning rate or weight decay, or no mask; at `init`, a pattern that matches nothing.
    """
    if isinstance(lr, int | float) and lr < 0:
        require_range(name, "lr", lr, 0.0)
    require_range(name, "weight_decay", weight_decay, 0.0)
    schedule, decays = as_schedule(lr), as_select(f"{name}: decay_mask", decay_mask)
    names = storage.names if storage else [*state]
    family = _Family(name, rule, state, names, shared or {}, constants, fused, foreach, alike, storage)
    mask, align = decays if weight_decay else everything, storage.align if storage else 0
    planner = Planner(mask, half=half, align=align, alike=alike)

    def init(params: PyTree) -> PyTree:
        require_matches(decays, params)
        return family.init(params)

    def split(params: PyTree, parts: Sequence[Sequence[int]]) -> list[Optimizer]:
        planners = planner.of_parts(params, len(parts))
        return [replace(whole, init=family.init, update=partial(family.update, each)) for each in planners]

    shown = {**(shown or {}), "weight_decay": weight_decay}
    texts = [key if value is True else f"{key}={value:g}" for key, value in shown.items() if value]
    whole = Optimizer(
        init=init,
        update=partial(family.update, planner),
        schedules={"lr": schedule},
        text=f"{name}({', '.join([repr(schedule), *texts, *(storage.shown if storage else ())])})",
        needs_rng=storage is not None and storage.stochastic,
        split=split,
        name=name,
        by_element=by_element and (storage is None or storage.by_element),
        options={**shown, **(options or {})},
    )
    return whole


@dataclass(frozen=True)
class _Family:
    """A formula with the options of `leafwise`, and how it is applied; `names` are those of the trees in the state."""

    name: str
    rule: Rule
    state: Mapping[str, Callable[[Tensor], Tensor]]
    names: list[str]
    shared: Mapping[str, Tensor]
    constants: Constants | None
    fused: Fused | None
    foreach: bool
    alike: bool
    storage: Storage | None

    def init(self, params: PyTree) -> PyTree:
        device = next((leaf.device for leaf in tree.leaves(params)), ZERO_COUNT.device)
        exact = any(value.dtype == torch.float64 for value in self.shared.values())
        if exact and backends.widest(device) != torch.float64:
            raise DeviceError(
                f"{self.name}: needs float64, and {backends.of(device).describe()} has none; use another optimizer"
            )
        scalars = {key: value.to(device, copy=True) for key, value in self.shared.items()}
        if self.storage:
            return {**scalars, **self.storage.begin(self.state, params)}
        return {**scalars, **{key: tree.map(begin, params) for key, begin in self.state.items()}}

    def update(
        self, planner: Planner, grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        if not isinstance(opt_state, Mapping) or opt_state.keys() != {*self.shared, *self.names}:
            keys = opt_state if isinstance(opt_state, Mapping) else [type(opt_state).__name__]
            raise StructureError(
                f"{self.name}: the optimizer state has {', '.join(map(str, keys)) or 'nothing'}, needs "
                f"{', '.join(sorted([*self.shared, *self.names])) or 'nothing'}; it is the state of another optimizer, "
                "or of this one with other options"
            )
        plan, (leaves, gradients, *moments) = planner.plan(params, grads, *map(opt_state.__getitem__, self.names))
        if donate and plan.writable:
            self._write(plan, leaves, gradients, moments, opt_state, hyper)
            return params, opt_state
        leaves, *moments = [[*map(torch.clone, column)] for column in (leaves, *moments)]
        scalars = {key: opt_state[key].clone() for key in self.shared}
        self._write(plan, leaves, gradients, moments, scalars, hyper)
        trees = map(plan.spec.unflatten, moments)
        return plan.spec.unflatten(leaves), {**scalars, **dict(zip(self.names, trees, strict=True))}

    def _write(
        self,
        plan: Plan,
        leaves: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        scalars: Mapping[str, Tensor],
        hyper: Hyper,
    ) -> None:
        rate = hyper["lr"]
        eager = not isinstance(rate, Tensor)
        if COUNT in scalars:
            scalars[COUNT].add_(1)
        kernel = self.fused if eager and plan.fusible else None
        if eager and not plan.aligned and (self.storage or kernel):
            grads = _with_strides_of(leaves, grads)
        vectors = None
        if self.storage:
            stored, key = dict(zip(self.names, moments, strict=True)), _key(self.name, self.storage, hyper)
            vectors = self.storage.vectors(plan, leaves, grads, stored, key, eager=eager)
        columns = [leaves, grads, *moments]
        if kernel is not None:
            for part in _parts_of_vectors(list, vectors) if vectors else _parts(list, plan.groups, columns, self.names):
                kernel(part, rate, scalars)
            return
        constants = (rate,) if self.constants is None else _materialized(self.constants(rate, scalars), rate)
        if eager:
            constants = tuple(map(_number, constants))
        together = self.foreach and eager
        if vectors:
            parts = _parts_of_vectors(Column if together else _only, vectors)
        elif self.alike or together:
            parts = _parts(partial(Column, eager=eager), plan.blocks, columns, self.names)
        else:
            parts = _parts(_only, (([index], decay) for index, decay in enumerate(plan.decays)), columns, self.names)
        converted: dict[tuple[torch.dtype, torch.device], tuple[Number, ...]] = {}
        for part in parts:
            kind = part.like.dtype, part.like.device
            if kind not in converted:
                converted[kind] = tuple(_converted(value, *kind) for value in constants)
            self.rule(part, *converted[kind])


def _with_strides_of(leaves: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return gradients with the strides of their parameters, which fused kernels need."""
    return [
        grad if grad.stride() == leaf.stride() else torch.empty_like(leaf).copy_(grad)
        for grad, leaf in zip(grads, leaves, strict=True)
    ]


def _materialized(values: tuple[Number, ...], rate: Number) -> tuple[Number, ...]:
    """In a graph, keep a compiler from computing 0-d tensors again for every element that uses them.

    Inductor fuses cheap operations into the kernels that use them, and counts powers among these: an update
    of 8 million parameters took 6.5 ms instead of 3.0. It always stores the result of a reduction.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not isinstance(rate, Tensor) or not tensors:
        return values
    scalars = torch.stack([value.to(rate.dtype) for value in tensors])
    stored = iter(scalars.expand(REDUCED, len(scalars)).amax(0).unbind())
    return tuple(next(stored) if isinstance(value, Tensor) else value for value in values)


def _number(value: Number) -> Number:
    """Return a 0-d tensor as a number, which kernels take, if to read it does not wait for the device."""
    if not isinstance(value, Tensor) or torch.compiler.is_compiling() or not backends.of(value.device).immediate:
        return value
    # In a graph it would be a constant, and under vmap it is not one number.
    if _torch.is_capturing() or _torch.is_transformed(value):
        return value
    # A fake tensor has no value, and any number is right.
    return 1.0 if _torch.is_fake(value) else value.item()


def _converted(value: Number, dtype: torch.dtype, device: torch.device) -> Number:
    return value.to(device, dtype) if isinstance(value, Tensor) else value


def _parts(
    wrap: Callable[[list[Tensor]], Some], groups: Iterable[Group], columns: list[list[Tensor]], names: list[str]
) -> Iterator[Part]:
    """Yield the part of each group; `columns` are the leaves of the parameters, the gradients and each moment."""
    for indices, decay in groups:
        is_all = len(indices) == len(columns[0])
        leaf, grad, *moments = [wrap(column if is_all else [*map(column.__getitem__, indices)]) for column in columns]
        yield Part(leaf, grad, dict(zip(names, moments, strict=True)), decay, columns[0][indices[0]])


def _key(name: str, storage: Storage, hyper: Hyper) -> Tensor | None:
    if storage.stochastic and RNG not in hyper:
        raise OptionError(f"{name}: found no key for stochastic rounding; pass one as hyper[{RNG!r}], as a step does")
    return hyper[RNG] if storage.stochastic else None


def _parts_of_vectors(make: Callable[[list[Tensor]], Some], vectors: Iterator[Vectors]) -> Iterator[Part]:
    """Yield the parts of vectors, leaf by leaf: kernels may round the last elements of a vector differently."""
    for leaf, grad, moments, sizes, decay in vectors:
        state = {key: make(list(moment.split_with_sizes(sizes))) for key, moment in moments.items()}
        leaves, grads = (make(list(vector.split_with_sizes(sizes))) for vector in (leaf, grad))
        yield Part(leaves, grads, state, decay, leaf)


def _only(leaves: list[Tensor]) -> Tensor:
    (leaf,) = leaves
    return leaf


# Building blocks of formulas.


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
    return leaf.sub_(step.mul(rate)) if isinstance(rate, Tensor) else leaf.add_(step, alpha=-rate)


def approach(leaf: Some, other: Some, share: Number) -> Some:
    """``leaf <- leaf + share (other - leaf)``, in place; the share may be a tensor."""
    return leaf.add_(other.sub(leaf).mul_(share)) if isinstance(share, Tensor) else leaf.lerp_(other, share)


def combine(leaf: Some, other: Some, share: Number) -> Some:
    """``leaf + share other``, of new memory."""
    return other.mul(share).add_(leaf) if isinstance(share, Tensor) else leaf.add(other, alpha=share)


def descend_quotient(leaf: Some, step: Some, denominator: Some, rate: Number) -> Some:
    """``leaf <- leaf - rate step / denominator``, in place; the rate may be a tensor.

    The rate goes to the step: divided into the denominator, a rate of zero would make 0 / 0.
    """
    if isinstance(rate, Tensor):
        return leaf.addcdiv_(step.mul(rate), denominator, value=-1)
    return leaf.addcdiv_(step, denominator, value=-rate)


def exact_count(count: Tensor) -> Tensor:
    """Return the number of updates in float64, as on the host, so that results are rounded only to the leaves' dtype.

    On a device without float64 it is float32, and `power` and `debias` have an error of a few units in the last place.
    """
    return count.to(backends.widest(count.device))


def power(decay: float, count: Tensor) -> Tensor:
    """``decay ** count``."""
    # The power of a number close to 1 has the rounding error of that number times the count.
    return (count * math.log(decay)).exp() if count.dtype == torch.float32 and decay else decay**count


def debias(decay: float, count: Tensor) -> Tensor:
    """``1 - decay ** count``, the factor by which an average that began at zero is too small."""
    if count.dtype == torch.float32 and decay:
        return -torch.expm1(count * math.log(decay))
    return 1 - decay**count
