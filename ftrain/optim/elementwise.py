"""Make an optimizer from a formula that is written with the in-place methods of a tensor.

In eager mode the formula gets a `Column`, which calls torch's kernels for many tensors. In a graph it gets one leaf
after another, and the compiler fuses the operations. It writes to the old state if that was donated, else to a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ftrain import _torch, backends, tree
from ftrain.errors import (
    DeviceError,
    LossError,
    OptionError,
    StructureError,
    listed,
    log_on_first_rank,
    require_range,
    warn,
)
from ftrain.optim.column import Column, Tensors
from ftrain.optim.column import Part as Part
from ftrain.optim.grouping import Group, Plan, Planner
from ftrain.optim.schedules.call import describe
from ftrain.optim.schedules.combine import schedule_of
from ftrain.optim.state_dtype import Storage
from ftrain.optim.structure_cache import StructureCache
from ftrain.tree.name_patterns import Mask, Select, as_select, everything, matrices, require_matches, text_of
from ftrain.types import RNG, Hyper, Optimizer, PyTree, Schedule

Number: TypeAlias = Tensor | float
"""A float in eager mode; a 0-d tensor if it comes from the state, or in a graph."""

COUNT = "count"
"""Name of the 0-d state that counts updates."""

LEAST_FLOAT16 = 2.0**-25
"""Smaller numbers are 0 in float16."""

REDUCED = 16
"""Number of elements of a reduction that Inductor does not unroll."""


Rule: TypeAlias = Callable[..., None]
"""``(part, *constants)``: update one part in place."""

Constants: TypeAlias = Callable[[Number, Tensor, Mapping[str, Tensor]], tuple[Number, ...]]
"""``(rate, count, shared) -> constants``, the same for all leaves; may write the 0-d tensors of the state.

`count` is the number of this update, from 1: float64 if the device has it, so that only the results are rounded.
"""

Fused: TypeAlias = Callable[..., None]
"""``(part, counts, **common)``: update one part, which has lists of tensors, in place with a fused kernel of torch.

`counts` is a list with the count for each leaf, empty if the state has no count. `common` are the arguments that all
kernels take: `lr`, `weight_decay`, and `found_inf`, a 0-d float32 tensor or None. If it is 1, they do nothing.
"""


def leafwise(
    name: str,
    lr: float | Schedule,
    rule: Rule,
    *,
    state: Mapping[str, Callable[[Tensor], Tensor]],
    shared: Mapping[str, Tensor] | None = None,
    constants: Constants | None = None,
    fused: Fused | None = None,
    fused_in_16_bits: bool = True,
    foreach: bool = True,
    by_shape: bool = False,
    by_element: bool = False,
    storage: Storage | None = None,
    decoupled: bool = False,
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
        shared: further 0-d tensors of the state by name, with their initial values.
        constants: computes the further arguments of the rule; the state then counts updates. Default: the rate alone.
        fused: the formula as a fused kernel of torch; used in eager mode if leaves and device allow it.
        fused_in_16_bits: whether that kernel is correct for leaves of 16 bits.
        foreach: whether the rule takes many leaves at a time in eager mode.
        by_shape: whether the rule takes all leaves of one shape at a time, in graphs too.
        by_element: whether the rule updates each element by itself, so that ranks can update parts of a leaf.
        storage: how parameters and moments are stored if the rule computes in more bits; it then gets vectors.
        decoupled: whether the leaves decay before the rule, by ``1 - rate * weight_decay``; else the rule decays them.
        weight_decay: the same for all leaves that decay.
        decay_mask: which leaves decay.
        shown: further options, which the text of the optimizer shows if they are not zero or false.
        options: further options, which it does not show. Ranks compare all options.

    Raises:
        OptionError: one of these arguments of the factory is wrong; at `init`, a pattern matches nothing.
    """
    schedule, decays = schedule_of(name, "lr", lr), as_select(f"{name}: decay_mask", decay_mask)
    if not callable(lr):
        require_range(name, "lr", lr, 0.0)
    weight_decay = require_range(name, "weight_decay", weight_decay, 0.0)
    names = storage.names if storage else [*state]
    decaying, align = (decays if weight_decay else everything), (storage.align if storage else 0)
    planner = Planner(decaying, fused_in_16_bits, align, by_shape, [] if storage else [*state.values()])
    plans = StructureCache(planner.plan)
    # float32, as torch's fused kernels need.
    count = {COUNT: torch.zeros((), dtype=torch.float32, device=tree.HOST)} if constants else {}
    shared = {**count, **(shared or {})}
    update = _Update(
        name, rule, state, names, shared, constants, fused, foreach, by_shape, storage, decoupled, weight_decay, plans
    )
    eps = (options or {}).get("eps", 0.0)

    def init(params: PyTree) -> PyTree:
        require_matches(decays, params)
        _log_if_none_decays(name, weight_decay, decay_mask, decays, params)
        if storage is None and isinstance(eps, float) and 0.0 < eps < LEAST_FLOAT16:
            _warn_of_float16(name, eps, params)
        return update.init(params)

    def split(params: PyTree, parts: Sequence[Sequence[int]]) -> list[Optimizer]:
        plan = planner.of_parts(params).plan
        updates = [replace(update, plans=StructureCache(plan)) for _ in parts]
        return [replace(whole, init=update.init, update=each, split=None) for each in updates]

    for option, value in (shown or {}).items():
        if not isinstance(value, bool | int | float):
            raise OptionError(f"{name}: {option} is {value!r}, needs True or False")
    shown = {**(shown or {}), "weight_decay": weight_decay}
    texts = [key if value is True else f"{key}={value:g}" for key, value in shown.items() if value]
    whole = Optimizer(
        init=init,
        update=update,
        schedules={"lr": schedule},
        text=f"{name}({', '.join([describe(schedule), *texts, *(storage.shown if storage else ())])})",
        needs_rng=storage is not None and storage.stochastic,
        split=split,
        name=name,
        by_element=by_element and (storage is None or storage.by_element),
        options={**shown, **({"decay_mask": text_of(decay_mask)} if weight_decay else {}), **(options or {})},
    )
    return whole


