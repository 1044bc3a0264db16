"""Classify memory by when it is allocated and freed."""

from __future__ import annotations

from ftrain.profiling.anatomy.timeline import BACKWARD, FORWARD, UPDATE, Allocation, AllocationRecorder

KINDS = (
    "parameters",
    "frozen parameters",
    "gathered parameters",
    "copies in another dtype",
    "optimizer state",
    "gradients",
    "activations",
    "buffers and slots",
    "batch",
    "next state",
    "temporaries",
)
PARAMETERS, FROZEN, GATHERED, COPIES, OPTIMIZER, GRADIENTS, ACTIVATIONS, REST, BATCH, NEXT, TEMPORARIES = KINDS
COPIED = PARAMETERS, FROZEN, GATHERED, COPIES
"""The kinds of which a copy in another dtype is counted as `COPIES`."""


def classify(recorder: AllocationRecorder) -> None:
    """Set the kind of each allocation that has no kind yet."""
    timeline = recorder.timeline
    backward = [index for index, operation in enumerate(timeline.operations) if operation.phase == BACKWARD]
    # With microbatches there are several backward passes.
    starts = [index for index, previous in zip(backward, [-2, *backward], strict=False) if index != previous + 1]
    ends = [index for index, following in zip(backward, [*backward[1:], -1], strict=True) if index + 1 != following]
    first_end = min(ends, default=recorder.update_start)

    def outlives(allocation: Allocation, indices: list[int]) -> bool:
        return any(allocation.start <= index < timeline.end(allocation) - 1 for index in indices)

    def is_gradient(allocation: Allocation) -> bool:
        # A result of a backward pass, or computed from one before the update, such as a sum.
        if allocation.phase == BACKWARD:
            return outlives(allocation, ends)
        return allocation.phase == UPDATE and first_end < allocation.start < recorder.update_start

    for allocation in timeline.allocations:
        cast_of = allocation.cast_of
        if allocation.kind:
            continue
        if allocation.is_gathered:
            allocation.kind = GATHERED
        elif allocation.phase == FORWARD and cast_of is not None and cast_of.kind in COPIED:
            allocation.kind = COPIES
        elif allocation.phase == FORWARD and outlives(allocation, starts):
            allocation.kind = ACTIVATIONS
        elif is_gradient(allocation):
            allocation.kind = GRADIENTS
        else:
            allocation.kind = TEMPORARIES
