"""A step that is compiled whole: captured on tensors without memory, and what its graph would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ftrain import tree
from ftrain.errors import TraceError
from ftrain.profiling.anatomy.captured import Noting, Serial, labelled, serial
from ftrain.profiling.anatomy.kinds import BATCH, FROZEN, GRADIENTS, NEXT, OPTIMIZER, PARAMETERS, REST, name_the_rest
from ftrain.profiling.anatomy.planned import About, Script
from ftrain.profiling.anatomy.timeline import Ledger, Piece, Scratch, Timeline
from ftrain.step.step import Step
from ftrain.transforms.compile.lowered import storages
from ftrain.transforms.compile.plan import UPDATE, Plan
from ftrain.types import Gradients, Hyper, PyTree, TrainState, UpdateFn, replace


def predict_whole(
    step: Step, state: TrainState, batch: PyTree, hyper: dict[str, float], scratch: Scratch, *, fuse: bool
) -> Timeline | None:
    """Capture a step that is compiled whole, and return the timeline of its graph; None for another step.

    Args:
        step: the step.
        state: a state of it, of tensors without memory.
        batch: a batch, of tensors without memory.
        hyper: what the optimizer gets.
        scratch: what kernels take for themselves.
        fuse: let Inductor plan what it fuses, if it is who compiles the step; else operations run one by one.
    """
    runner: Any = step.runner
    if not hasattr(runner, "capture"):
        return None
    noting, marked, began = Noting({}, step.base.module), dict[int, str](), [0]

    def marking(update: UpdateFn) -> UpdateFn:
        def watched(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            made = (leaf for leaf in tree.leaves(gradients.grads) if isinstance(leaf, Tensor))
            marked.update((leaf.untyped_storage()._cdata, GRADIENTS) for leaf in made)
            began[0] = noting.operations
            return update(state, gradients, hyper, donate=donate)

        return watched

    core = step.assemble(around_update=marking)

    def noted(*args: Any) -> Any:
        with noting, noting.running.followed():
            return core(*args)

    try:
        with torch.no_grad(), step.loss.scope(True):
            captured = runner.capture(noted, state, batch, hyper, (0, 0))
    except TraceError:
        return None  # Then it is split, or says so when it runs.
    if captured is None:
        return None
    found = serial(captured, _labels(state, batch), marked, NEXT, scratch)
    name_the_rest(found.timeline, began[0])
    plan = runner.plan(captured) if fuse else None
    return found.timeline if plan is None else _planned(found, plan, scratch)


def _planned(found: Serial, plan: Plan, scratch: Scratch) -> Timeline:
    """What the graph takes when it runs as planned; its pieces are for what they are for when it does not."""
    nodes, graph, ledger = list(found.graph.graph.nodes), found.graph, Ledger()
    inputs = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    numbers = {node: number for number, node in enumerate(nodes)}

    def piece(origins: Sequence[int]) -> Piece | None:
        for number in origins[-1:]:
            for key, _ in storages(nodes[number]):
                # What is written into an input is made elsewhere before.
                if found.pieces[key].phase:
                    return found.pieces[key]
        return None

    about = About(UPDATE, {numbers[node]: each for node, each in found.operations.items()}, piece)
    values = (leaf for node in nodes for leaf in tree.leaves(node.meta.get("val")))
    with next(leaf.fake_mode for leaf in values if isinstance(leaf, FakeTensor)), torch.no_grad():
        for given in inputs:
            known = found.pieces[given.untyped_storage()._cdata]
            ledger.take(given, known.kind, known.phase)
        # Inductor takes the constants of the graph as inputs before the others.
        returned = Script(plan, about, scratch).run([*graph.parameters(), *graph.buffers(), *inputs], ledger)
    ledger.mark([value for name, value in returned.items() if name], NEXT)
    return ledger.timeline


def _labels(state: TrainState, batch: PyTree) -> PyTree:
    known = replace(
        state,
        params=labelled(state.params, PARAMETERS),
        frozen=labelled(state.frozen, FROZEN),
        buffers=labelled(state.buffers, REST),
        opt_state=labelled(state.opt_state, OPTIMIZER),
        slots=labelled(state.slots, REST),
    )
    return known, labelled(batch, BATCH)
