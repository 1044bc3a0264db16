"""Retry a step that ran out of memory, with its gradient computed in smaller pieces of the batch: the same update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ftrain import tree
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import DeviceError
from ftrain.parallel.agreement import Agreement
from ftrain.parallel.stand_in import GradientStandIn, OutOfMemoryOnRankError, running_graphs, without_examples
from ftrain.step.accumulation import accumulate_grads
from ftrain.step.core import refuses_in_place
from ftrain.step.loss_forms import report
from ftrain.step.microbatch import example_lists, most_pieces, split_batch, with_example_lists
from ftrain.step.step import Step
from ftrain.step.wrapper import OnGrad, Wrapper
from ftrain.training.history import History
from ftrain.training.iterate import device_of_state
from ftrain.training.loss_additivity import warn_if_not_additive
from ftrain.training.signals import Abandoned
from ftrain.transforms.compile.cache import cache_key
from ftrain.types import GradFn, Gradients, Mean, Metrics, PyTree, TrainState, consume, is_donatable, replace

SPLIT_METRIC = "split"
"""Name of the metric with the number of pieces, which the first step in this number of pieces has."""


class StateOverwrittenError(DeviceError):
    """Memory ran out in a step that may have begun to overwrite its state; `state` is for its memory to be reused."""

    def __init__(self, state: TrainState) -> None:
        super().__init__("fit: memory ran out when the step had begun to overwrite its state")
        self.state = state


class OomRetry:
    """A step that is retried in twice as many pieces when memory runs out, and keeps that number of pieces.

    The innermost gradient function is split, so that the update is the same for any wrappers: with ``accumulate(4)``
    each of the four microbatches is split, and ``clip`` clips the same gradient as before. Ranks split a step together.

    The state of a step that failed is intact in three cases: it was not donated; the gradient was not complete; or the
    update may be refused (fp16, `skip_nonfinite`) by other means than the kernels of the optimizer, and so is not
    written in place. A compiled step may fail anywhere. So its state is copied to the host before the first step with
    each structure of batches.

    `say` prints a line. `interrupted` returns whether a signal has come; then no step is retried.
    """

    def __init__(
        self,
        step: Step,
        pieces: int,
        say: Callable[[str], None],
        interrupted: Callable[[], Any],
        agreement: Agreement,
    ) -> None:
        self._original, self._say, self._interrupted = step, say, interrupted
        self.loss = step.loss
        self._compiled, self._agreement = step.is_compiled, agreement
        self._stand_in = GradientStandIn()
        is_copied = step.may_refuse_updates and not refuses_in_place(step)
        self._writes = _StateWrites(is_copied and agreement.is_alone and not self._compiled)
        self._recorded = pieces
        self._split_into(pieces)

    def restart(self, pieces: int) -> None:
        """Continue from a checkpoint whose history has this number of pieces; a larger current number is kept."""
        self._recorded = pieces
        self._split_into(max(pieces, self._pieces))

    def _split_into(self, pieces: int) -> None:
        self._pieces = pieces
        self._fitting_structures: set[Hashable] = set()
        self._step = split_step(self._original, pieces, self._record_writes)

    def _record_writes(self, grad: GradFn) -> GradFn:
        is_agreed = self._agreement.is_alone or self._compiled
        return self._writes.record(grad if is_agreed else _require_all_ranks(grad, self._agreement, self._stand_in))

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Run the step, in more pieces if memory runs out.

        Raises:
            StateOverwrittenError: memory ran out and the state is lost.
            DeviceError: not even one example at a time fits; the message has the anatomy of the step.
            Abandoned: memory ran out after a signal.
        """
        donates = self._original.donate and isinstance(state, TrainState) and is_donatable(state)
        while True:
            structure = cache_key(batch) if donates and self._compiled else None
            copy, self._writes.begun = None, False
            try:
                if structure is not None and structure not in self._fitting_structures:
                    copy = _copy_to_host(state)
                self._writes.begun = self._compiled
                new_state, metrics = self._run(state, batch)
            except Exception as error:
                if not (is_out_of_memory(error) or isinstance(error, OutOfMemoryOnRankError)):
                    self._add_note_of_pieces(error, batch)
                    raise
                out_of_memory = error
            else:
                self._fitting_structures.add(structure)
                return new_state, self._with_pieces(metrics, new_state, batch)
            is_lost = donates and self._writes.begun and copy is None
            if copy is not None and self._writes.begun:
                _restore(state, copy)
            can_retry = self._pieces < most_pieces(batch)
            if can_retry:
                self._split_into(2 * self._pieces)
            # This also frees the code that was compiled for fewer pieces.
            release(out_of_memory, device_of_state(state))
            if not can_retry:
                # Imported here, because it imports all of profiling, which few runs need.
                from ftrain.profiling.oom_report import memory_report

                explain = memory_report if self._agreement.is_alone else None
                raise _out_of_memory_error(self._original, state, batch, explain, lost=is_lost) from out_of_memory
            if is_lost:
                raise StateOverwrittenError(state) from out_of_memory
            if self._interrupted():
                raise Abandoned

    def _run(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Run the step. If memory runs out on one of several ranks, the step fails on all of them."""
        step = self._step
        if self._agreement.is_alone:
            return step(state, batch)
        if self._compiled:
            with running_graphs(self._agreement):
                return step(state, batch)
        with self._stand_in:
            try:
                return step(state, batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self._writes.begun:
                    raise DeviceError(
                        "fit: memory ran out on this rank in the update, which the others make; use a higher level of "
                        "ft.sharded, or ft.offload('opt_state')"
                    ) from error
                release(error, device_of_state(state))
            try:
                with self._stand_in.active():
                    return step(state, batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise DeviceError(
                    "fit: memory ran out on this rank with one example of each microbatch; use a higher level of "
                    "ft.sharded, ft.remat() or shorter examples"
                ) from error

    def _add_note_of_pieces(self, error: Exception, batch: PyTree) -> None:
        """Add to an error the note that the batch was split, which may be the cause."""
        if self._pieces > 1:
            lengths = sorted({tree.batch_length(piece) or 1 for piece in split_batch(batch, self._pieces)})
            error.add_note(
                f"fit: on_oom='split' had split the batch into pieces of {' and '.join(map(str, lengths))} examples, "
                "because memory had run out; a model that needs more examples at once (BatchNorm does) cannot be split "
                "into such small pieces"
            )

    def _with_pieces(self, metrics: Metrics, state: TrainState, batch: PyTree) -> Metrics:
        """Return the metrics, with the number of pieces if this is the first step in so many, and print it then."""
        # `report` raises an error for a metric of the loss of that name: a resumed run would take it for the pieces.
        if self._pieces == self._recorded and SPLIT_METRIC not in metrics:
            return metrics
        with_pieces = report(metrics, "fit", **{SPLIT_METRIC: self._pieces})
        if self._recorded == 1:
            is_first = self._agreement.is_first
            warn_if_not_additive("fit(on_oom='split')", self._original.loss, state, batch, is_first=is_first)
        self._recorded = self._pieces
        self._say(f"step {int(state.step)}  out of memory: from now on in {self._pieces} pieces, one after the other")
        return with_pieces


def recorded_pieces(history: History) -> int:
    """Return the number of pieces of the last step of a history."""
    pieces: list[int] = [record[SPLIT_METRIC] for record in history if SPLIT_METRIC in record]
    return max((1, *pieces))


def split_step(step: Step, pieces: int, recording: Callable[[GradFn], GradFn] | None = None) -> Step:
    """Return a step that computes its gradient in pieces of the batch: the same update, under the law of `accumulate`.

    With equal pieces the result has the bits of ``accumulate(pieces)``. A batch with fewer examples than pieces is
    split into single examples. `recording` wraps the gradient function, to record when the step begins to overwrite its
    state.
    """
    wrappers = step.wrappers
    if pieces > 1:
        # Ranks that take rows of a batch take their rows of each piece, so they must know the number of pieces.
        takes_rows = any(wrapper.step is not None and wrapper.step.on_ranks is not None for wrapper in wrappers)
        split = OnGrad(
            lambda grad: _split(grad, pieces),
            microbatches=pieces if takes_rows else None,
            compile_inner=not takes_rows,
            by_element=True,
        )
        wrappers = (Wrapper(SPLIT_METRIC, f"split({pieces})", grad=split), *wrappers)
    if recording is not None:
        on_grad = OnGrad(recording, by_element=True)
        wrappers = (*wrappers, Wrapper("state_writes", "fit(on_oom='split')", grad=on_grad))
    return dataclasses.replace(step, wrappers=wrappers)


class _StateWrites:
    """Records in `begun` whether a step may have begun to overwrite its state, which it does after its gradient.

    An eager step with `keeps_old` does not overwrite it: its update may be refused, so it writes a new state.
    """

    begun = False

    def __init__(self, keeps_old: bool) -> None:
        self._keeps_old = keeps_old

    def record(self, grad: GradFn) -> GradFn:
        def recording(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            self.begun = False
            gradients = grad(state, batch, rng)
            self.begun = not self._keeps_old
            return gradients

        return recording


def _require_all_ranks(grad: GradFn, agreement: Agreement, stand_in: GradientStandIn) -> GradFn:
    """Return a gradient function that fails on all ranks if memory runs out on one, before any overwrites its state."""

    def agreed(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        stand_in.begin()
        is_stand_in = stand_in.is_active
        gradients = grad(state, without_examples(batch) if is_stand_in else batch, rng)
        if agreement.largest(int(is_stand_in)):
            raise OutOfMemoryOnRankError("fit: memory ran out on a rank")
        return gradients

    return agreed


def _split(grad: GradFn, pieces: int) -> GradFn:
    def splitting(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        microbatches = split_batch(batch, pieces)
        if len(microbatches) == 1:
            return grad(state, batch, rng)
        with with_example_lists(example_lists(batch)):
            gradients = accumulate_grads(grad, state, microbatches, rng)
        loss = gradients.loss
        if loss.plain:  # The pieces are equal. An `accumulate` around this weighs a microbatch by its examples.
            length = tree.batch_length(microbatches[0]) or 1
            loss = Mean(loss.total * length, loss.weight * length)
        return replace(gradients, loss=loss)

    return splitting


def _copy_to_host(state: TrainState) -> list[Any]:
    return [leaf.to(tree.HOST, copy=True) if tree.is_tensor(leaf) else leaf for leaf in tree.leaves(state)]


@torch.no_grad()
def _restore(state: TrainState, copy: list[Any]) -> None:
    for leaf, value in zip(tree.leaves(state), copy, strict=True):
        if tree.is_tensor(leaf):
            leaf.copy_(value)


def _out_of_memory_error(
    step: Step, state: TrainState, batch: PyTree, explain: Callable[..., list[str]] | None, *, lost: bool
) -> DeviceError:
    """Return the error of a step that runs out of memory even with one example at a time."""
    examples = most_pieces(batch)
    text = "fit: the step runs out of memory with one example at a time"
    if examples == 1:
        text = f"fit: the step runs out of memory, and its batch cannot be split: {tree.signature(batch)}"
    lines = [text, *(explain(step, state, split_batch(batch, examples)[0]) if explain else [])]
    if lost:
        lines.append("The step had begun to overwrite the state, which is lost; checkpoints are as they were.")
        consume(state)
    return DeviceError("\n".join(lines))
