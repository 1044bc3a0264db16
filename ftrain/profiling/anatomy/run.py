"""Where the memory and the work of a step go."""

from __future__ import annotations

import dataclasses

from ftrain import tree
from ftrain.errors import ComposeError, StructureError, require_order
from ftrain.profiling.anatomy.measured import measure as measured_of
from ftrain.profiling.anatomy.predicted import abstract_state, predict
from ftrain.profiling.anatomy.record import Anatomy, summarise
from ftrain.step.purity import as_tree
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState


def anatomy(step: Step, state: TrainState | None, batch: PyTree, *, measure: bool = True, fuse: bool = True) -> Anatomy:
    """Return where the memory and the work of a step go: predicted, and measured beside it.

    The prediction runs the step operation by operation on tensors without memory, so that a model may be larger than
    this machine; groups of operations are those of Ivanov et al. 2021 (arXiv:2007.00072).

    Where Inductor compiles a step, whole or split, it plans which operations it fuses, what it keeps for the backward
    pass and when memory is taken and used again, and what is predicted is what its plans take; that lasts about as long
    as to compile the step, without the compiler of C++. With other backends, and with ``fuse=False``, what the graph of
    a whole step takes when its operations run one by one is predicted, and a split one as if it ran eagerly; Inductor
    stores up to a quarter less. Plans are those for the CPU, wherever the state is.

    What kernels take for themselves is predicted of convolutions on the CPU alone, in bfloat16 but for a part (5% of a
    net of them, 11% of one over volumes). Products of bfloat16 in compiled steps take some, too: the measured peak was
    16% above the predicted one on a split GPT of 165,000 parameters, 9% on a small whole one, and equal on one of 5.8
    million. So does `nn.LSTM`, with which the peak was up to three times the predicted one.

    Args:
        step: the step.
        state: a state of it, which is left as it is. Without one, that of the module of its loss, which may be on the
            device ``meta``; nothing is measured then.
        batch: a batch, of tensors; those on ``meta`` serve as well, and nothing is measured then.
        measure: also run the step twice on a copy of the state, and measure.
        fuse: let Inductor plan what it fuses, if it is who compiles the step.

    Raises:
        ComposeError: for what is no `Step`.
        StructureError: for another state, or none where the loss is no module.
        TraceError: when the step asks for the value of a tensor.
    """
    require_order("anatomy", step, state, "anatomy(step, state, batch)")
    if not isinstance(step, Step):
        raise ComposeError(f"anatomy: the step is {type(step).__name__}; needs a Step, such as ft.train_step returns")
    whole, batch = _whole(step, state), as_tree(batch)
    timeline = predict(step, whole, batch, fuse=fuse)
    found = summarise(timeline, sum(leaf.numel() for leaf in tree.leaves(whole.params)))
    if state is None or not measure or any(tree.is_tensor(leaf) and leaf.is_meta for leaf in tree.leaves(batch)):
        return found
    # A step changes its state only where it donates.
    seen = measured_of(step, tree.clone(state) if step.donate else state, batch)
    return dataclasses.replace(found, measured=found.at_rest.total() + seen.more, seconds=seen.seconds)


def _whole(step: Step, state: TrainState | None) -> TrainState:
    if state is not None:
        step.require(state)
        return state
    if step.base.module is None:
        text = step.base.text
        raise StructureError(f"anatomy: {text} is no module; pass a state: anatomy(step, step.init(params), batch)")
    return abstract_state(step, step.base.module)
