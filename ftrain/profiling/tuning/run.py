"""`tune`: the microbatches and the rematerialisation that make a step fastest within a limit of memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ftrain import tree
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import DeviceError, require_positive
from ftrain.profiling.anatomy import anatomy_for
from ftrain.profiling.comparison import Original
from ftrain.profiling.hints import Hint, measured_hints
from ftrain.profiling.step_variants import length_or_none, require_one_rank, require_step
from ftrain.profiling.timing import interval, race
from ftrain.profiling.tuning.candidates import nothing_fits
from ftrain.profiling.tuning.mesh_search import mesh_trials
from ftrain.profiling.tuning.record import Trial, Trials
from ftrain.profiling.tuning.search import Search
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

MAX_TIMED = 6
"""The largest number of candidates that are timed."""

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
    """Return the step with the microbatches and the rematerialisation that make it fastest within a limit of memory.

    The update stays the same, by the laws of `accumulate` and `remat`; dropout and batch statistics are those of each
    microbatch. If the loss of the batch differs from that of its halves (as a sum does), the number of microbatches
    does not change. Candidates that do not fit by prediction never run, so a model may be larger than this machine. Of
    the others, the few that compute least are timed, and the fastest is chosen whose measured peak is within the limit.
    `ftrain.trials` returns all candidates, and what makes the chosen step slow (`ftrain.hints`), which is also logged.

    Args:
        step: the step. If it has `accumulate` or `remat`, they are chosen anew.
        state: its state, which does not change; copies run beside it. Default: the state of the module of its loss,
            which may be on the device ``meta``. Nothing is timed then, and the candidate that computes least is chosen.
        batch: a batch of the size to train with; on ``meta``, nothing is timed.
        memory: bytes for state, batch and step together, as a number or as in ``"8GB"`` (10^9) and ``"8GiB"`` (2^30).
            Default: the free memory of the device, and what the state takes. The step is measured as it is passed;
            `fit` donates and then needs less, so add ``ft.donated()`` to measure that.
        rounds: number of times that each candidate is timed.
        mesh: ranks to plan for, as (nodes, devices per node), which need not exist; nothing is timed. `sharded`,
            `accumulate` and `remat` are then chosen for the batch of all ranks and the memory of one, by an estimate of
            the time from predicted operations and bytes (`print` of the `Trials` shows its rates). The step that is
            returned is `sharded` on ranks that do not exist; make it with ``ft.parallel.mesh`` where they do.

    Raises:
        ComposeError: if `step` is not a `Step`, or runs on several ranks and would be timed.
        StructureError: if the state is of another step, or missing while the loss has no module.
        ConsumedError: if the state was donated.
        OptionError: for an invalid amount of memory.
        BatchError: if the ranks of `mesh` do not divide the batch.
        DeviceError: if nothing fits, with the anatomy of the candidate that needs least, or if the device does not
            report its free memory.
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
    """Return all candidates of `tune`, with its arguments, and the step that was chosen. Raises as `tune` does."""
    require_step("tune", step, state, may_lack_state=True)
    require_positive("tune", "rounds", rounds)
    if mesh is not None:
        return mesh_trials(step, state, tree.as_tree(batch), memory, mesh)
    if state is not None:
        require_one_rank("tune", step)
        batch = tree.to(tree.as_tree(batch), tree.device_of(state.params))
    search = Search(step, state, tree.as_tree(batch), memory)
    rows = search.predict()
    fitting = [row for row in rows if row.fits]
    if not fitting:
        raise DeviceError(nothing_fits(rows, format_bytes(search.memory), search.advice))
    current = search.current_microbatches, search.current_remat
    fitting.sort(key=lambda row: ((row.microbatches, row.policy) != current, row.flops, row.microbatches))
    tried, hints = fitting[:MAX_TIMED], list[Hint]()
    if search.original is None:
        best = min(tried, key=lambda row: (row.flops, row.microbatches))
        tried = [dataclasses.replace(best, verdict="<- computes least")]
    else:
        tried = _choose(search, search.original, _time(search.original, tried, search.batch, rounds))
        hints = _hints(search.original, tried[0].step, search.batch)
    by_candidate = {(row.microbatches, row.policy): row for row in [*rows, *tried]}
    return Trials(tried[0].step, [*by_candidate.values()], search.memory, length_or_none(search.batch), hints)


def _time(original: Original, rows: Sequence[Trial], batch: PyTree, rounds: int) -> list[Trial]:
    """Return candidates with their times, fastest first."""
    racers = {index: original.racer(row.step, batch, row.predicted or 0) for index, row in enumerate(rows)}
    times = race(racers, rounds, is_result=lambda index, error: is_out_of_memory(error))
    timed = [
        dataclasses.replace(row, verdict="ran out of memory")
        if isinstance(seconds, Exception)
        else dataclasses.replace(row, seconds=interval(seconds), verdict="slower")
        for row, seconds in zip(rows, times.values(), strict=True)
    ]
    return sorted(timed, key=lambda row: row.seconds.median if row.seconds else float("inf"))


def _choose(search: Search, original: Original, rows: Sequence[Trial]) -> list[Trial]:
    """Return the candidates, with the first one whose measured peak is within the limit moved to the front."""
    measured = list(rows)
    for index, row in enumerate(rows):
        if row.seconds is None:
            continue
        at_rest = anatomy_for("tune", row.step, original.outline(row.step), search.batch).at_rest.total()
        peak = original.measured_peak(row.step, search.batch, at_rest)
        if peak is None or peak <= search.memory:
            memory = "not measured" if peak is None else f"{format_bytes(peak)} measured"
            chosen = dataclasses.replace(row, measured=peak, verdict=f"<- fastest; {memory}")
            return [chosen, *measured[:index], *measured[index + 1 :]]
        measured[index] = dataclasses.replace(row, measured=peak, verdict=f"too large: {format_bytes(peak)} measured")
    raise DeviceError(nothing_fits(measured, format_bytes(search.memory), search.advice))


def _hints(original: Original, step: Step, batch: PyTree) -> list[Hint]:
    try:
        return measured_hints(original, step, batch, with_larger_batch=False)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The step fits, but not with a second state beside it.
        release(error, original.device)
        return []
