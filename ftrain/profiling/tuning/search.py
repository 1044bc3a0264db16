"""Candidates for the number of microbatches and the rematerialisation, with their predictions."""

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
    first_examples,
    length_of,
    microbatches_of,
    nbytes,
    remove_wrapper,
    with_microbatches,
)
from ftrain.profiling.tuning.record import ANY, BUDGETS, DOTS, FULL, NO_REMAT, UNCHANGED, Remat, Trial
from ftrain.step.evaluate import eval_step
from ftrain.step.microbatch import combined, is_combined, split_batch
from ftrain.step.step import Step
from ftrain.transforms.remat.wrapper import NAME as REMAT
from ftrain.types import Mean, PyTree, TrainState

UNTRIED = "computes more, or in more microbatches"
"""Verdict on a candidate that fits, unless it is timed."""


class Search:
    """The candidates of `tune` and their predictions.

    Args:
        step: the step of the user.
        state: its state, or None.
        batch: the batch.
        memory: the limit, as for `tune`.

    Raises:
        OptionError: for an invalid amount of memory, or one that is smaller than the state.
        DeviceError: if the device does not report its free memory.
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
        """The step with its state; None if it cannot run."""
        self.current_microbatches = _microbatches_or_zero(step)
        """The number of microbatches of the step of the user; 0 if it must not change."""
        self.current_remat = UNCHANGED if any(wrapper.name == REMAT for wrapper in step.wrappers) else NO_REMAT

    def _free(self) -> int:
        record = backends.default() if self.state is None else backends.of(tree.device_of(self.state.params))
        free = record.free()
        if free is None:
            raise DeviceError(f"tune: {record.describe()} does not report its free memory; pass memory=, such as '8GB'")
        return free

    def predict(self) -> list[Trial]:
        """Return the candidates that may be worth timing, most memory first, and those that do not apply or fit."""
        rows = [self._predict(self.current_microbatches, UNCHANGED)] if self.current_remat == UNCHANGED else []
        fitting_without_remat = 0
        if self.reason_to_keep_microbatches is not None:
            verdict = f"does not apply: {self.reason_to_keep_microbatches}"
            rows.append(Trial(2 * max(self.current_microbatches, 1), ANY, self.step, verdict=verdict))
        for microbatches in self._counts():
            without_remat = self._predict(microbatches, NO_REMAT)
            rows.append(without_remat)
            if without_remat.fits:
                # Smaller microbatches do not compute less, but the next smaller ones may use the caches better.
                fitting_without_remat += 1
                if fitting_without_remat == 2:
                    break
                continue
            full = self._predict(microbatches, FULL)
            rows.append(full)
            if full.predicted is None or full.fits:
                rows += [self._predict(microbatches, choice) for choice in (DOTS, *BUDGETS)]
        return rows

    def _counts(self) -> Iterator[int]:
        """Yield numbers of microbatches that divide the batch, fewest first; 0 if the number must not change."""
        current, length = self.current_microbatches, 0
        with suppress(BatchError):
            length = length_of(self.batch) if current else 0
        if not length or self.reason_to_keep_microbatches is not None:
            yield current if length else 0
            return
        powers = {2**power * factor for power in range(length.bit_length()) for factor in (1, current)}
        yield from sorted(count for count in {*powers, current, length} if count <= length and length % count == 0)

    @functools.cached_property
    def reason_to_keep_microbatches(self) -> str | None:
        """Why the number of microbatches must not change: the loss of the batch differs from that of its halves."""
        if self.original is None:
            return None
        evaluate, losses = eval_step(self.step.loss), list[Mean]()
        try:
            for examples in (self.batch, *split_batch(self.batch, 2)):
                losses.append(evaluate(self.original.state, examples)["loss"])
        except Exception as error:  # Of any kind: some losses need training mode, and memory may run out.
            is_unknown = not losses or is_out_of_memory(error)
            reason = None if is_unknown else f"the loss fails for half of the batch: {_first_line(error)}"
            release(error, self.original.device)
            return reason
        whole, *halves = losses
        if is_combined(self.step.loss, self.original.state.params, whole, halves):
            return None
        return (
            f"the loss of the batch is {float(whole):.4g}, but that of its halves is {combined(halves):.4g}; return a "
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
            if not isinstance(error, FtrainError) and microbatches in (0, self.current_microbatches):
                raise
            # Of any kind: the loss may not work on a part of the batch.
            return Trial(microbatches, choice, self.step, verdict=f"does not apply: {_first_line(error)}")
        fits = peak <= self.memory
        return Trial(microbatches or 1, choice, step, peak, fits, flops, verdict=UNTRIED if fits else "does not fit")

    def _with_two_microbatches(self, microbatches: int, choice: Remat) -> tuple[Step, PyTree]:
        """Return a candidate with at most two of its microbatches, and their batch: more do not take more memory."""
        if microbatches <= 2:
            return self._compose(microbatches, choice, self.batch), self.batch
        batch = first_examples(self.batch, 2 * (length_of(self.batch) // microbatches))
        return self._compose(2, choice, batch), batch

    def _peak_and_flops(self, microbatches: int, choice: Remat) -> tuple[int, int]:
        step, batch = self._with_two_microbatches(microbatches, choice)
        predicted = anatomy(step, self.outline(step), batch, measure=False)
        gradient_flops = sum(each.flops for each in predicted.timeline.operations if each.phase != UPDATE)
        flops = sum(predicted.flops.values()) + gradient_flops * max(microbatches - 2, 0) // 2
        return predicted.peak + nbytes(self.batch) - nbytes(batch), flops

    def shortage(self, row: Trial) -> list[str]:
        """Return lines that say what uses the memory of a candidate, with at most two of its microbatches."""
        step, batch = row.step, self.batch
        if row.microbatches:
            step, batch = self._with_two_microbatches(row.microbatches, row.remat)
        return shortage(step, self.outline(step), batch)

    def outline(self, step: Step) -> TrainState | None:
        """Return the state for another step without allocating memory; None without a state."""
        return None if self.state is None else Original(self.step, self.state).outline(step)


def _microbatches_or_zero(step: Step) -> int:
    with suppress(ComposeError):
        return microbatches_of(step)
    return 0


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _below_state(memory: int, at_rest: Counter[str]) -> OptionError:
    total = format_bytes(at_rest.total())
    lines = [f"tune: memory is {format_bytes(memory)}, but the state and the batch alone take {total}:"]
    lines += [f"  {kind:<34} {format_bytes(size):>12}" for kind, size in at_rest.items()]
    return OptionError("\n".join([*lines, "What would take less:", *SMALLER_STATES]))