def _log_if_none_decays(name: str, weight_decay: float, mask: Mask, decays: Select, params: PyTree) -> None:
    """Log a warning if the mask selects none of the parameters; leaves on the device meta count as selected."""
    # The default mask fits any parameters, so a group of vectors, which it does not select, is no mistake of the user.
    if not weight_decay or mask is matrices:
        return
    named = [*zip(tree.leaf_names(params), tree.leaves(params), strict=True)]
    if named and not any(leaf.is_meta or decays(path, leaf) for path, leaf in named):
        log_on_first_rank(
            "%s: weight_decay=%g has no effect, for decay_mask=%s selects none of the parameters: %s",
            *(name, weight_decay, text_of(mask), listed([tree.path("params", path) for path, _ in named])),
        )


def _warn_of_float16(name: str, eps: float, params: PyTree) -> None:
    """Warn if there are float16 parameters, in whose dtype `eps` is 0."""
    if any(leaf.dtype == torch.float16 and not leaf.is_meta for leaf in tree.leaves(params)):
        warn(
            f"{name}: there are parameters in float16, in which eps={eps:g} is 0, and so is the square of a gradient "
            "below 2e-4: a step may divide by 0, as that of torch.optim. Keep parameters in float32, with "
            "ft.with_amp('fp16'), or pass eps=1e-4"
        )


