"""Scheduled values that can be changed in the state: in a sweep, or by a rule that depends on evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import OptionError, StructureError, require_range
from ftrain.optim.partial_update import require_optimizer, wrap_split
from ftrain.tree.derived import derived
from ftrain.tree.name_patterns import near
from ftrain.types import Hyper, Optimizer, PyTree, TrainState

FACTORS, STATE = "factors", "state"

FLAGS = "lookahead", "*/lookahead"
"""Patterns of the scheduled values that are flags of a step, 0 or 1, and must not be multiplied."""


def adjustable(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose scheduled values are multiplied by factors in the state; `adjust` changes these.

    The factors are 0-d float64 tensors on the CPU, named like the schedules (``lr``; ``label/lr`` in a `partition`),
    and 1 at first. They stay on the host, as the count of steps does, so a change compiles no new graph and does not
    wait for the device. With ``adamw(1.0)`` the factor is the learning rate itself. It must be the outermost optimizer:
    ``adjustable(partition(...))``.

    Raises:
        ComposeError: `optimizer` is not an optimizer, or is already adjustable.

    >>> import ftrain as ft
    >>> optimizer = ft.optim.adjustable(ft.optim.sgd(0.5))
    >>> step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), optimizer)
    >>> state = ft.optim.adjust(step.init({"w": torch.ones(1)}), {"lr": 0.1})
    >>> step(state, torch.ones(1))[1]["lr"]
    0.05
    """
    optimizer = require_optimizer("adjustable", "the optimizer", optimizer)
    nested = _nest_state(optimizer)

    def init(params: PyTree) -> PyTree:
        factors = {name: torch.ones((), dtype=torch.float64, device=tree.HOST) for name in optimizer.schedules}
        return {FACTORS: factors, **nested.init(params)}

    return dataclasses.replace(
        nested,
        init=init,
        factors=_factors,
        text=f"adjustable({optimizer.text})",
        name="",
        # The parts have no factors, which stay on the host and do not belong to one parameter.
        split=wrap_split(optimizer, _nest_state),
    )


def _nest_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose state is ``{"state": state of optimizer}``; updates keep other entries of the dict."""

    def init(params: PyTree) -> PyTree:
        return {STATE: optimizer.init(params)}

    def update(
        grads: PyTree, opt_state: PyTree, params: PyTree, hyper: Hyper, *, donate: bool = False
    ) -> tuple[PyTree, PyTree]:
        params, state = optimizer.update(grads, opt_state[STATE], params, hyper, donate=donate)
        return params, {**opt_state, STATE: state}

    return dataclasses.replace(optimizer, init=init, update=update)


def _factors(opt_state: PyTree) -> Mapping[str, Tensor]:
    if not isinstance(opt_state, Mapping) or FACTORS not in opt_state:
        raise StructureError("adjust: the optimizer of the state is not adjustable; make it with optim.adjustable(...)")
    factors: Mapping[str, Tensor] = opt_state[FACTORS]
    return factors


def adjust(state: TrainState, factors: Mapping[str, float]) -> TrainState:
    """Return the state with new factors of an `adjustable` optimizer; the same object if no factor changes.

    Args:
        state: state of a step whose optimizer is adjustable.
        factors: name of a scheduled value, or a pattern such as ``"*/lr"``, -> the new factor.

    Raises:
        StructureError: `state` is not a state, or its optimizer is not adjustable.
        OptionError: no scheduled value matches a name, or a factor is negative or not finite.
    """
    if not isinstance(state, TrainState):
        raise StructureError(f"adjust: the state is {type(state).__name__}; needs the TrainState of step.init()")
    if not isinstance(factors, Mapping):
        raise OptionError(f"adjust: factors is {factors!r}; needs name -> factor, as {{'lr': 0.1}}")
    old = _factors(state.opt_state)
    changed = dict(old)
    known = [name for name in old if not any(fnmatchcase(name, flag) for flag in FLAGS)]
    for pattern, factor in factors.items():
        names = [name for name in known if fnmatchcase(name, pattern)]
        if not names:
            raise OptionError(f"adjust: no scheduled value is called {pattern!r}; there are {near(pattern, known)}")
        require_range("adjust", f"the factor of {pattern}", factor, 0.0)
        new = torch.tensor(float(factor), dtype=torch.float64, device=tree.HOST)
        for name in names:
            if float(changed[name]) != factor:
                changed[name] = new.clone()
    if all(changed[name] is factor for name, factor in old.items()):
        return state
    return derived(state, opt_state={**state.opt_state, FACTORS: changed})
