"""Make an optimizer from a formula that is written with the in-place methods of a tensor.

In eager mode the formula gets a `Column`, which calls torch's kernels for many tensors. In a graph it gets one leaf
after another, and the compiler fuses the operations. It writes to the old state if that was donated, else to a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

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
from ftrain.optim.column import Column, Part, Tensors
from ftrain.optim.formula import COUNT, Formula, Number
from ftrain.optim.grouping import Group, Plan, Planner
from ftrain.optim.schedules.call import bounded, describe
from ftrain.optim.schedules.combine import schedule_of
from ftrain.optim.state_dtype import Storage
from ftrain.optim.structure_cache import StructureCache
from ftrain.tree.name_patterns import Mask, Select, as_select, everything, matrices, require_matches, text_of
from ftrain.types import RNG, Hyper, Optimizer, PyTree, Schedule

LEAST_FLOAT16 = 2.0**-25
"""Smaller numbers are 0 in float16."""

DECAY = "weight_decay"
"""Name of the scheduled value of the weight decay."""

REDUCED = 16
"""Number of elements of a reduction that Inductor does not unroll."""


def leafwise(
    name: str,
    lr: float | Schedule,
    formula: Formula,
    *,
    storage: Storage | None = None,
    weight_decay: float | Schedule,
    decay_mask: Mask,
    shown: Mapping[str, float | bool] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Return an optimizer that applies a formula.

    Args:
        name: name of the factory, such as ``"adamw"``.
        lr: learning rate, a number or a schedule.
        formula: how parameters are updated.
        storage: how parameters and moments are stored if the rule computes in more bits; it then gets vectors.
        weight_decay: the same for all leaves that decay; a schedule if the formula is decoupled.
        decay_mask: which leaves decay.
        shown: further options, which the text of the optimizer shows if they are not zero or false.
        options: further options, which it does not show. Ranks compare all options.

    Raises:
        OptionError: one of these arguments of the factory is wrong; at `init`, a pattern matches nothing.
    """
    schedule, decays = schedule_of(name, "lr", lr), as_select(f"{name}: decay_mask", decay_mask)
    if not callable(lr):
        require_range(name, "lr", lr, 0.0)
    decay = schedule_of(name, DECAY, weight_decay) if callable(weight_decay) and formula.decoupled else None
    fixed_decay = None if decay else require_range(name, DECAY, weight_decay, 0.0)
    decay_text = describe(decay) if decay else fixed_decay or 0.0
    planner = _planner(formula, storage, decays if decay_text else everything)
    # float32, as torch's fused kernels need.
    count = {COUNT: torch.zeros((), dtype=torch.float32, device=tree.HOST)} if formula.constants else {}
    update = _Update(
        name=name,
        formula=formula,
        moments=storage.names if storage else [*formula.state],
        scalars={**count, **formula.shared},
        storage=storage,
        weight_decay=fixed_decay,
        plans=StructureCache(planner.plan),
    )
    shown, options = shown or {}, options or {}

    def init(params: PyTree) -> PyTree:
        require_matches(decays, params)
        _log_if_none_decays(name, decay_text, decay_mask, decays, params)
        if storage is None and isinstance(eps := options.get("eps"), float) and 0.0 < eps < LEAST_FLOAT16:
            _warn_of_float16(name, eps, params)
        return update.init(params)

    def split(params: PyTree, parts: Sequence[Sequence[int]]) -> list[Optimizer]:
        plan = planner.of_parts(params).plan
        updates = [replace(update, plans=StructureCache(plan)) for _ in parts]
        return [replace(whole, init=update.init, update=each, split=None) for each in updates]

    texts = [*_option_texts(name, shown), *_decay_texts(name, decay_text), *(storage.shown if storage else ())]
    whole = Optimizer(
        init=init,
        update=update,
        schedules={"lr": schedule, **({DECAY: bounded(name, DECAY, decay)} if decay else {})},
        text=f"{name}({', '.join([describe(schedule), *texts])})",
        needs_rng=storage is not None and storage.stochastic,
        split=split,
        name=name,
        by_element=formula.by_element and (storage is None or storage.by_element),
        options={**shown, DECAY: decay_text, **options, **({"decay_mask": text_of(decay_mask)} if decay_text else {})},
    )
    return whole