@dataclass(frozen=True, eq=False)
class _Update:
    """`Optimizer.update` of a formula, with the options of `leafwise`.

    `names` are those of the trees in the state, and `plans` caches the plan of the last trees.
    """

    name: str
    rule: Rule
    state: Mapping[str, Callable[[Tensor], Tensor]]
    names: list[str]
    shared: Mapping[str, Tensor]
    constants: Constants | None
    fused: Fused | None
    foreach: bool
    by_shape: bool
    storage: Storage | None
    decoupled: bool
    weight_decay: float
    plans: StructureCache[Plan]

    def init(self, params: PyTree) -> PyTree:
        device = tree.device_of(params)
        needs_float64 = any(value.dtype == torch.float64 for value in self.shared.values())
        if needs_float64 and backends.widest(device) != torch.float64:
            raise DeviceError(
                f"{self.name}: needs float64, and {backends.of(device).describe()} has none; use another optimizer"
            )
        scalars = {key: value.to(device, copy=True) for key, value in self.shared.items()}
        if self.storage:
            return {**scalars, **self.storage.begin(self.state, params)}
        return {**scalars, **{key: tree.map(initial_value, params) for key, initial_value in self.state.items()}}

    def __call__(
        self,
        grads: PyTree,
        opt_state: PyTree,
        params: PyTree,
        hyper: Hyper,
        *,
        donate: bool = False,
        accept: Tensor | None = None,
    ) -> tuple[PyTree, PyTree]:
        if not isinstance(opt_state, Mapping) or opt_state.keys() != {*self.shared, *self.names}:
            keys = opt_state if isinstance(opt_state, Mapping) else [type(opt_state).__name__]
            raise StructureError(
                f"{self.name}: the optimizer state has {', '.join(map(str, keys)) or 'nothing'}, needs "
                f"{', '.join(sorted([*self.shared, *self.names])) or 'nothing'}; it is the state of another optimizer, "
                "or of this one with other options"
            )
        plan, (leaves, gradients, *moments) = self.plans(params, grads, *map(opt_state.__getitem__, self.names))
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in (*leaves, *gradients)):
            raise LossError(
                f"{self.name}: an update cannot be differentiated, and found parameters or gradients that require a "
                "gradient; write the steps of an inner loop with operations of torch (p - rate * g), or detach them"
            )
        is_eager = not isinstance(hyper["lr"], Tensor)
        refuses_in_place = accept is None or (self.can_refuse and plan.refusable and is_eager)
        if donate and plan.writable and refuses_in_place:
            self._write(plan, leaves, gradients, moments, opt_state, hyper, accept)
            return params, opt_state
        leaves, *moments = [[*map(torch.clone, column)] for column in (leaves, *moments)]
        scalars = {key: opt_state[key].clone() for key in self.shared}
        self._write(plan, leaves, gradients, moments, scalars, hyper, accept if refuses_in_place else None)
        moment_trees = dict(zip(self.names, map(plan.spec.unflatten, moments), strict=True))
        new = plan.spec.unflatten(leaves), {**scalars, **moment_trees}
        return new if accept is None or refuses_in_place else tree.where(accept, new, (params, opt_state))

    @property
    def can_refuse(self) -> bool:
        """Whether a fused kernel may refuse an update; with a `storage` it would round the stored values again."""
        return self.fused is not None and self.storage is None

    def _write(
        self,
        plan: Plan,
        leaves: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        scalars: Mapping[str, Tensor],
        hyper: Hyper,
        accept: Tensor | None = None,
    ) -> None:
        rate = hyper["lr"]
        eager = not isinstance(rate, Tensor)
        if COUNT in scalars:
            scalars[COUNT].add_(1 if accept is None else accept)
        kernel = self.fused if eager and plan.fusible else None
        if eager and not plan.aligned and (self.storage or kernel):
            pairs = zip(grads, leaves, strict=True)
            grads = [g if g.stride() == leaf.stride() else torch.empty_like(leaf).copy_(g) for g, leaf in pairs]
        wrap: Callable[[list[Tensor]], Tensors]
        if kernel is not None:
            wrap, groups = list, plan.groups
        elif self.by_shape or (self.foreach and eager):
            wrap, groups = partial(Column, eager=eager), plan.blocks
        else:
            wrap, groups = itemgetter(0), plan.singles
        columns = [grads, leaves, *moments]
        if self.storage:
            key = hyper.get(RNG) if self.storage.stochastic else None
            if self.storage.stochastic and key is None:
                raise OptionError(
                    f"{self.name}: found no key for stochastic rounding; pass one as hyper[{RNG!r}], as a step does"
                )
            parts = self.storage.parts(plan, columns, key, wrap=wrap, weight_decay=self.weight_decay, eager=eager)
        else:
            parts = self._parts(wrap, groups, columns)
        if kernel is not None:
            found_inf = None if accept is None else (~accept).float()
            for part in parts:
                counts = [scalars[COUNT]] * len(part.leaf) if COUNT in scalars else []
                kernel(part, counts, lr=rate, weight_decay=part.weight_decay, found_inf=found_inf)
        else:
            self._apply_rule(parts, rate, scalars)

    def _apply_rule(self, parts: Iterable[Part], rate: Number, scalars: Mapping[str, Tensor]) -> None:
        constants: tuple[Number, ...] = (rate,)
        if self.constants is not None:
            count = scalars[COUNT]
            constants = self.constants(rate, count.to(backends.widest(count.device)), scalars)
        if self.decoupled:
            constants = (1 - rate * self.weight_decay, *constants)
        constants = _materialized(constants, rate) if isinstance(rate, Tensor) else tuple(map(_as_float, constants))
        converted: dict[tuple[torch.dtype, torch.device], tuple[Number, ...]] = {}
        for part in parts:
            key = part.like.dtype, part.like.device
            if key not in converted:
                dtype = part.like.dtype
                if isinstance(rate, Tensor):
                    # In a graph 16 bits would round 0.998 to 0.996; kernels for many tensors need their own dtype.
                    dtype = torch.promote_types(dtype, torch.float32)
                converted[key] = tuple(
                    value.to(part.like.device, dtype) if isinstance(value, Tensor) else value for value in constants
                )
            values: Sequence[Number] = converted[key]
            if self.decoupled:
                decay_factor, *values = values
                if part.weight_decay:
                    part.leaf.mul_(decay_factor)
            self.rule(part, *values)

    def _parts(
        self, wrap: Callable[[list[Tensor]], Tensors], groups: list[Group], columns: list[list[Tensor]]
    ) -> Iterator[Part]:
        """Yield the part of each group; `columns` are the leaves of the gradients, the parameters and each moment."""
        for indices, decay in groups:
            is_all = len(indices) == len(columns[0])
            grad, leaf, *moments = [
                wrap(column if is_all else [*map(column.__getitem__, indices)]) for column in columns
            ]
            state = dict(zip(self.names, moments, strict=True))
            yield Part(leaf, grad, state, self.weight_decay if decay else 0.0, columns[1][indices[0]])


