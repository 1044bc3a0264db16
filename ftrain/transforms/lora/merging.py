"""Add adapters to their weights (`merge`), and subtract them again (`unmerge`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ftrain import tree
from ftrain._torch import dtensor
from ftrain.errors import ComposeError, StructureError, listed
from ftrain.parallel.state import divided
from ftrain.step.across_ranks import require_to_gather
from ftrain.step.state_checks import require_state
from ftrain.step.step import Step
from ftrain.transforms.lora.modules import ModuleAdapters
from ftrain.transforms.lora.targets import Target
from ftrain.transforms.lora.trees import ADAPTERS, BASE, TreeAdapters
from ftrain.transforms.lora.weights import adapted, norms
from ftrain.tree.derived import derived
from ftrain.types import TrainState

SLOT = "lora"


def merge(step: Step, state: TrainState) -> TrainState:
    """Add the adapters of a state to its weights, which then compute the same without adapters.

    The result has all parameters of the base under ``params``, as a loss without `lora` needs them: evaluate it with
    ``ft.eval_step(loss_fn)``, or load it with ``ft.to_module(module, merged)``. Sums are computed in the dtype of the
    adapters and rounded once. ``slots`` keeps what `unmerge` needs. Of a state that is divided over ranks, each weight
    is gathered in turn and divided again; then every rank must call this.

    Args:
        step: a step with `lora`.
        state: a state of that step, also one of `ftrain.averaged`.

    Raises:
        ComposeError: when the step has no `lora`.
        StructureError: when the state is merged already or has no adapters, a weight is tied to that of another module,
            or a subclass of `nn.Linear` does not compute a product with its weight.
        RankError: when another rank does not call it.
    """
    adapters = adapters_of("merge", step)
    require_state("merge", state)
    if SLOT in state.slots:
        raise StructureError("merge: the adapters of this state are already merged into its weights")
    require_adapters("merge", adapters, state)
    base = tree.overlay(state.params, state.frozen)
    slot: dict[str, Any] = {"params": state.params}
    require_to_gather("merge", base)
    if isinstance(adapters, TreeAdapters):
        params = adapters.added_up(base, add=_added_whole)
    else:
        params = {name: leaf for name, leaf in base.items() if name not in adapters.names}
        slot["norms"] = {}
        for target in adapters.targets:
            params[target.weight], norm = _merged(target, base)
            if norm is not None:
                slot["norms"][target.name] = norm
    return derived(state, params=params, frozen=None, slots={**state.slots, SLOT: slot})


def adapters_of(function: str, step: Step) -> ModuleAdapters | TreeAdapters:
    """Return the adapters of a step. Raises a ComposeError when it has none."""
    adapters = step.loss.adapters if isinstance(step, Step) else None
    if not isinstance(adapters, ModuleAdapters | TreeAdapters):
        raise ComposeError(f"{function}: the step has no adapters; give one that is composed with ft.lora:\n{step!r}")
    return adapters


def require_adapters(function: str, adapters: ModuleAdapters | TreeAdapters, state: TrainState) -> None:
    """Check that a state has the adapters of a step. Raises a StructureError if not, as for a state of the base."""
    names = {ADAPTERS} if isinstance(adapters, TreeAdapters) else adapters.names
    missing = sorted(names - {*state.params} if isinstance(state.params, dict) else names)
    if missing:
        raise StructureError(
            f"{function}: the state lacks adapters of the step: {listed(missing)}; needs a state of this step"
        )


def _merged(target: Target, named: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the weight with its adapter, divided as before, and with DoRA the norms of its rows."""
    if target.tied_to:
        raise StructureError(
            f"merge: {target.tie}, which does not have this adapter. Save the adapters (ft.adapters.save), give "
            f"{target.name} a weight of its own, and load them into a step of that model, whose state can be merged"
        )
    if not target.is_product:
        raise StructureError(
            f"merge: the forward of {target.name or 'the model'} ({type(target.part).__name__}) does not compute a "
            "product with its weight, so a merged weight would give other results than the adapter does. Keep the "
            "adapter (ft.adapters.save), or leave it out of targets"
        )
    weight, a, b, *magnitude = _gathered(target, named)
    matrix = target.matrix(weight)
    norm = None
    summed = adapted(matrix, a, b, target.config.scale)
    if magnitude:
        norm = norms(matrix, a, b, target.config.scale)
        summed = (magnitude[0] / norm)[:, None] * summed
    return divided(target.matrix(summed).to(weight.dtype).contiguous(), like=named[target.weight]), norm


def _gathered(target: Target, named: dict[str, Tensor]) -> list[Tensor]:
    """Return the whole weight of a target and the whole tensors of its adapter."""
    return [dtensor.whole(named[name]) for name in (target.weight, *target.names.values())]


def _added_whole(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """As `adapted`, of tensors that may be divided over ranks; the sum has the dtype and the layout of the weight."""
    summed = adapted(dtensor.whole(weight), dtensor.whole(a), dtensor.whole(b), scale)
    new: Tensor = divided(summed.to(weight.dtype), like=weight)
    return new


def unmerge(step: Step, merged: TrainState) -> TrainState:
    """Subtract the adapters from the weights of a merged state: the inverse of `merge`, within rounding.

    The state stays divided over ranks, if it is; then every rank must call this.

    Args:
        step: a step with `lora`.
        merged: a state of `merge`.

    Raises:
        ComposeError: when the step has no `lora`.
        StructureError: when the state is not merged.
        RankError: when another rank does not call it.
    """
    adapters = adapters_of("unmerge", step)
    require_state("unmerge", merged)
    if SLOT not in merged.slots:
        raise StructureError("unmerge: the state is not merged; needs one of ft.adapters.merge(step, state)")
    slot = merged.slots[SLOT]
    params = slot["params"]
    require_to_gather("unmerge", (merged.params, params))
    if isinstance(adapters, TreeAdapters):
        with_adapters = {BASE: merged.params, ADAPTERS: params[ADAPTERS]}
        unmerged = {**with_adapters, BASE: adapters.added_up(with_adapters, sign=-1, add=_added_whole)}
    else:
        unmerged = {**merged.params, **{name: params[name] for name in adapters.names}}
        for target in adapters.targets:
            unmerged[target.weight] = _unmerged(target, unmerged, slot["norms"].get(target.name))
    trained = set(tree.leaf_names(params))
    _, frozen = tree.split(unmerged, lambda name, leaf: name in trained)
    if not tree.leaves(frozen):
        frozen = None
    slots = {name: value for name, value in merged.slots.items() if name != SLOT}
    return derived(merged, params=params, frozen=frozen, slots=slots)


def _unmerged(target: Target, named: dict[str, Tensor], norm: Tensor | None) -> Tensor:
    """Return the weight without its adapter, divided as before; `norm` is what `_merged` returned."""
    weight, a, b, *magnitude = _gathered(target, named)
    matrix = target.matrix(weight)
    if norm is not None:
        matrix = matrix.to(a.dtype) / (magnitude[0] / norm)[:, None]
    whole = target.matrix(adapted(matrix, a, b, -target.config.scale)).to(weight.dtype).contiguous()
    new: Tensor = divided(whole, like=named[target.weight])
    return new
