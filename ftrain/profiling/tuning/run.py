"""The microbatch and the rematerialisation that make a step fastest within so much memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ftrain import tree
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import ComposeError, DeviceError, require_order, require_positive
from ftrain.profiling.anatomy import anatomy
from ftrain.profiling.hints import Hint, facts_of, run_rules
from ftrain.profiling.step_variants import state_for
from ftrain.profiling.timing import Interval, Racer, interval, race
from ftrain.profiling.tuning.record import Trial, Trials
from ftrain.profiling.tuning.search import Search
from ftrain.step.purity import as_tree
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

MOST = 6
"""Candidates that are timed."""

UNTRIED = "computes more, or in more pieces"
ROUNDS = 5
log = logging.getLogger("ftrain")


def tune(
    step: Step, state: TrainState | None, batch: PyTree, *, memory: int | str | None = None, rounds: int = ROUNDS
) -> Step:
    """Return the same step with the microbatch and the rematerialisation that make it fastest within so much memory.

    The batch stays as it is, and with it the update: by the law of `accumulate` it is the same in any number of pieces
    (dropout and batch statistics are of each piece), and by that of `remat` whatever is kept. A loss that is seen to be
    another one over the halves of the batch (a sum; a plain number over padding of different lengths; one that compares
    examples) is under no such law, and its batch stays in the pieces in which it is given. What cannot fit is ruled
    out by prediction and never runs, so that a model may be larger than this machine; of what can, the few that compute
    least are timed, and the fastest is taken whose peak is measured within the limit. `ftrain.trials` returns the same
    with all that was tried, and with what costs the chosen step its speed (`ftrain.hints`), which is also logged.

    Args:
        step: the step. `accumulate` and `remat` may be in it already, and are then chosen anew.
        state: a state of it, which is not changed; copies run beside it. Without one, that of the module of its
            loss, which may be on the device ``meta``; nothing is timed then, and what computes least is taken.
        batch: a batch, as large as those to come; on ``meta``, nothing is timed.
        memory: bytes for state, batch and step together, as a number or as in ``"8GB"`` (10^9) and ``"8GiB"`` (2^30);
            by default what is free on the device, plus what the state takes. The step is measured as it is passed:
            `fit` donates, and then takes less; add ``ft.donated()`` to measure that.
        rounds: how often each is timed.

    Raises:
        ComposeError: when `step` is no `Step`.
        StructureError: when the state is that of another step, or is None and the loss is no module.
        ConsumedError: when the state was donated.
        OptionError: when `memory` is no amount, or less than the state takes; the message says what takes it.
        DeviceError: when nothing fits, with the anatomy of what takes least, or when the device cannot tell what is
            free.
    """
    tried = trials(step, state, batch, memory=memory, rounds=rounds)
    log.info("tune: %s\n%s", tried.step, tried)
    return tried.step


def trials(
    step: Step, state: TrainState | None, batch: PyTree, *, memory: int | str | None = None, rounds: int = ROUNDS
) -> Trials:
    """Do what `tune` does, and return all that was tried with the step that was chosen.

    Args:
        step: the step, as for `tune`.
        state: a state of it, or None.
        batch: a batch.
        memory: bytes, or an amount such as ``"8GB"``; by default what is free.
        rounds: how often each is timed.

    Raises:
        FtrainError: as `tune` does.
    """
    require_order("tune", step, state, "tune(step, state, batch)")
    if not isinstance(step, Step):
        raise ComposeError(f"tune: the step is {type(step).__name__}; needs a Step, such as ft.train_step returns")
    require_positive("tune", "rounds", rounds)
    if state is not None:
        step.require(state)
        batch = tree.to(as_tree(batch), tree.device_of(state.params))
    search = Search(step, state, as_tree(batch), memory)
    rows = search.predicted()
    fitting = [row for row in rows if not row.verdict]
    if not fitting:
        raise _nothing_fits(search, rows)
    fitting.sort(key=lambda row: ((row.pieces, row.policy) != search.given, row.flops, row.pieces))
    timed = _timed(search, fitting[:MOST], rounds)
    chosen, tried = _verified(search, timed)
    known = {(row.pieces, row.policy): row for row in [*rows, *tried]}
    rows = [row if row.verdict else dataclasses.replace(row, verdict=UNTRIED) for row in known.values()]
    took = next((row.seconds for row in timed if row.step is chosen), None)
    return Trials(chosen, rows, search.memory, tree.batch_length(search.batch) or 1, _hints(search, chosen, took))


def _timed(search: Search, rows: Sequence[Trial], rounds: int) -> list[Trial]:
    """Return candidates with their times, fastest first; where nothing can run, those that compute least."""
    state = search.state
    if state is None or not search.runs:
        return sorted(rows, key=lambda row: (row.flops, row.pieces))
    racers = {str(index): _racer(search, row, state) for index, row in enumerate(rows)}
    done = []
    for row, times in zip(rows, race(racers, rounds, spares=_no_memory).values(), strict=True):
        if isinstance(times, Exception):
            done.append(dataclasses.replace(row, verdict="ran out of memory"))
        else:
            done.append(dataclasses.replace(row, seconds=interval(times), verdict="slower"))
    return sorted(done, key=lambda row: row.seconds.median if row.seconds else float("inf"))


def _racer(search: Search, row: Trial, state: TrainState) -> Racer:
    device = tree.device_of(state.params)
    return Racer(row.step, lambda: state_for(row.step, search.step, state), search.batch, device, row.predicted or 0)


def _verified(search: Search, rows: Sequence[Trial]) -> tuple[Step, list[Trial]]:
    """Return the step of the first whose peak is measured within the limit, and the candidates."""
    done = list(rows)
    for index, row in enumerate(done):
        if row.seconds is None and search.runs:
            continue
        measured = _measured(search, row.step)
        if measured is None or measured <= search.memory:
            done[index] = dataclasses.replace(row, measured=measured, verdict=_chosen(row, measured))
            return row.step, done
        done[index] = dataclasses.replace(row, measured=measured, verdict=f"takes {format_bytes(measured)}, measured")
    raise _nothing_fits(search, done)


def _hints(search: Search, step: Step, took: Interval | None) -> list[Hint]:
    """Return what makes the chosen step slow."""
    if search.state is None or took is None:
        return []
    parts = anatomy(step, search.outline(step), search.batch, measure=False)
    try:
        state = state_for(step, search.step, search.state)
        return run_rules(facts_of(step, state, search.batch, parts, took.median))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The step fits, but not with another state beside it.
        release(error, tree.device_of(search.state.params))
        return []


def _measured(search: Search, step: Step) -> int | None:
    """Bytes at the peak; None where nothing runs, or the further state that it takes does not fit."""
    if search.state is None or not search.runs:
        return None
    try:
        return anatomy(step, state_for(step, search.step, search.state), search.batch).measured
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        release(error, tree.device_of(search.state.params))
        return None


def _no_memory(name: str, error: Exception) -> bool:
    return is_out_of_memory(error)


def _chosen(row: Trial, measured: int | None) -> str:
    if row.seconds is None:
        return "<- computes least"
    return f"<- fastest; {'not measured' if measured is None else f'{format_bytes(measured)} measured'}"


def _nothing_fits(search: Search, rows: Sequence[Trial]) -> DeviceError:
    known = [row for row in rows if row.predicted is not None]
    if not known:
        return DeviceError(f"tune: nothing could be tried: {rows[0].verdict}")
    least = min(known, key=lambda row: row.measured or row.predicted or 0)
    size = format_bytes(least.measured or least.predicted or 0)
    pieces = f"{least.pieces} {'piece' if least.pieces == 1 else 'pieces'}"
    limit = format_bytes(search.memory)
    lines = [f"tune: nothing fits into {limit}; in {pieces} with remat={least.policy} it is {size}"]
    if search.whole:
        lines.append(f"Other pieces do not apply: {search.whole}")
    return DeviceError("\n".join([*lines, *search.shortage(least)]))