def _materialized(values: tuple[Number, ...], rate: Tensor) -> tuple[Number, ...]:
    """Return the values such that Inductor computes each 0-d tensor once, and not for every element that uses it.

    Inductor takes powers for cheap, and fuses them into the kernels that use them: an update of 8 million parameters
    took 6.5 ms instead of 3.0. It always stores the result of a reduction, such as a maximum of equal numbers.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if all(tensor is rate for tensor in tensors):
        return values
    scalars = torch.stack([value.to(rate.dtype) for value in tensors])
    stored = iter(scalars.expand(REDUCED, len(scalars)).amax(0).unbind())
    return tuple(next(stored) if isinstance(value, Tensor) else value for value in values)


def _as_float(value: Number) -> Number:
    """Return the value of a 0-d tensor as a float, which kernels take, if reading it does not wait for the device."""
    if not isinstance(value, Tensor) or torch.compiler.is_compiling() or not backends.of(value.device).immediate:
        return value
    # In a graph the float would be a constant, and under vmap the tensor has several values.
    if _torch.is_capturing() or _torch.is_transformed(value):
        return value
    # A fake tensor has no value, and any number is right.
    return 1.0 if _torch.is_fake(value) else value.item()


# Building blocks of formulas.


def require_ranges(function: str, high: float = float("inf"), **values: float) -> list[float]:
    """Return constants in [0, `high`) as floats. Raises an OptionError for the first that is not."""
    return [require_range(function, name, value, 0.0, high) for name, value in values.items()]


def descend(leaf: Tensors, step: Tensors, rate: Number) -> Tensors:
    """Return ``leaf - rate step``, computed in place; the rate may be a tensor."""
    return leaf.sub_(step.mul(rate)) if isinstance(rate, Tensor) else leaf.add_(step, alpha=-rate)


def descend_quotient(leaf: Tensors, step: Tensors, denominator: Tensors, rate: Number) -> Tensors:
    """Return ``leaf - rate step / denominator``, computed in place; the rate may be a tensor.

    The step is multiplied by the rate: if the denominator were divided by it, a rate of zero would give 0 / 0.
    """
    if isinstance(rate, Tensor):
        return leaf.addcdiv_(step.mul(rate), denominator, value=-1)
    return leaf.addcdiv_(step, denominator, value=-rate)


def power(decay: float, count: Tensor) -> Tensor:
    """Return ``decay ** count``; for a count in float32 with an error of a few units in the last place."""
    # A power in float32 multiplies the rounding error of `decay`, a number close to 1, by the count.
    return (count * math.log(decay)).exp() if count.dtype == torch.float32 and decay else decay**count


def debias(decay: float, count: Tensor) -> Tensor:
    """Return ``1 - decay ** count``, the factor by which a moving average that starts at zero is too small."""
    if count.dtype == torch.float32 and decay:
        return -torch.expm1(count * math.log(decay))
    return 1 - decay**count
