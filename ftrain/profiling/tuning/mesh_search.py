"""Candidates for the layout of ranks, the microbatches and the rematerialisation, with their predictions."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator

from ftrain.backends.format_bytes import format_bytes, parse_bytes
from ftrain.errors import BatchError, DeviceError, FtrainError, OptionError
from ftrain.profiling.anatomy import Anatomy, anatomy_for
from ftrain.profiling.anatomy.kinds import BATCH
from ftrain.profiling.anatomy.planned import MeshLayout, plan, require_pair
from ftrain.profiling.anatomy.predicted import whole_state
from ftrain.profiling.step_variants import length_of, nbytes, remove_wrapper
from ftrain.profiling.tuning.candidates import (
    candidate,
    counts,
    flops_with,
    microbatch_starts,
    microbatches_or_zero,
    nothing_fits,
    with_at_most_two,
)
from ftrain.profiling.tuning.record import ANY, FULL, NO_REMAT, MeshTrial, MeshTrials
from ftrain.step.step import Step
from ftrain.step.traffic import SENT_PER_BYTE
from ftrain.transforms.remat.wrapper import NAME as REMAT
from ftrain.types import PyTree, TrainState


def mesh_trials(
    step: Step, state: TrainState | None, batch: PyTree, memory: int | str | None, mesh: tuple[int, int]
) -> MeshTrials:
    """Return the predictions for a step on the ranks of a mesh, the least time first. Raises as `tune` does."""
    if memory is None:
        raise OptionError("tune: the ranks of a mesh may not exist; pass the memory of each, such as memory='80GB'")
    search = _MeshSearch(step, state, batch, parse_bytes("tune", memory), require_pair("tune", mesh, "nodes, devices"))
    rows = list(search.rows())
    fitting = sorted((row for row in rows if row.fits), key=lambda row: (row.estimate, row.layout.level))
    if not fitting:
        raise DeviceError(nothing_fits(rows, f"{format_bytes(search.memory)} per rank", search.advice))
    best = dataclasses.replace(fitting[0], verdict="<- least time")
    ordered = [best, *fitting[1:], *(row for row in rows if not row.fits)]
    return MeshTrials(best.step, ordered, search.memory, search.examples, mesh=search.mesh)


class _MeshSearch:
    def __init__(self, step: Step, state: TrainState | None, batch: PyTree, memory: int, mesh: tuple[int, int]) -> None:
        self.memory, self.mesh, self._batch = memory, mesh, batch
        self._ranks, self.examples = mesh[0] * mesh[1], _require_examples(batch)
        if self.examples % self._ranks:
            raise BatchError(
                f"tune: {self._ranks:,} ranks do not divide a batch of {self.examples:,} examples; add "
                f"{-self.examples % self._ranks:,} examples"
            )
        self._step = remove_wrapper(step, REMAT)
        self._state = state
        self._current_microbatches = microbatches_or_zero(step)
        self._initial = whole_state("tune", self._step, state)

    def rows(self) -> Iterator[MeshTrial]:
        """Yield for each layout and choice of rematerialisation the fewest microbatches that fit, or why none does."""
        for layout in self._layouts():
            least = self._least(layout)
            if least > self.memory:
                verdict = "does not fit: the state alone, or with whole parameters, is larger"
                yield MeshTrial(1, ANY, self._step, least, verdict=verdict, layout=layout)
                continue
            for choice in (FULL, NO_REMAT):  # FULL needs less memory.
                row = self._fewest(layout, choice)
                yield row
                if choice == FULL and row.predicted is not None and not row.fits:
                    break

    def _layouts(self) -> Iterator[MeshLayout]:
        yield MeshLayout(self._ranks, 1, level=0)
        for shard in sorted({self.mesh[1], self._ranks} - {1}):
            yield from (MeshLayout(self._ranks // shard, shard, level) for level in (1, 2, 3))

    def _least(self, layout: MeshLayout) -> int:
        """Return a lower bound of the bytes of a rank: its part of the state, and whole parameters below level 3."""
        state = self._initial
        params, others = nbytes(state.params), nbytes((state.opt_state, state.frozen, state.slots))
        return (params + others) // layout.shard + (params if layout.level in (1, 2) else 0)

    def _fewest(self, layout: MeshLayout, choice: str) -> MeshTrial:
        possible = counts(self.examples // self._ranks, self._current_microbatches)
        try:
            row = self._predict(layout, choice, possible[-1])
        except FtrainError as error:
            line = str(error).splitlines()[0]
            return MeshTrial(possible[-1], choice, self._step, verdict=f"does not apply: {line}", layout=layout)
        if not row.fits:
            return row
        rows = {possible[-1]: row}

        def fits(microbatches: int) -> bool:
            rows[microbatches] = self._predict(layout, choice, microbatches)
            return rows[microbatches].fits

        fewest = bisect_left(possible, True, hi=len(possible) - 1, key=fits)
        return rows[possible[fewest]]

    def _predict(self, layout: MeshLayout, choice: str, microbatches: int) -> MeshTrial:
        simulated = self.anatomy(layout, choice, microbatches)
        more = max(microbatches - 2, 0)
        bytes_by_axis, shares = _sent(simulated, layout, more), layout.between_nodes(self.mesh[1])
        # Every rank has the whole batch, and a copy of its rows of all microbatches.
        batch = nbytes(self._batch) + (nbytes(self._batch) // self._ranks if microbatches > 1 else 0)
        peak = simulated.peak + batch - simulated.most[BATCH]
        fits = peak <= self.memory
        return MeshTrial(
            max(microbatches, 1),
            choice,
            plan("tune", candidate(self._step, microbatches, choice, self._batch), layout[:2], layout.level),
            peak,
            fits,
            flops_with(simulated, more),
            verdict="" if fits else "does not fit",
            layout=layout,
            sent=round(sum(bytes_by_axis.values())),
            between=round(sum(nbytes * shares[axis] for axis, nbytes in bytes_by_axis.items())),
        )

    def anatomy(self, layout: MeshLayout, choice: str, microbatches: int) -> Anatomy:
        """Return the anatomy of at most two microbatches, since more do not take more memory."""
        step, batch = with_at_most_two(self._step, microbatches, choice, self._batch)
        return anatomy_for("tune", step, self._state, batch, mesh=layout[:2], level=layout.level)

    def advice(self, least: MeshTrial) -> str:
        """Return what to do if nothing fits, with the anatomy of the candidate that needs least."""
        text = ". More ranks divide the state further"
        if not least.flops:  # Only a lower bound of its bytes is known.
            return text
        return f"{text}\n{self.anatomy(least.layout, least.policy, least.microbatches)}"


def _require_examples(batch: PyTree) -> int:
    try:
        return length_of(batch)
    except BatchError as error:
        raise BatchError(
            f"tune: {error}, and ranks divide its examples; its tensors and arrays need a first axis of one length, "
            "and must be in dicts, lists, tuples or registered classes"
        ) from None


def _sent(simulated: Anatomy, layout: MeshLayout, more: int) -> dict[str, float]:
    """Return the bytes that a rank sends along each axis, with `more` microbatches than were simulated."""
    totals, (first, second) = dict.fromkeys(layout.sizes, 0.0), microbatch_starts(simulated)
    for index, collective in enumerate(simulated.timeline.collectives):
        is_of_first_microbatch = first[1] <= index < second[1]
        times = 1 + more if is_of_first_microbatch else 1
        sent_per_byte = SENT_PER_BYTE[collective.operation](layout.sizes[collective.axis])
        totals[collective.axis] += times * collective.nbytes * sent_per_byte
    return totals
