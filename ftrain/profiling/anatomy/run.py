"""Where the memory and the work of a step go."""

from __future__ import annotations

import dataclasses

from ftrain import tree
from ftrain.errors import StructureError
from ftrain.parallel.sharded import NAME as SHARDED
from ftrain.profiling.anatomy.measured import measure as run_measured
from ftrain.profiling.anatomy.planned import is_planned, layout_of, plan, planned_state
from ftrain.profiling.anatomy.predicted import abstract_state, predict
from ftrain.profiling.anatomy.record import Anatomy
from ftrain.profiling.step_variants import remove_wrapper, require_step
from ftrain.step.across_ranks import ranks_of, require_all_ranks
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState


def anatomy(
    step: Step,
    state: TrainState | None,
    batch: PyTree,
    *,
    measure: bool = True,
    mesh: tuple[int, int] | None = None,
    level: int | None = None,
) -> Anatomy:
    """Return where the memory and the work of a step go: predicted, and measured.

    The prediction runs the step operation by operation on fake tensors, so that a model may be larger than this
    machine. It counts the state, the batch and every tensor that the step allocates. It does not count constants that
    the loss holds, nor what is only measured: what kernels allocate for their own use (on a CPU, that of convolutions
    and of `nn.LSTM` can be as large as the activations), and the saved state of torch's generator (5 KB on a CPU). The
    groups of operations are those of Ivanov et al. 2021 (arXiv:2007.00072).

    A compiled step is predicted as if it ran eagerly. It usually takes less, since Inductor fuses operations and so
    stores fewer results, but may take more where Inductor copies the inputs of convolutions into the channels-last
    layout and keeps the copies for the backward pass. Where a step is measured, the ratio is shown.

    On many ranks it is the anatomy of the first of them, which has the most, and what it sends. With `mesh` the ranks
    need not exist: the step runs as that rank would, on fake tensors, and nothing communicates.

    Args:
        step: the step.
        state: a state of it, which is left as it is. Default: that of the module of its loss, which may be on the
            ``meta`` device; then nothing is measured.
        batch: a batch of tensors; with ``meta`` tensors, nothing is measured.
        measure: also run the step twice on a copy of the state, and measure its peak and its time; a step of several
            ranks must then be measured on each. Never with `mesh` or `level`.
        mesh: the ranks to plan for, as (replicate, shard); the batch is that of all of them. Default: those of the
            step.
        level: the level of `sharded` to plan for. Default: that of the step, or that of `sharded` by default.

    Raises:
        ComposeError: for what is no `Step`; for a step that cannot be on ranks, or not at this level.
        OptionError: for a mesh that is no pair of sizes, another level, or a level without ranks.
        StructureError: for the state of another step, or no state where the loss is no module.
        TraceError: when the step asks for the value of a tensor.
        RankError: when a step on ranks is measured, and another rank does not call this.
    """
    require_step("anatomy", step, state)
    batch = tree.as_tree(batch)
    if state is not None:
        step.require(state)
    is_for_others = mesh is not None or level is not None
    on_ranks = plan("anatomy", step, mesh, level) if is_for_others or layout_of(step) else step
    started = whole_state(step, state)
    started = started if layout_of(on_ranks) is None else planned_state(on_ranks, started)
    params = sum(leaf.numel() for leaf in tree.leaves(started.params))
    predicted = Anatomy(predict(on_ranks, started, batch), params, step.is_compiled, layout=layout_of(on_ranks))
    is_meta = any(tree.is_tensor(leaf) and leaf.is_meta for leaf in tree.leaves(batch))
    if not measure or state is None or is_for_others or is_planned(step) or is_meta:
        return predicted
    if ranks_of(step.wrappers) > 1:
        require_all_ranks("anatomy")
    # Only a step that donates writes to its state.
    measured = run_measured(step, tree.clone(state) if step.donate else state, batch)
    at_peak = predicted.at_rest.total() + measured.beyond_start
    return dataclasses.replace(predicted, measured=at_peak, seconds=measured.seconds)


def whole_state(step: Step, state: TrainState | None) -> TrainState:
    """Return a state, or without one that of the module of a step, on one device and as tensors without values.

    Raises:
        StructureError: for no state where the loss is no module.
    """
    if state is not None:
        return state
    if step.base.module is None:
        text = step.base.text
        raise StructureError(f"anatomy: {text} is no module; pass a state: anatomy(step, step.init(params), batch)")
    return abstract_state(remove_wrapper(step, SHARDED), step.base.module)
