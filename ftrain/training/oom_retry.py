"""A step that runs out of memory, and goes on with the same update in smaller pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Hashable
from typing import Any

import torch
from torch import Tensor

from ftrain import tree
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import DeviceError
from ftrain.profiling.oom_report import shortage
from ftrain.step.accumulation import accumulate_grads
from ftrain.step.microbatch import cut, most_pieces
from ftrain.step.step import Step
from ftrain.step.value_and_grad import Ran, around_forward, report
from ftrain.step.wrapper import Wrapper
from ftrain.training.iterate import Position, StepRecord, device_of
from ftrain.training.loss_additivity import warn_of_pieces
from ftrain.training.metrics import Recorder
from ftrain.training.resume import Saved
from ftrain.training.signals import Abandoned
from ftrain.transforms.compile.cache import kind_of
from ftrain.types import GradFn, Gradients, Mean, Metrics, PyTree, TrainState, consume, is_own, replace

MOST_TRIES = 8
"""How often a step is tried again in twice as many pieces: what a 256th of the batch does not mend, it is not."""

COUNT = "split"
"""The metric of the step from which on there were so many pieces."""

Loop = Callable[..., Generator[StepRecord, Any, None]]


class _SpoiltError(DeviceError):
    """A step has failed that may have overwritten its state."""

    def __init__(self, text: str, step: Splitting, state: TrainState) -> None:
        super().__init__(text)
        self.step, self.state = step, state


class Splitting:
    """A step that is tried again in twice as many pieces when memory runs out, and keeps to that.

    What is split is what the innermost gradient is taken of, so that it is the same update whatever is around it:
    with ``accumulate(4)`` each of the four microbatches, and ``clip`` clips what it did.

    A state that the step did not donate is intact when it fails, and so is one whose gradient was not finished, or
    whose update may be refused (fp16, `skip_nonfinite`), which overwrites nothing. Of a compiled step nobody can say:
    there the state is kept on the host until a batch of that kind has been through.

    Args:
        step: the step.
        run: what is recorded; the number of pieces is a metric of the step from which on there were so many.
        say: tells people.
        interrupted: whether a signal has come; then nothing is tried again.
    """

    def __init__(
        self, step: Step, run: Recorder, say: Callable[[str], None], interrupted: Callable[[], Any] = lambda: None
    ) -> None:
        self._whole, self._run, self._say, self._interrupted = step, run, say, interrupted
        self._compiled = any(wrapper.step for wrapper in step.wrappers)
        self._phase = _Phase(not self._compiled and any(wrapper.account for wrapper in step.wrappers))
        self._pieces = 1
        self.resume()

    def resume(self) -> None:
        """Go on with at least as many pieces as the history says there were."""
        self._told = max((1, *self._run.history[COUNT]))
        self._use(max(self._told, self._pieces))

    def _use(self, pieces: int) -> None:
        self._pieces = pieces
        self._known: set[Hashable] = set()
        self._step = in_pieces(self._whole, pieces, self._phase)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Make a step, in more pieces if need be.

        Raises:
            DeviceError: when not even a single example fits, or not the pieces of the last of `MOST_TRIES`; the message
                has the anatomy of the step.
        """
        tries = 0
        donates = self._whole.donate and isinstance(state, TrainState) and is_own(state)
        while True:
            kind = kind_of(batch) if donates and self._compiled else None
            copy, self._phase.may_write = None, False
            try:
                if kind is not None and kind not in self._known:
                    copy = _on_host(state)
                self._phase.may_write = self._compiled
                new, metrics = self._step(state, batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    self._explain(error, batch)
                    raise
                why = error
            else:
                self._known.add(kind)
                return new, self._reported(metrics, new, batch)
            spoilt = donates and self._phase.may_write and not _restored(state, copy)
            pieces, tries = self._pieces, tries + 1
            larger = pieces < most_pieces(batch) and tries <= MOST_TRIES
            if larger:
                self._use(2 * pieces)
            # And of what was compiled for fewer pieces.
            release(why, device_of(state))
            if not larger:
                raise _too_large(self._whole, state, batch, pieces, spoilt=spoilt) from why
            if spoilt:
                raise _spoilt(self, state) from why
            if self._interrupted():
                raise Abandoned

    def _explain(self, error: Exception, batch: PyTree) -> None:
        if self._pieces > 1:
            lengths = sorted({tree.batch_length(part) or 1 for part in cut(batch, self._pieces)})
            error.add_note(
                f"fit: on_oom='split' had cut the batch into pieces of {' and '.join(map(str, lengths))} examples, for "
                "memory had run out; a model that needs more of them at once (BatchNorm does) cannot be cut so far"
            )

    def _reported(self, metrics: Metrics, state: TrainState, batch: PyTree) -> Metrics:
        if self._pieces == self._told:
            return metrics
        if self._told == 1:
            warn_of_pieces("fit(on_oom='split')", self._whole.loss, state, batch)
        self._told = self._pieces
        self._say(
            f"step {self._run.step + 1}  out of memory: from now on in {self._pieces} pieces, one after the other"
        )
        return report(metrics, "fit", **{COUNT: self._pieces})


def reloading(
    loop: Loop, step: Callable[..., Any], state: Any, position: Position | None, saved: Saved
) -> Generator[StepRecord, Any, None]:
    """Run a loop, and go back to what was saved whenever a `Splitting` has spoilt its state.

    It ends, too, before a step that was abandoned for a signal.

    Args:
        loop: ``(step, state, position=) -> generator``, such as `ftrain.iterate`.
        step: what it runs.
        state: where it starts.
        position: where in the data.
        saved: what there is to go back to.

    Raises:
        DeviceError: when there is nothing to go back to, or not even a single example fits.
    """
    while True:
        try:
            yield from loop(step, state, position=position)
        except _SpoiltError as error:
            state, position = saved.reload(error.state)
            error.step.resume()
        except Abandoned:
            return
        else:
            return


def in_pieces(step: Step, pieces: int, phase: _Phase | None = None) -> Step:
    """Return a step that takes its gradient in pieces: the same update, with the same state.

    Batch statistics are of each piece, and dropout only where it is not counter-based, as `accumulate` says. Each loss
    that is a `Mean` counts by its weight, and one that is a plain number by its examples. Where the pieces are equal,
    the bits are those of ``accumulate(pieces)``.

    Args:
        step: the step.
        pieces: how many, as long as a batch has so many examples.
        phase: is told where the step is.
    """
    inner = [Wrapper(COUNT, f"split({pieces})", "grad", grad=lambda grad: _split(grad, pieces), loops=True)] * (
        pieces > 1
    )
    outer = [Wrapper("watched", "fit(on_oom='split')", "grad", grad=phase.watch)] if phase is not None else []
    return dataclasses.replace(step, wrappers=(*inner, *step.wrappers, *outer))


class _Phase:
    """Whether a step may have begun to overwrite its state: it has not before its gradient is there.

    Args:
        guarded: whether the update may be refused, so that eagerly the old state is there until it is over.
    """

    may_write = False

    def __init__(self, guarded: bool) -> None:
        self._guarded = guarded

    def watch(self, grad: GradFn) -> GradFn:
        def watched(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
            self.may_write = False
            found = grad(state, batch, rng)
            self.may_write = not self._guarded
            return found

        return watched


def _split(grad: GradFn, pieces: int) -> GradFn:
    def splitting(state: TrainState, batch: PyTree, rng: Tensor | None) -> Gradients:
        parts = cut(batch, pieces)
        if len(parts) == 1:
            return grad(state, batch, rng)
        lengths = {tree.batch_length(part) for part in parts}
        found = accumulate_grads(grad if len(lengths) == 1 else around_forward(grad, _by_length), state, parts, rng)
        # No plain number any more, of which each counts once: an `accumulate` around this must weigh it.
        return replace(found, loss=Mean(found.loss.total, found.loss.weight))

    return splitting


def _by_length(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let numbers of which nobody knows of how many examples they are count by the length of the batch.

    Args:
        run: ``(state, batch, ...)``, a forward pass, or a `GradFn` of which it cannot be had alone.
    """

    def running(state: TrainState, batch: PyTree, *more: Any) -> Any:
        found, length = run(state, batch, *more), tree.batch_length(batch) or 1
        loss, weight = found.loss, torch.full_like(found.loss.weight, length)
        if loss.plain:
            loss = Mean(loss.total * weight, loss.weight * weight)

        def weighed(metrics: Metrics) -> Metrics:
            return {name: m if isinstance(m, Mean) else Mean(m * weight, weight) for name, m in metrics.items()}

        if not isinstance(found, Ran):
            return replace(found, loss=loss, metrics=weighed(found.metrics))
        with torch.enable_grad():
            total = found.total * weight if found.loss.plain else found.total
        return replace(found, total=total, loss=loss, later=lambda metrics: weighed(found.later(metrics)))

    return running


def _on_host(state: TrainState) -> list[Any]:
    return [leaf.to(tree.HOST, copy=True) if tree.is_tensor(leaf) else leaf for leaf in tree.leaves(state)]


def _restored(state: TrainState, copy: list[Any] | None) -> bool:
    """Write a copy back, if there is one."""
    if copy is None:
        return False
    with torch.no_grad():
        for place, value in zip(tree.leaves(state), copy, strict=True):
            if tree.is_tensor(place):
                place.copy_(value)
    return True


def _spoilt(step: Splitting, state: TrainState) -> DeviceError:
    return _SpoiltError("fit: memory ran out when the step had begun to overwrite its state", step, state)


def _too_large(step: Step, state: TrainState, batch: PyTree, pieces: int, *, spoilt: bool) -> DeviceError:
    """The error of a step for which there is no memory even in the smallest pieces that were tried."""
    count = most_pieces(batch)
    one = cut(batch, pieces)[0]
    lines = ["fit: the step runs out of memory with one example at a time"]
    if pieces < count:
        lines = [
            f"fit: the step runs out of memory in {pieces} pieces of up to {tree.batch_length(one)} examples, too, and "
            f"was tried again {MOST_TRIES} times; if fewer examples at a time are of use, pass smaller batches"
        ]
    if count == 1:
        lines = [f"fit: the step runs out of memory, and its batch cannot be cut: {tree.signature(batch)}"]
    lines += shortage(step, state, one)
    if spoilt:
        lines.append("The state had begun to be overwritten, and is lost; what was saved is not.")
        consume(state)
    return DeviceError("\n".join(lines))
