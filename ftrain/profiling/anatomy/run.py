"""`anatomy`: the memory and the work of a step."""

from __future__ import annotations

import dataclasses

from ftrain import tree
from ftrain._torch.fake import uninterrupted
from ftrain.errors import require_switches
from ftrain.profiling.anatomy.measured import measure as run_measured
from ftrain.profiling.anatomy.planned import is_planned, layout_of, plan, planned_state
from ftrain.profiling.anatomy.predicted import predict, whole_state
from ftrain.profiling.anatomy.record import Anatomy
from ftrain.profiling.step_variants import require_step
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
    """Return the memory and the work of a step, predicted and measured.

    The prediction runs the step operation by operation on fake tensors, so a model may be larger than this machine. It
    counts every tensor of the state, the batch and the step. It does not count constants of the loss, the saved state
    of torch's generator (5 KB on a CPU), and memory that kernels allocate for their own use: this is only measured, and
    with convolutions and `nn.LSTM` on a CPU it is as large as the activations. The groups of operations are those of
    Ivanov et al. 2021 (arXiv:2007.00072).

    A compiled step is predicted as if it ran eagerly; the measured ratio is shown. It usually takes less, but may take
    more with convolutions, whose inputs Inductor copies.

    On many ranks, this is the anatomy of the first rank, which needs the most memory, and the bytes that it sends. With
    `mesh` the ranks need not exist.

    Args:
        step: the step.
        state: its state, which does not change. Default: the state of the module of its loss, which may be on the
            ``meta`` device; nothing is measured then.
        batch: a batch of tensors; on the ``meta`` device, nothing is measured.
        measure: whether to measure peak and time too, by running the step twice on a copy of the state. On several
            ranks, all ranks must call this. Nothing is measured with `mesh` or `level`.
        mesh: the ranks to plan for, as (replicate, shard), for the batch of all ranks. Default: the ranks of the step.
        level: the level of `sharded` to plan for. Default: that of the step, or else the default of `sharded`.

    Raises:
        ComposeError: if `step` is not a `Step`, or cannot run on ranks or at this level.
        OptionError: for an invalid mesh or level, or a level without ranks; to measure while a profiler of torch runs.
        StructureError: if the state is of another step, or missing while the loss has no module.
        TraceError: if the step reads the value of a tensor.
        RankError: if a step on ranks is measured, and another rank does not call this.
    """
    return anatomy_for("anatomy", step, state, batch, measure=measure, mesh=mesh, level=level)


def anatomy_for(
    function: str,
    step: Step,
    state: TrainState | None,
    batch: PyTree,
    *,
    measure: bool = False,
    mesh: tuple[int, int] | None = None,
    level: int | None = None,
) -> Anatomy:
    """Return the anatomy of a step, for another `function`, which errors name; raises as `anatomy` does."""
    require_step(function, step, state, may_lack_state=True)
    require_switches(function, measure=measure)
    batch = tree.as_tree(batch)
    is_for_other_ranks = mesh is not None or level is not None
    to_predict = plan(function, step, mesh, level) if is_for_other_ranks or layout_of(step) else step
    layout = layout_of(to_predict)
    with uninterrupted():
        initial = whole_state(function, step, state)
        if layout is not None:
            initial = planned_state(to_predict, initial)
        params = sum(leaf.numel() for leaf in tree.leaves(initial.params))
        predicted = Anatomy(predict(function, to_predict, initial, batch), params, step.is_compiled, layout=layout)
    is_meta = any(tree.is_tensor(leaf) and leaf.is_meta for leaf in tree.leaves(batch))
    if not measure or state is None or is_for_other_ranks or is_planned(step) or is_meta:
        return predicted
    if ranks_of(step.wrappers) > 1:
        require_all_ranks(function)
    # Only a step that donates writes to its state.
    beyond_start, seconds = run_measured(step, tree.clone(state) if step.donate else state, batch)
    return dataclasses.replace(predicted, measured=predicted.at_rest.total() + beyond_start, seconds=seconds)
