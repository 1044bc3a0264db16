"""Candidates for the number of microbatches and the rematerialisation, with their predictions."""

from __future__ import annotations

import functools
from contextlib import suppress

from ftrain import backends, tree
from ftrain.backends.format_bytes import parse_bytes
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import BatchError, DeviceError, FtrainError
from ftrain.profiling.anatomy import anatomy_for
from ftrain.profiling.comparison import Original
from ftrain.profiling.oom_report import memory_report
from ftrain.profiling.step_variants import length_of, nbytes
from ftrain.profiling.tuning.candidates import candidate, counts, flops_with, microbatches_or_zero, with_at_most_two
from ftrain.profiling.tuning.record import ANY, BUDGETS, DOTS, FULL, NO_REMAT, UNCHANGED, Trial
from ftrain.step.eval_step import eval_step
from ftrain.step.microbatch import difference, split_batch
from ftrain.step.step import Step
from ftrain.transforms.remat.wrapper import NAME as REMAT
from ftrain.types import Mean, PyTree, TrainState

UNTRIED = "computes more, or in more microbatches"
"""Verdict on a candidate that fits, unless it is timed."""


class Search:
    """The candidates of `tune` and their predictions."""

    def __init__(self, step: Step, state: TrainState | None, batch: PyTree, memory: int | str | None) -> None:
        self.step, self.state, self.batch = step, state, batch
        at_rest = anatomy_for("tune", step, state, batch).at_rest.total()
        self.memory = self._free() + at_rest if memory is None else parse_bytes("tune", memory)
        is_meta = any(leaf.is_meta for leaf in tree.leaves(batch) if tree.is_tensor(leaf))
        self.original = None if state is None or is_meta else Original(step, state)
        """The step with its state; None if it cannot run."""
        self.current_microbatches = microbatches_or_zero(step)
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
            if full.fits:
                rows += [self._predict(microbatches, choice) for choice in (DOTS, *BUDGETS)]
        return rows

    def _counts(self) -> list[int]:
        """Return numbers of microbatches that divide the batch, fewest first; only 0 if the number must not change."""
        length = 0
        with suppress(BatchError):
            length = length_of(self.batch)
        if length and self.reason_to_keep_microbatches is not None:
            return [self.current_microbatches]
        return counts(length, self.current_microbatches)

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
        different = difference(self.step.loss, self.original.state.params, whole, halves)
        if different is None:
            return None
        together, separate = different
        return (
            f"the loss of the batch is {together:.4g}, but that of its halves is {separate:.4g}; return a "
            "Mean(total, weight)"
        )

    def _predict(self, microbatches: int, choice: str) -> Trial:
        try:
            step = candidate(self.step, microbatches, choice, self.batch)
            smaller, batch = with_at_most_two(self.step, microbatches, choice, self.batch)
            predicted = anatomy_for("tune", smaller, self.outline(smaller), batch)
        except Exception as error:
            if not isinstance(error, FtrainError) and microbatches in (0, self.current_microbatches):
                raise
            # Of any kind: the loss may not work on a part of the batch.
            return Trial(microbatches, choice, self.step, verdict=f"does not apply: {_first_line(error)}")
        peak = predicted.peak + nbytes(self.batch) - nbytes(batch)
        flops = flops_with(predicted, max(microbatches - 2, 0))
        fits = peak <= self.memory
        return Trial(microbatches or 1, choice, step, peak, fits, flops, verdict=UNTRIED if fits else "does not fit")

    def advice(self, least: Trial) -> str:
        """Return what uses the memory of the candidate that needs least, and what would use less."""
        lines = [""]
        if self.reason_to_keep_microbatches is not None:
            lines.append(f"The number of microbatches does not change: {self.reason_to_keep_microbatches}")
        microbatches = least.microbatches if self.current_microbatches else 0
        step, batch = with_at_most_two(self.step, microbatches, least.policy, self.batch)
        return "\n".join([*lines, *memory_report(step, self.outline(step), batch)])

    def outline(self, step: Step) -> TrainState | None:
        """Return the state for another step without allocating memory; None without a state."""
        return None if self.state is None else Original(self.step, self.state).outline(step)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
