"""Candidates of `tune`: a step with other microbatches and another rematerialisation; and their FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from ftrain.backends.format_bytes import format_bytes
from ftrain.errors import ComposeError
from ftrain.profiling.anatomy import Anatomy
from ftrain.profiling.step_variants import (
    add_wrapper,
    length_of,
    microbatches_of,
    remove_wrapper,
    with_microbatches,
)
from ftrain.profiling.tuning.record import NO_REMAT, UNCHANGED, WRAPPERS, Trial
from ftrain.step.microbatch import take_examples
from ftrain.step.step import Step
from ftrain.transforms.remat.wrapper import NAME as REMAT
from ftrain.types import PyTree

T = TypeVar("T", bound=Trial)


def microbatches_or_zero(step: Step) -> int:
    """Return the number of microbatches of a step; 0 if it must not change."""
    with suppress(ComposeError):
        return microbatches_of(step)
    return 0


def counts(length: int, current: int) -> list[int]:
    """Return numbers of equal microbatches, fewest first; only 0, for no change, if `length` or `current` is 0."""
    if not length or not current:
        return [0]
    powers = {2**power * factor for power in range(length.bit_length()) for factor in (1, current)}
    return sorted(count for count in {*powers, current, length} if count <= length and length % count == 0)


def candidate(step: Step, microbatches: int, choice: str, batch: PyTree) -> Step:
    """Return a step with a number of microbatches, 0 for no change, and a choice of rematerialisation."""
    if microbatches:
        step = with_microbatches(step, microbatches, batch)
    if choice == UNCHANGED:
        return step
    step = remove_wrapper(step, REMAT)
    return add_wrapper(step, WRAPPERS[choice]) if choice in WRAPPERS else step


def with_at_most_two(step: Step, microbatches: int, choice: str, batch: PyTree) -> tuple[Step, PyTree]:
    """Return a candidate with at most two of its microbatches, and their batch, because more need no more memory."""
    if microbatches > 2:
        batch = take_examples(batch, slice(2 * (length_of(batch) // microbatches)))
    return candidate(step, min(microbatches, 2), choice, batch), batch


def nothing_fits(rows: Sequence[T], limit: str, advice: Callable[[T], str]) -> str:
    """Return the message for candidates that all exceed a limit; ``advice(row)`` is called for the smallest one."""
    known = [row for row in rows if row.predicted is not None]
    # Without rematerialisation first, for that may not apply where the step itself does.
    failed = sorted((row for row in rows if row.predicted is None), key=lambda row: row.policy != NO_REMAT)
    if not known:
        return f"tune: nothing could be predicted: {failed[0].verdict}"
    # Of those without FLOPs only a lower bound of their bytes is known.
    least = min(known, key=lambda row: (not row.flops, row.measured or row.predicted or 0))
    peak = f"{'' if least.flops else 'at least '}{format_bytes(least.measured or least.predicted or 0)}"
    others = f", and {failed[0].setting} {failed[0].verdict}" if failed and not least.flops else ""
    return f"tune: nothing fits into {limit}; with {least.setting} the peak is {peak}{others}{advice(least)}"


def flops_with(predicted: Anatomy, more: int) -> int:
    """Return the FLOPs of a step that has `more` microbatches than the two that were predicted."""
    first, second = microbatch_starts(predicted)
    microbatch = sum(operation.flops for operation in predicted.timeline.operations[first[0] : second[0]])
    # From the second microbatch on, its gradients are added to the sum of the earlier ones.
    layout = predicted.layout
    added = predicted.params // (layout.shard if layout is not None and layout.level > 1 else 1)
    return sum(predicted.flops.values()) + (microbatch + added) * more


def microbatch_starts(predicted: Anatomy) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return, for each of two microbatches, the numbers of operations and of collectives before it."""
    losses = predicted.timeline.losses  # A microbatch may call the loss several times.
    return losses[0], losses[len(losses) // 2]
