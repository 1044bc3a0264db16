"""Candidates for the layout of ranks, the microbatches and the rematerialisation, and what is predicted of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ftrain import tree
from ftrain.backends.format_bytes import format_bytes, parse_bytes
from ftrain.errors import BatchError, ComposeError, DeviceError, FtrainError, OptionError
from ftrain.profiling.anatomy import Anatomy, anatomy
from ftrain.profiling.anatomy.kinds import BATCH
from ftrain.profiling.anatomy.mesh_layout import MeshLayout
from ftrain.profiling.anatomy.planned import plan, require_pair
from ftrain.profiling.anatomy.run import whole_state
from ftrain.profiling.step_variants import add_wrapper, length_of, microbatches_of, remove_wrapper, with_microbatches
from ftrain.profiling.tuning.mesh_record import MeshTrial, MeshTrials
from ftrain.profiling.tuning.record import ANY, FULL, NO_REMAT, Remat
from ftrain.step.step import Step
from ftrain.step.traffic import SENT_PER_BYTE
from ftrain.transforms.remat.wrapper import NAME as REMAT
from ftrain.types import PyTree, TrainState

WHOLE, DIVIDED = (0,), (1, 2, 3)
"""The levels that keep the whole state on each rank, and those that divide it."""


def mesh_trials(
    step: Step, state: TrainState | None, batch: PyTree, memory: int | str | None, mesh: tuple[int, int]
) -> MeshTrials:
    """Return what is predicted of a step on the ranks of a mesh, the least time first.

    Args:
        step: the step; `sharded`, `accumulate` and `remat` are chosen anew.
        state: of it. Default: that of the module of its loss.
        batch: that of all ranks.
        memory: of one rank, as for `tune`.
        mesh: (nodes, devices of each).

    Raises:
        OptionError: for no mesh, or no amount of memory.
        BatchError: for a batch that the ranks do not divide.
        DeviceError: when nothing fits.
    """
    if memory is None:
        raise OptionError("tune: the ranks of a mesh need not be here; say what memory each has, as memory='80GB'")
    search = _MeshSearch(step, state, batch, parse_bytes("tune", memory), require_pair("tune", mesh, "nodes, devices"))
    rows = list(search.rows())
    fitting = sorted((row for row in rows if not row.verdict), key=lambda row: (row.estimate, row.layout.level))
    others = [row for row in rows if row.verdict]
    if not fitting:
        raise _nothing_fits(search, rows)
    best = dataclasses.replace(fitting[0], verdict="<- least time")
    ordered = [best, *fitting[1:], *others]
    return MeshTrials(best.step, ordered, search.memory, search.examples, mesh=search.mesh)


class _MeshSearch:
    def __init__(self, step: Step, state: TrainState | None, batch: PyTree, memory: int, mesh: tuple[int, int]) -> None:
        self.memory, self.mesh, self._batch = memory, mesh, batch
        self._ranks, self.examples = mesh[0] * mesh[1], length_of(batch)
        if self.examples % self._ranks:
            raise BatchError(
                f"tune: a batch of {self.examples:,} examples has no equal part for each of {self._ranks:,} ranks; "
                f"{-self.examples % self._ranks:,} examples more would have"
            )
        self._step = remove_wrapper(step, REMAT)
        self._state = state
        self._at_rest = whole_state(self._step, state)
        self._of_level_1: dict[tuple[MeshLayout, Remat], Anatomy] = {}

    def rows(self) -> Iterator[MeshTrial]:
        """Yield for each layout and policy the fewest microbatches that fit, or why none does."""
        for layout in self._layouts():
            least = self._least(layout)
            if least > self.memory:
                verdict = "does not fit: the state alone, or with whole parameters, is larger"
                yield MeshTrial(1, ANY, self._step, least, verdict=verdict, layout=layout)
                continue
            for choice in (FULL, NO_REMAT):  # That which needs least memory first.
                row = self._fewest(layout, choice)
                yield row
                if choice is FULL and row.predicted is not None and row.verdict:
                    break

    def _layouts(self) -> Iterator[MeshLayout]:
        yield from (MeshLayout(self._ranks, 1, level) for level in WHOLE)
        for shard in sorted({self.mesh[1], self._ranks} - {1}):
            yield from (MeshLayout(self._ranks // shard, shard, level) for level in DIVIDED)

    def _least(self, layout: MeshLayout) -> int:
        """Return bytes that a rank needs at the least: its part of the state, and whole parameters below level 3."""
        state = self._at_rest
        params, others = (_bytes(part) for part in (state.params, (state.opt_state, state.frozen, state.slots)))
        return (params + others) // layout.shard + (params if layout.level in (1, 2) else 0)

    def _counts(self) -> list[int]:
        """Numbers of microbatches whose examples the ranks divide, fewest first; 0 where the step keeps its own."""
        try:
            microbatches_of(self._step)
        except ComposeError:
            return [0]
        each = self.examples // self._ranks
        powers = {2**power for power in range(each.bit_length())} | {each}
        return sorted(count for count in powers if each % count == 0)

    def _fewest(self, layout: MeshLayout, choice: Remat) -> MeshTrial:
        counts = self._counts()
        try:
            row = self._predict(layout, choice, counts[-1])
        except FtrainError as error:
            line = str(error).splitlines()[0]
            return MeshTrial(counts[-1], choice, self._step, verdict=f"does not apply: {line}", layout=layout)
        if row.verdict:
            return row
        low, high = 0, len(counts) - 1
        while low < high:
            middle = (low + high) // 2
            other = self._predict(layout, choice, counts[middle])
            if other.verdict:
                low = middle + 1
            else:
                row, high = other, middle
        return row

    def _predict(self, layout: MeshLayout, choice: Remat, microbatches: int) -> MeshTrial:
        parts = self.anatomy(layout, choice, microbatches)
        more = max(microbatches - 2, 0)
        bytes_by_axis, shares = _sent(parts, layout, more), layout.between_nodes(self.mesh[1])
        step = self._compose(choice, microbatches, self._batch)
        # Every rank has the whole batch, and its rows of all microbatches once more.
        batch = _bytes(self._batch) + (_bytes(self._batch) // self._ranks if microbatches > 1 else 0)
        peak = parts.peak + batch - parts.most[BATCH]
        return MeshTrial(
            max(microbatches, 1),
            choice,
            plan("tune", step, layout[:2], layout.level),
            peak,
            _flops(parts, layout, more),
            verdict="" if peak <= self.memory else "does not fit",
            layout=layout,
            sent=round(sum(bytes_by_axis.values())),
            between=round(sum(nbytes * shares[axis] for axis, nbytes in bytes_by_axis.items())),
        )

    def anatomy(self, layout: MeshLayout, choice: Remat, microbatches: int) -> Anatomy:
        """Return the anatomy of at most two microbatches, of which more take no more memory."""
        like = layout._replace(level=1), choice
        if layout.level == 2 and microbatches == 1 and like in self._of_level_1:
            # Levels 1 and 2 differ in what they do between microbatches.
            return dataclasses.replace(self._of_level_1[like], layout=layout)
        simulated = min(microbatches, 2)
        length = self.examples // max(microbatches, 1) * max(simulated, 1)
        batch = tree.map(lambda leaf: leaf[:length] if tree.is_tensor(leaf) and leaf.ndim else leaf, self._batch)
        step = self._compose(choice, simulated, batch)
        parts = anatomy(step, self._state, batch, mesh=layout[:2], level=layout.level)
        if layout.level == 1 and microbatches == 1:
            self._of_level_1[like] = parts
        return parts

    def _compose(self, choice: Remat, microbatches: int, batch: PyTree) -> Step:
        step = add_wrapper(self._step, choice.wrapper) if choice.wrapper else self._step
        return with_microbatches(step, microbatches, batch) if microbatches else step


def _nothing_fits(search: _MeshSearch, rows: list[MeshTrial]) -> DeviceError:
    """Return the error that says what takes least."""
    known = [row for row in rows if row.predicted is not None]
    if not known:
        return DeviceError(f"tune: nothing could be planned: {rows[0].verdict}")
    # Of what was not run on tensors, the bytes are too few.
    least = min(known, key=lambda row: (not row.flops, row.predicted or 0))
    pieces = f"{least.pieces} {'piece' if least.pieces == 1 else 'pieces'}"
    lines = [
        f"tune: nothing fits into {format_bytes(search.memory)} a rank; in {pieces} with remat={least.policy} on "
        f"{least.layout} it is {format_bytes(least.predicted or 0)}. More ranks divide the state further"
    ]
    if least.flops:
        lines.append(repr(search.anatomy(least.layout, least.remat, least.pieces)))
    return DeviceError("\n".join(lines))


def _flops(parts: Anatomy, layout: MeshLayout, more: int) -> int:
    """Return the operations of a step with so many microbatches more than the two of an anatomy."""
    first, second = _starts(parts)
    each = sum(operation.flops for operation in parts.timeline.operations[first[0] : second[0]])
    # To the gradients of the first microbatch nothing was added yet.
    added = parts.params // (layout.shard if layout.level > 1 else 1)
    return sum(parts.flops.values()) + (each + added) * more


def _sent(parts: Anatomy, layout: MeshLayout, more: int) -> dict[str, float]:
    """Return the bytes that a rank sends along each axis, with so many microbatches more than the two of an anatomy."""
    totals, (first, second) = dict.fromkeys(layout.sizes, 0.0), _starts(parts)
    for number, each in enumerate(parts.timeline.collectives):
        times = 1 + more * (first[1] <= number < second[1])
        totals[each.axis] += times * each.nbytes * SENT_PER_BYTE[each.operation](layout.sizes[each.axis])
    return totals


def _starts(parts: Anatomy) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the two microbatches of an anatomy start, in each of which the loss may be called several times."""
    losses = parts.timeline.losses
    return losses[0], losses[len(losses) // 2]


def _bytes(values: PyTree) -> int:
    return sum(int(leaf.nbytes) for leaf in tree.leaves(values) if tree.is_tensor(leaf))