def _planner(formula: Formula, storage: Storage | None, decays: Select) -> Planner:
    if storage is not None:
        return Planner(decays, formula.fused_in_16_bits, storage.align, formula.by_shape, [])
    return Planner(decays, formula.fused_in_16_bits, 0, formula.by_shape, [*formula.state.values()])


def _option_texts(name: str, options: Mapping[str, float | bool]) -> list[str]:
    """Return the texts of options that are not zero or false. Raises an OptionError for a value of another type."""
    for option, value in options.items():
        if not isinstance(value, bool | int | float):
            raise OptionError(f"{name}: {option} is {value!r}, needs True or False")
    return [option if value is True else f"{option}={value:g}" for option, value in options.items() if value]


def _decay_texts(name: str, decay: float | str) -> list[str]:
    """Return the text of a weight decay, a number or the text of a schedule."""
    return [f"{DECAY}={decay}"] if isinstance(decay, str) else _option_texts(name, {DECAY: decay})


def _log_if_none_decays(name: str, weight_decay: float | str, mask: Mask, decays: Select, params: PyTree) -> None:
    """Log a warning if the mask selects none of the parameters; leaves on the device meta count as selected."""
    # The default mask fits any parameters, so a group of vectors, which it does not select, is no mistake of the user.
    if not weight_decay or mask is matrices:
        return
    named = [*zip(tree.leaf_names(params), tree.leaves(params), strict=True)]
    if named and not any(leaf.is_meta or decays(path, leaf) for path, leaf in named):
        log_on_first_rank(
            "%s: weight_decay=%s has no effect, for decay_mask=%s selects none of the parameters: %s",
            *(
                name,
                describe(weight_decay) if isinstance(weight_decay, float) else weight_decay,
                text_of(mask),
                listed([tree.path("params", path) for path, _ in named]),
            ),
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
    """`Optimizer.update` of a formula, with the options of `leafwise`."""

    name: str
    formula: Formula
    moments: list[str]
    """Names of the trees in the state."""
    scalars: Mapping[str, Tensor]
    """Initial values of the 0-d tensors in the state."""
    storage: Storage | None
    weight_decay: float | None
    """None if it is scheduled."""
    plans: StructureCache[Plan]
    """The plan of the last trees."""

    def init(self, params: PyTree) -> PyTree:
        device = tree.device_of(params)
        needs_float64 = any(value.dtype == torch.float64 for value in self.scalars.values())
        if needs_float64 and backends.widest(device) != torch.float64:
            raise DeviceError(
                f"{self.name}: needs float64, and {backends.of(device).describe()} has none; use another optimizer"
            )
        scalars = {key: value.to(device, copy=True) for key, value in self.scalars.items()}
        initial_values = self.formula.state
        if self.storage:
            return {**scalars, **self.storage.begin(initial_values, params)}
        return {**scalars, **{key: tree.map(initial_value, params) for key, initial_value in initial_values.items()}}

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
        if not isinstance(opt_state, Mapping) or opt_state.keys() != {*self.scalars, *self.moments}:
            keys = opt_state if isinstance(opt_state, Mapping) else [type(opt_state).__name__]
            raise StructureError(
                f"{self.name}: the optimizer state has {', '.join(map(str, keys)) or 'nothing'}, needs "
                f"{', '.join(sorted([*self.scalars, *self.moments])) or 'nothing'}; it is the state of another "
                "optimizer, or of this one with other options"
            )
        plan, (leaves, gradients, *moments) = self.plans(params, grads, *map(opt_state.__getitem__, self.moments))
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in (*leaves, *gradients)):
            raise LossError(
                f"{self.name}: an update cannot be differentiated, and found parameters or gradients that require a "
                "gradient; write the steps of an inner loop with operations of torch (p - rate * g), or detach them"
            )
        is_eager = not isinstance(hyper["lr"], Tensor)
        refuses_in_place = accept is None or (self.can_refuse and plan.refusable and is_eager)
        if donate and plan.writable and refuses_in_place:
            self._write(plan, [gradients, leaves, *moments], opt_state, hyper, accept)
            return params, opt_state
        leaves, *moments = [[*map(torch.clone, column)] for column in (leaves, *moments)]
        scalars = {key: opt_state[key].clone() for key in self.scalars}
        self._write(plan, [gradients, leaves, *moments], scalars, hyper, accept if refuses_in_place else None)
        moment_trees = dict(zip(self.moments, map(plan.spec.unflatten, moments), strict=True))
        new = plan.spec.unflatten(leaves), {**scalars, **moment_trees}
        return new if accept is None or refuses_in_place else tree.where(accept, new, (params, opt_state))

    @property
    def can_refuse(self) -> bool:
        """Whether a fused kernel may refuse an update; with a `storage` it would round the stored values again."""
        return self.formula.fused is not None and self.storage is None

    def _write(
        self,
        plan: Plan,
        columns: list[list[Tensor]],
        scalars: Mapping[str, Tensor],
        hyper: Hyper,
        accept: Tensor | None = None,
    ) -> None:
        """Update leaves in place. `columns` are the leaves of the gradients, of the parameters and of each moment."""
        rate = hyper["lr"]
        eager = not isinstance(rate, Tensor)
        if COUNT in scalars:
            scalars[COUNT].add_(1 if accept is None else accept)
        kernel = self.formula.fused if eager and plan.fusible else None
        if eager and not plan.aligned and (self.storage or kernel):
            columns = _with_aligned_gradients(columns)
        wrap: Callable[[list[Tensor]], Tensors]
        if kernel is not None:
            wrap, groups = list, plan.groups
        elif self.formula.by_shape or (self.formula.foreach and eager):
            wrap, groups = partial(Column, eager=eager), plan.blocks
        else:
            wrap, groups = itemgetter(0), plan.singles
        decay = hyper[DECAY] if self.weight_decay is None else self.weight_decay
        if self.storage:
            parts = self._stored_parts(self.storage, plan, columns, hyper, wrap, decay=decay)
        else:
            parts = self._parts(wrap, groups, columns, decay)
        if kernel is None:
            self._apply_rule(parts, rate, decay, scalars)
            return
        found_inf = None if accept is None else (~accept).float()
        for part in parts:
            counts = [scalars[COUNT]] * len(part.leaf) if COUNT in scalars else []
            kernel(part, counts, lr=rate, weight_decay=part.weight_decay, found_inf=found_inf)

    def _apply_rule(self, parts: Iterable[Part], rate: Number, decay: Number, scalars: Mapping[str, Tensor]) -> None:
        constants: tuple[Number, ...] = (rate,)
        if self.formula.constants is not None:
            count = scalars[COUNT]
            constants = self.formula.constants(rate, count.to(backends.widest(count.device)), scalars)
        if self.formula.decoupled:
            constants = (1 - rate * decay, *constants)
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
            if self.formula.decoupled:
                decay_factor, *values = values
                if isinstance(part.weight_decay, Tensor) or part.weight_decay:
                    part.leaf.mul_(decay_factor)
            self.formula.rule(part, *values)

    def _parts(
        self, wrap: Callable[[list[Tensor]], Tensors], groups: list[Group], columns: list[list[Tensor]], decay: Number
    ) -> Iterator[Part]:
        """Yield the part of each group."""
        for indices, decays in groups:
            is_all = len(indices) == len(columns[0])
            grad, leaf, *moments = [
                wrap(column if is_all else [*map(column.__getitem__, indices)]) for column in columns
            ]
            state = dict(zip(self.moments, moments, strict=True))
            yield Part(leaf, grad, state, decay if decays else 0.0, columns[1][indices[0]])

    def _stored_parts(
        self,
        storage: Storage,
        plan: Plan,
        columns: list[list[Tensor]],
        hyper: Hyper,
        wrap: Callable[[list[Tensor]], Tensors],
        *,
        decay: Number,
    ) -> Iterable[Part]:
        """Return parts in the dtype in which the rule computes. Raises an OptionError without a key to round with."""
        key = hyper.get(RNG) if storage.stochastic else None
        if storage.stochastic and key is None:
            raise OptionError(
                f"{self.name}: found no key for stochastic rounding; pass one as hyper[{RNG!r}], as a step does"
            )
        eager = not isinstance(hyper["lr"], Tensor)
        return storage.parts(plan, columns, key, wrap=wrap, weight_decay=decay, eager=eager)


def _with_aligned_gradients(columns: list[list[Tensor]]) -> list[list[Tensor]]:
    """Return the columns with each gradient in the memory layout of its parameter."""
    grads, leaves, *moments = columns
    pairs = zip(grads, leaves, strict=True)
    aligned = [g if g.stride() == leaf.stride() else torch.empty_like(leaf).copy_(g) for g, leaf in pairs]
    return [aligned, leaves, *moments]


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
