"""The microbatch and the rematerialisation that make a step fastest within so much memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ftrain import tree
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import DeviceError, require_positive
from ftrain.profiling.anatomy import anatomy
from ftrain.profiling.hints import Hint, facts_of, run_rules
from ftrain.profiling.step_variants import require_one_rank, require_step
from ftrain.profiling.timing import interval, race
from ftrain.profiling.tuning.mesh_search import mesh_trials
from ftrain.profiling.tuning.record import Trial, Trials
from ftrain.profiling.tuning.search import Search
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

MOST = 6
"""Candidates that are timed."""

UNTRIED = "computes more, or in more pieces"
ROUNDS = 5
log = logging.getLogger("ftrain")


def tune(
    step: Step,
    state: TrainState | None,
    batch: PyTree,
    *,
    memory: int | str | None = None,
    rounds: int = ROUNDS,
    mesh: tuple[int, int] | None = None,
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
        mesh: ranks to plan for, as (nodes, devices of each); they need not exist, and nothing is timed. Chosen anew are
            then `sharded`, `accumulate` and `remat`, for the batch of all ranks and the memory of one. The step that is
            returned has `sharded` on ranks that do not exist: make it with ``ft.parallel.mesh`` where they do. Least is
            an estimate of the time, from operations and bytes that are predicted (`Trials` prints how).

    Raises:
        ComposeError: when `step` is no `Step`, or runs on several ranks and is to be timed.
        StructureError: when the state is that of another step, or is None and the loss is no module.
        ConsumedError: when the state was donated.
        OptionError: when `memory` is no amount, or less than the state takes; the message says what takes it.
        BatchError: when the ranks of `mesh` do not divide the batch.
        DeviceError: when nothing fits, with the anatomy of what takes least, or when the device cannot tell what is
            free.
    """
    tried = trials(step, state, batch, memory=memory, rounds=rounds, mesh=mesh)
    log.info("tune: %s\n%s", tried.step, tried)
    return tried.step


def trials(
    step: Step,
    state: TrainState | None,
    batch: PyTree,
    *,
    memory: int | str | None = None,
    rounds: int = ROUNDS,
    mesh: tuple[int, int] | None = None,
) -> Trials:
    """Do what `tune` does, with the same arguments, and return all that was tried with the step that was chosen.

    Raises:
        FtrainError: as `tune` does.
    """
    require_step("tune", step, state)
    require_positive("tune", "rounds", rounds)
    if state is not None:
        step.require(state)
    if mesh is not None:
        return mesh_trials(step, state, tree.as_tree(batch), memory, mesh)
    if state is not None:
        require_one_rank("tune", step)
        batch = tree.to(tree.as_tree(batch), tree.device_of(state.params))
    search = Search(step, state, tree.as_tree(batch), memory)
    rows = search.predict()
    fitting = [row for row in rows if not row.verdict]
    if not fitting:
        raise _nothing_fits(search, rows)
    as_asked = search.given_microbatches, search.given_remat
    fitting.sort(key=lambda row: ((row.pieces, row.remat) != as_asked, row.flops, row.pieces))
    best, *slower = _choose(search, _time(search, fitting[:MOST], rounds))
    by_candidate = {(row.pieces, row.remat): row for row in [*rows, best, *slower]}
    rows = [row if row.verdict else dataclasses.replace(row, verdict=UNTRIED) for row in by_candidate.values()]
    examples = tree.batch_length(search.batch) or 1
    return Trials(best.step, rows, search.memory, examples, _hints(search, best))


def _time(search: Search, rows: Sequence[Trial], rounds: int) -> list[Trial]:
    """Return candidates with their times, fastest first; where nothing can run, those that compute least."""
    if search.original is None:
        return sorted(rows, key=lambda row: (row.flops, row.pieces))
    racers = {
        str(index): search.original.racer(row.step, search.batch, row.predicted or 0) for index, row in enumerate(rows)
    }
    times = race(racers, rounds, is_result=lambda name, error: is_out_of_memory(error))
    timed = [
        dataclasses.replace(row, verdict="ran out of memory")
        if isinstance(seconds, Exception)
        else dataclasses.replace(row, seconds=interval(seconds), verdict="slower")
        for row, seconds in zip(rows, times.values(), strict=True)
    ]
    return sorted(timed, key=lambda row: row.seconds.median if row.seconds else float("inf"))


def _choose(search: Search, rows: Sequence[Trial]) -> list[Trial]:
    """Return the candidates, the first one whose peak is measured within the limit in front."""
    measured = list(rows)
    for index, row in enumerate(rows):
        if row.seconds is None and search.original is not None:
            continue
        peak = _measured_peak(search, row.step)
        if peak is None or peak <= search.memory:
            verdict = "<- computes least"
            if row.seconds is not None:
                verdict = f"<- fastest; {'not measured' if peak is None else f'{format_bytes(peak)} measured'}"
            return [dataclasses.replace(row, measured=peak, verdict=verdict), *measured[:index], *measured[index + 1 :]]
        measured[index] = dataclasses.replace(row, measured=peak, verdict=f"takes {format_bytes(peak)}, measured")
    raise _nothing_fits(search, measured)


def _measured_peak(search: Search, step: Step) -> int | None:
    """Return the bytes at the peak; None where nothing runs, or the copy of the state that it takes does not fit."""
    if search.original is None:
        return None
    at_rest = anatomy(step, search.outline(step), search.batch, measure=False).at_rest.total()
    return search.original.measured_peak(step, search.batch, at_rest)


def _hints(search: Search, best: Trial) -> list[Hint]:
    """Return what makes the chosen step slow."""
    if search.original is None or best.seconds is None:
        return []
    parts = anatomy(best.step, search.outline(best.step), search.batch, measure=False)
    try:
        state = search.original.state_for(best.step)
        return run_rules(facts_of(best.step, state, search.batch, parts, best.seconds.median))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The step fits, but not with another state beside it.
        release(error, search.original.device)
        return []


def _nothing_fits(search: Search, rows: Sequence[Trial]) -> DeviceError:
    known = [row for row in rows if row.predicted is not None]
    if not known:
        return DeviceError(f"tune: nothing could be tried: {rows[0].verdict}")
    least = min(known, key=lambda row: row.measured or row.predicted or 0)
    size, limit = format_bytes(least.measured or least.predicted or 0), format_bytes(search.memory)
    pieces = f"{least.pieces} {'piece' if least.pieces == 1 else 'pieces'}"
    lines = [f"tune: nothing fits into {limit}; in {pieces} with remat={least.policy} it is {size}"]
    if search.reason_to_keep_microbatches:
        lines.append(f"Other pieces do not apply: {search.reason_to_keep_microbatches}")
    return DeviceError("\n".join([*lines, *search.shortage(least)]))
