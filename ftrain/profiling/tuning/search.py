"""Candidates for a microbatch and a policy, and what is predicted of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

from ftrain import backends, tree
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import BatchError, ComposeError, DeviceError, FtrainError, OptionError
from ftrain.profiling.anatomy import anatomy
from ftrain.profiling.anatomy.kinds import OPTIMIZER
from ftrain.profiling.anatomy.predicted import abstract_state
from ftrain.profiling.anatomy.timeline import UPDATE
from ftrain.profiling.oom_report import shortage
from ftrain.profiling.step_variants import (
    add_wrapper,
    length_of,
    microbatches_of,
    outline,
    remove_wrapper,
    smaller_optimizers,
    with_microbatches,
)
from ftrain.profiling.tuning.amounts import as_bytes
from ftrain.profiling.tuning.record import Trial
from ftrain.step.evaluate import eval_step
from ftrain.step.microbatch import split_batch
from ftrain.step.step import Step
from ftrain.transforms.remat.policies import Policy
from ftrain.transforms.remat.wrapper import NAME as REMAT
from ftrain.transforms.remat.wrapper import remat
from ftrain.types import Mean, PyTree, TrainState

NONE, OWN = "none", "as given"
BUDGETS = 0.75, 0.5, 0.25
SAME, SAME_NARROW = 1e-3, 1e-2
"""By how much losses may differ that are the same, relative to the largest of them; in 16 bits."""


class Search:
    """Candidates, and what is predicted of them.

    Args:
        step: as given.
        state: of it, or None.
        batch: the batch.
        memory: as given.

    Raises:
        OptionError: for no amount of memory, or one below the state itself.
        DeviceError: when the device cannot tell what is free.
    """

    def __init__(self, step: Step, state: TrainState | None, batch: PyTree, memory: int | str | None) -> None:
        self.step, self.state, self.batch = step, state, batch
        limit = as_bytes(memory) if memory is not None else None
        resting = anatomy(step, state, batch, measure=False).at_rest
        self.memory = limit if limit is not None else self._free() + resting.total()
        if resting.total() > self.memory:
            raise _below(self, resting)
        self.runs = state is not None and not any(leaf.is_meta for leaf in tree.leaves(batch) if tree.is_tensor(leaf))

    def _free(self) -> int:
        record = backends.default() if self.state is None else backends.of(tree.device_of(self.state.params))
        free = record.free()
        if free is None:
            raise DeviceError(f"tune: {record.describe()} cannot tell how much memory is free; say it, as memory='8GB'")
        return free

    def predicted(self) -> list[Trial]:
        """Return what may be worth its time, most memory first, with a verdict on what is not."""
        rows = [self._predicted(*self.given)] if self.given[1] == OWN else []
        fitting_without_remat = 0
        if self.whole:
            rows.append(Trial(2 * max(self.given[0], 1), "any", self.step, verdict=f"does not apply: {self.whole}"))
        for pieces in self._counts():
            without_remat, *others = (self._predicted(pieces, policy) for policy in (NONE, "full"))
            rows.append(without_remat)
            if not without_remat.verdict:
                # Smaller pieces compute no less; the next ones may suit the caches better.
                fitting_without_remat += 1
                if fitting_without_remat == 2:
                    break
                continue
            rows += others
            if others[0].predicted is None or not others[0].verdict:
                policies = ["dots", *(f"budget={share:g}" for share in BUDGETS)]
                rows += [self._predicted(pieces, policy) for policy in policies]
        return rows

    @property
    def given(self) -> tuple[int, str]:
        """The pieces and the policy of the step as it is given."""
        with suppress(ComposeError):
            return microbatches_of(self.step), self._policy
        return 0, self._policy

    @property
    def _policy(self) -> str:
        return OWN if any(wrapper.name == REMAT for wrapper in self.step.wrappers) else NONE

    def _counts(self) -> Iterator[int]:
        """In how many pieces the batch can be taken, fewest first; 0 for those that it is taken in."""
        try:
            current, length = microbatches_of(self.step), length_of(self.batch)
        except (BatchError, ComposeError):
            current = length = 0
        if not length or self.whole:
            yield current
            return
        powers = {2**power * many for power in range(length.bit_length()) for many in (1, current)}
        yield from sorted(count for count in {*powers, current, length} if count <= length and length % count == 0)

    @functools.cached_property
    def whole(self) -> str:
        """Why the batch stays in the pieces it is taken in: others are seen to change the loss."""
        if self.state is None or not self.runs:
            return ""
        evaluated, halves = eval_step(self.step.loss), list[Mean]()
        whole: Mean | None = None
        try:
            whole = evaluated(self.state, self.batch)["loss"]
            halves += [evaluated(self.state, half)["loss"] for half in split_batch(self.batch, 2)]
        except Exception as error:  # Of any kind: some losses need training mode, and memory may run out.
            lacking = whole is None or is_out_of_memory(error)
            failed = "" if lacking else f"the loss fails over half of the batch: {_line(error)}"
            release(error, tree.device_of(self.state.params))
            return failed
        value, combined = float(whole), float(functools.reduce(lambda a, b: a + b, halves))
        largest = max(abs(value), *(abs(float(half)) for half in halves))
        tolerance = SAME_NARROW if self.step.loss.narrow else SAME
        if abs(value - combined) <= largest * tolerance or value != value:
            return ""
        return f"the loss of the batch is {value:.4g}, and over its halves {combined:.4g}; return a Mean(total, weight)"

    def _composed(self, pieces: int, policy: str, batch: PyTree) -> Step:
        step = self.step
        if pieces and pieces != microbatches_of(step):
            step = with_microbatches(step, pieces, batch)
        if policy == OWN:
            return step
        step = remove_wrapper(step, REMAT)
        if policy == NONE:
            return step
        share = policy.removeprefix("budget=")
        return add_wrapper(step, remat(budget=float(share)) if share != policy else remat(cast(Policy, policy)))

    def _predicted(self, pieces: int, policy: str) -> Trial:
        try:
            step = self._composed(pieces, policy, self.batch)
            peak, flops = self._size(pieces, policy)
        except Exception as error:
            if not isinstance(error, FtrainError) and pieces in (0, self.given[0]):
                raise
            # Of any kind: it is not known that the loss can be split.
            return Trial(pieces, policy, self.step, verdict=f"does not apply: {_line(error)}")
        row = Trial(pieces or 1, policy, step, peak, flops)
        return dataclasses.replace(row, verdict="does not fit" if peak > self.memory else "")

    def _shown(self, pieces: int, policy: str) -> tuple[Step, PyTree]:
        """A candidate, with two of its pieces where it has more: the others take the same memory again."""
        if pieces <= 2:
            return self._composed(pieces, policy, self.batch), self.batch
        length = 2 * (length_of(self.batch) // pieces)
        cut = tree.map(lambda leaf: leaf[:length] if tree.is_tensor(leaf) and leaf.ndim else leaf, self.batch)
        return self._composed(2, policy, cut), cut

    def _size(self, pieces: int, policy: str) -> tuple[int, int]:
        """Bytes at the peak of a candidate, and its operations."""
        step, batch = self._shown(pieces, policy)
        parts = anatomy(step, self.outline(step), batch, measure=False)
        again = sum(each.flops for each in parts.timeline.operations if each.phase != UPDATE)
        flops = sum(parts.flops.values()) + again * max(pieces - 2, 0) // 2
        return parts.peak + _bytes(self.batch) - _bytes(batch), flops

    def shortage(self, row: Trial) -> list[str]:
        """Return lines that show where the memory of a candidate goes: of two pieces, where it has more."""
        step, batch = self._shown(row.pieces, row.policy) if row.pieces else (row.step, self.batch)
        return shortage(step, self.outline(step), batch)

    def outline(self, step: Step) -> TrainState | None:
        """Return the state as one of another step, without taking memory."""
        return None if self.state is None else outline(step, self.step, self.state)


def _begun(search: Search, step: Step) -> TrainState | None:
    """Return a state of another step without taking memory."""
    module = step.base.module
    return abstract_state(step, module) if search.state is None and module is not None else search.outline(step)


def _bytes(values: PyTree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(values) if tree.is_tensor(leaf))


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _below(search: Search, resting: Counter[str]) -> OptionError:
    total = format_bytes(resting.total())
    lines = [f"tune: memory is {format_bytes(search.memory)}, and the state and the batch alone take {total}:"]
    lines += [f"  {kind:<34} {format_bytes(size):>12}" for kind, size in resting.items()]
    lines.append("What would take less:")
    with suppress(FtrainError):
        for name, other in smaller_optimizers(search.step).items():
            state = _begun(search, other)
            size = resting.total() - resting[OPTIMIZER] + _bytes(state and state.opt_state)
            lines.append(f"  {f'ft.optim.{name}':<34} {format_bytes(size):>12}")
    return OptionError("\n".join([*lines, "  fewer parameters that train (trainable=, ft.lora), a smaller model"]))
