"""Candidates for the number of microbatches and the policy of rematerialisation, and what is predicted of them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from ftrain import backends, tree
from ftrain.backends.format_bytes import format_bytes, parse_bytes
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import BatchError, ComposeError, DeviceError, FtrainError, OptionError
from ftrain.profiling.anatomy import anatomy
from ftrain.profiling.anatomy.timeline import UPDATE
from ftrain.profiling.comparison import Original
from ftrain.profiling.oom_report import SMALLER_STATES, shortage
from ftrain.profiling.step_variants import (
    add_wrapper,
    length_of,
    microbatches_of,
    outline,
    remove_wrapper,
    with_microbatches,
)
from ftrain.profiling.tuning.record import ANY, BUDGETS, DOTS, FULL, NO_REMAT, UNCHANGED, Remat, Trial
from ftrain.step.evaluate import eval_step
from ftrain.step.microbatch import combined, is_combined, split_batch
from ftrain.step.step import Step
from ftrain.transforms.remat.wrapper import NAME as REMAT
from ftrain.types import Mean, PyTree, TrainState


class Search:
    """Candidates, and what is predicted of them.

    Args:
        step: the step of the user.
        state: of it, or None.
        batch: the batch.
        memory: the limit, as for `tune`.

    Raises:
        OptionError: for no amount of memory, or one below the state itself.
        DeviceError: when the device cannot tell what is free.
    """

    def __init__(self, step: Step, state: TrainState | None, batch: PyTree, memory: int | str | None) -> None:
        self.step, self.state, self.batch = step, state, batch
        limit = parse_bytes("tune", memory) if memory is not None else None
        at_rest = anatomy(step, state, batch, measure=False).at_rest
        self.memory = limit if limit is not None else self._free() + at_rest.total()
        if at_rest.total() > self.memory:
            raise _below_state(self.memory, at_rest)
        is_meta = any(leaf.is_meta for leaf in tree.leaves(batch) if tree.is_tensor(leaf))
        self.original = None if state is None or is_meta else Original(step, state)
        """The step with its state; None where nothing can run."""
        self.given_microbatches = _microbatches_or_zero(step)
        """The number of microbatches of the step of the user; 0 where it may not change."""
        self.given_remat = UNCHANGED if any(wrapper.name == REMAT for wrapper in step.wrappers) else NO_REMAT

    def _free(self) -> int:
        record = backends.default() if self.state is None else backends.of(tree.device_of(self.state.params))
        free = record.free()
        if free is None:
            raise DeviceError(f"tune: {record.describe()} cannot tell how much memory is free; say it, as memory='8GB'")
        return free

    def predict(self) -> list[Trial]:
        """Return what may be worth its time, most memory first, with a verdict on what is not."""
        rows = [self._predict(self.given_microbatches, UNCHANGED)] if self.given_remat == UNCHANGED else []
        fitting_without_remat = 0
        if self.reason_to_keep_microbatches:
            verdict = f"does not apply: {self.reason_to_keep_microbatches}"
            rows.append(Trial(2 * max(self.given_microbatches, 1), ANY, self.step, verdict=verdict))
        for microbatches in self._counts():
            without_remat, full = (self._predict(microbatches, choice) for choice in (NO_REMAT, FULL))
            rows.append(without_remat)
            if not without_remat.verdict:
                # Smaller microbatches compute no less; the next ones may suit the caches better.
                fitting_without_remat += 1
                if fitting_without_remat == 2:
                    break
                continue
            rows.append(full)
            if full.predicted is None or not full.verdict:
                rows += [self._predict(microbatches, choice) for choice in (DOTS, *BUDGETS)]
        return rows

    def _counts(self) -> Iterator[int]:
        """Numbers of microbatches that divide the batch, fewest first; 0 for the number that the step has."""
        current, length = self.given_microbatches, 0
        with suppress(BatchError):
            length = length_of(self.batch) if current else 0
        if not length or self.reason_to_keep_microbatches:
            yield current if length else 0
            return
        powers = {2**power * factor for power in range(length.bit_length()) for factor in (1, current)}
        yield from sorted(count for count in {*powers, current, length} if count <= length and length % count == 0)

    @functools.cached_property
    def reason_to_keep_microbatches(self) -> str:
        """Why the number of microbatches stays as it is, or "": the loss of the batch is not that of its halves."""
        if self.original is None:
            return ""
        evaluate, losses = eval_step(self.step.loss), list[Mean]()
        try:
            for part in (self.batch, *split_batch(self.batch, 2)):
                losses.append(evaluate(self.original.state, part)["loss"])
        except Exception as error:  # Of any kind: some losses need training mode, and memory may run out.
            is_unknown = not losses or is_out_of_memory(error)
            reason = "" if is_unknown else f"the loss fails over half of the batch: {_line(error)}"
            release(error, self.original.device)
            return reason
        whole, *halves = losses
        if is_combined(self.step.loss, self.original.state.params, whole, halves):
            return ""
        return (
            f"the loss of the batch is {float(whole):.4g}, and over its halves {combined(halves):.4g}; return a "
            "Mean(total, weight)"
        )

    def _compose(self, microbatches: int, choice: Remat, batch: PyTree) -> Step:
        step = self.step
        if microbatches and microbatches != microbatches_of(step):
            step = with_microbatches(step, microbatches, batch)
        if choice is UNCHANGED:
            return step
        step = remove_wrapper(step, REMAT)
        return add_wrapper(step, choice.wrapper) if choice.wrapper else step

    def _predict(self, microbatches: int, choice: Remat) -> Trial:
        try:
            step = self._compose(microbatches, choice, self.batch)
            peak, flops = self._peak_and_flops(microbatches, choice)
        except Exception as error:
            if not isinstance(error, FtrainError) and microbatches in (0, self.given_microbatches):
                raise
            # Of any kind: it is not known that the loss can be split.
            return Trial(microbatches, choice, self.step, verdict=f"does not apply: {_line(error)}")
        verdict = "does not fit" if peak > self.memory else ""
        return Trial(microbatches or 1, choice, step, peak, flops, verdict=verdict)

    def _with_two_microbatches(self, microbatches: int, choice: Remat) -> tuple[Step, PyTree]:
        """Return a candidate and a batch of at most two of its microbatches: more of them take no more memory."""
        if microbatches <= 2:
            return self._compose(microbatches, choice, self.batch), self.batch
        length = 2 * (length_of(self.batch) // microbatches)
        batch = tree.map(lambda leaf: leaf[:length] if tree.is_tensor(leaf) and leaf.ndim else leaf, self.batch)
        return self._compose(2, choice, batch), batch

    def _peak_and_flops(self, microbatches: int, choice: Remat) -> tuple[int, int]:
        step, batch = self._with_two_microbatches(microbatches, choice)
        parts = anatomy(step, self.outline(step), batch, measure=False)
        gradient_flops = sum(operation.flops for operation in parts.timeline.operations if operation.phase != UPDATE)
        flops = sum(parts.flops.values()) + gradient_flops * max(microbatches - 2, 0) // 2
        return parts.peak + _bytes(self.batch) - _bytes(batch), flops

    def shortage(self, row: Trial) -> list[str]:
        """Return lines that show where the memory of a candidate goes, with at most two of its microbatches."""
        step, batch = row.step, self.batch
        if row.pieces:
            step, batch = self._with_two_microbatches(row.pieces, row.remat)
        return shortage(step, self.outline(step), batch)

    def outline(self, step: Step) -> TrainState | None:
        """Return the state as one of another step, without taking memory."""
        return None if self.state is None else outline(step, self.step, self.state)


def _microbatches_or_zero(step: Step) -> int:
    with suppress(ComposeError):
        return microbatches_of(step)
    return 0


def _bytes(values: PyTree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(values) if tree.is_tensor(leaf))


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _below_state(memory: int, at_rest: Counter[str]) -> OptionError:
    total = format_bytes(at_rest.total())
    lines = [f"tune: memory is {format_bytes(memory)}, and the state and the batch alone take {total}:"]
    lines += [f"  {kind:<34} {format_bytes(size):>12}" for kind, size in at_rest.items()]
    return OptionError("\n".join([*lines, "What would take less:", *SMALLER_STATES]))
