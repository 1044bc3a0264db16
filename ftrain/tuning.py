"""The microbatch and the rematerialisation that make a step fastest within so much memory."""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ftrain import backends, tree
from ftrain.anatomy import anatomy
from ftrain.anatomy.timeline import UPDATE
from ftrain.checks import require_positive
from ftrain.errors import BatchError, ComposeError, DeviceError, FtrainError, OptionError
from ftrain.evaluate import eval_step
from ftrain.pieces import cut, is_out_of_memory, release
from ftrain.purity import as_tree
from ftrain.shortage import shortage
from ftrain.step import Step
from ftrain.timing import Interval, Racer, interval, race
from ftrain.transforms.remat import remat
from ftrain.types import PyTree, TrainState
from ftrain.variants import having, in_pieces_of, length_of, outline, pieces_of, smaller_optimizers, state_for, without

NONE, OWN = "none", "as given"
BUDGETS = 0.75, 0.5, 0.25
MOST = 6
"""Candidates that are timed."""

SAME, SAME_NARROW = 1e-3, 1e-2
"""By how much losses may differ that are the same, relative to the largest of them; in 16 bits."""

UNTRIED = "computes more, or in more pieces"
ROUNDS = 5
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)
log = logging.getLogger("ftrain")


@dataclass(frozen=True)
class Trial:
    """A microbatch with a policy, and what was found of it.

    Args:
        pieces: in how many pieces the batch is taken.
        policy: what is rematerialised.
        step: the step composed so.
        predicted: bytes at the peak; None where that was not possible.
        flops: floating-point operations of a step.
        seconds: of a step; None where it was not timed.
        measured: bytes at the peak; of the fastest alone.
        verdict: what became of it.
    """

    pieces: int
    policy: str
    step: Step = dataclasses.field(repr=False)
    predicted: int | None = None
    flops: int = 0
    seconds: Interval | None = None
    measured: int | None = None
    verdict: str = ""


@dataclass(frozen=True)
class Trials:
    """What `tune` tried; `print` shows it.

    Args:
        step: the one that was chosen.
        rows: all that were tried.
        memory: bytes that there are.
        examples: in a batch.
    """

    step: Step
    rows: Sequence[Trial]
    memory: int
    examples: int

    def __repr__(self) -> str:
        least = min((row.flops for row in self.rows if row.flops), default=1)
        lines = [f"{self.examples:,} examples within {_mib(self.memory)}", ""]
        lines.append(f"{'pieces':>6}  {'remat':<12} {'predicted':>12} {'FLOP':>6} {'ms a step':>10} {'examples/s':>11}")
        for row in self.rows:
            took = row.seconds.median if row.seconds else None
            cells = [
                f"{row.pieces:>6}  {row.policy:<12}",
                f"{'' if row.predicted is None else _mib(row.predicted):>12}",
                f"{f'x{row.flops / least:.2f}' if row.flops else '':>6}",
                f"{'' if took is None else f'{took * 1e3:,.1f}':>10}",
                f"{'' if took is None else f'{self.examples / took:,.1f}':>11}",
            ]
            lines.append(f"{' '.join(cells)}  {row.verdict}".rstrip())
        return "\n".join(lines)


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
    with all that was tried, which is also logged.

    Args:
        step: the step. `accumulate` and `remat` may be in it already, and are then chosen anew.
        state: a state of it, which is left as it is; copies run beside it. Without one, that of the module of its
            loss, which may be on the device ``meta``; nothing is timed then, and what computes least is taken.
        batch: a batch, as large as those to come; on ``meta``, nothing is timed.
        memory: bytes for state, batch and step together, as a number or as in ``"8GB"`` (10^9) and ``"8GiB"`` (2^30);
            unless told, what the device has free and what the state has of it. The step is looked at as it is given:
            `fit` donates, and then takes less; ``ft.donated()`` says so here.
        rounds: how often each is timed.

    Raises:
        ComposeError: for what is no `Step`.
        StructureError: for another state, or none where the loss is no module.
        ConsumedError: for a state that was donated.
        OptionError: for no amount of memory, or one below the state itself; the message says what takes it.
        DeviceError: when nothing fits, with the anatomy of what takes least, or when the device cannot tell what is
            free.
    """
    found = trials(step, state, batch, memory=memory, rounds=rounds)
    log.info("tune: %s\n%s", found.step, found)
    return found.step


def trials(
    step: Step, state: TrainState | None, batch: PyTree, *, memory: int | str | None = None, rounds: int = ROUNDS
) -> Trials:
    """Do what `tune` does, and return all that was tried with the step that was chosen.

    Raises:
        FtrainError: as `tune` does.
    """
    if not isinstance(step, Step):
        raise ComposeError(f"tune: the step is {type(step).__name__}; needs a Step, such as ft.train_step returns")
    require_positive("tune", "rounds", rounds)
    if state is not None:
        step.require(state)
        batch = tree.to(as_tree(batch), tree.device_of(state.params))
    search = _Search(step, state, as_tree(batch), memory)
    rows = search.predicted()
    fitting = [row for row in rows if not row.verdict]
    if not fitting:
        raise _nothing_fits(search, rows)
    fitting.sort(key=lambda row: ((row.pieces, row.policy) != search.given, row.flops, row.pieces))
    timed = search.timed(fitting[:MOST], rounds)
    chosen, tried = search.verified(timed)
    known = {(row.pieces, row.policy): row for row in [*rows, *tried]}
    rows = [row if row.verdict else dataclasses.replace(row, verdict=UNTRIED) for row in known.values()]
    return Trials(chosen, rows, search.memory, tree.batch_length(search.batch) or 1)


class _Search:
    """Candidates, what is predicted of them, and what is measured.

    Args:
        step: as given.
        state: of it, or None.
        batch: the batch.
        memory: as given.
    """

    def __init__(self, step: Step, state: TrainState | None, batch: PyTree, memory: int | str | None) -> None:
        self.step, self.state, self.batch = step, state, batch
        told = as_bytes(memory) if memory is not None else None
        resting = anatomy(step, state, batch, measure=False, fuse=False).at_rest
        self.memory = told if told is not None else self._free() + resting.total()
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
        rows, plain = [self._predicted(*self.given)] * (self.given[1] == OWN), 0
        if self.whole:
            rows.append(Trial(2 * max(self.given[0], 1), "any", self.step, verdict=f"does not apply: {self.whole}"))
        for pieces in self._counts():
            own, *others = (self._predicted(pieces, policy) for policy in (NONE, "full"))
            rows.append(own)
            if not own.verdict:
                # Smaller pieces compute no less; the next ones may suit the caches better.
                plain += 1
                if plain == 2:
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
            return pieces_of(self.step), self._policy
        return 0, self._policy

    @property
    def _policy(self) -> str:
        return OWN if any(wrapper.name == "remat" for wrapper in self.step.wrappers) else NONE

    def _counts(self) -> Iterator[int]:
        """In how many pieces the batch can be taken, fewest first; 0 for those that it is taken in."""
        try:
            own, length = pieces_of(self.step), length_of(self.batch)
        except (BatchError, ComposeError):
            own = length = 0
        if not length or self.whole:
            yield own
            return
        powers = {2**power * many for power in range(length.bit_length()) for many in (1, own)}
        yield from sorted(count for count in {*powers, own, length} if count <= length and length % count == 0)

    @functools.cached_property
    def whole(self) -> str:
        """Why the batch stays in the pieces it is taken in: others are seen to change the loss."""
        if self.state is None or not self.runs:
            return ""
        evaluated = eval_step(self.step.loss)
        try:
            whole, *halves = (evaluated(self.state, each)["loss"] for each in (self.batch, *cut(self.batch, 2)))
        except Exception as error:  # Of whatever kind: some losses are for training alone, and memory may run out.
            release(error, tree.device_of(self.state.params))
            return ""
        told, joined = float(whole), float(functools.reduce(lambda a, b: a + b, halves))
        largest = max(abs(told), *(abs(float(half)) for half in halves))
        if abs(told - joined) <= largest * (SAME_NARROW if self.step.loss.narrow else SAME) or told != told:
            return ""
        return f"the loss of the batch is {told:.4g}, and over its halves {joined:.4g}; return a Mean(total, weight)"

    def _composed(self, pieces: int, policy: str, batch: PyTree) -> Step:
        step = in_pieces_of(self.step, pieces, batch) if pieces and pieces != pieces_of(self.step) else self.step
        if policy == OWN:
            return step
        step = without(step, "remat")
        if policy == NONE:
            return step
        share = policy.removeprefix("budget=")
        return having(step, remat(budget=float(share)) if share != policy else remat(policy))

    def _predicted(self, pieces: int, policy: str) -> Trial:
        try:
            step = self._composed(pieces, policy, self.batch)
            peak, flops = self._size(pieces, policy)
        except FtrainError as error:
            return Trial(pieces, policy, self.step, verdict=f"does not apply: {str(error).splitlines()[0]}")
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
        found = anatomy(step, self.outline(step), batch, measure=False, fuse=False)
        again = sum(each.flops for each in found.timeline.operations if each.phase != UPDATE)
        flops = sum(found.flops.values()) + again * max(pieces - 2, 0) // 2
        return found.peak + _bytes(self.batch) - _bytes(batch), flops

    def shortage(self, row: Trial) -> list[str]:
        """Return lines that show where the memory of a candidate goes: of two pieces, where it has more."""
        step, batch = self._shown(row.pieces, row.policy) if row.pieces else (row.step, self.batch)
        return shortage(step, self.outline(step), batch)

    def outline(self, step: Step) -> TrainState | None:
        """Return the state as one of another step, without taking memory."""
        return None if self.state is None else outline(step, self.step, self.state)

    def timed(self, rows: Sequence[Trial], rounds: int) -> list[Trial]:
        """Return candidates with their times, fastest first; where nothing can run, those that compute least."""
        state = self.state
        if state is None or not self.runs:
            return sorted(rows, key=lambda row: (row.flops, row.pieces))
        racers = {str(index): self._racer(row, state) for index, row in enumerate(rows)}
        done = []
        for row, times in zip(rows, race(racers, rounds, spares=_no_memory).values(), strict=True):
            if isinstance(times, Exception):
                done.append(dataclasses.replace(row, verdict="ran out of memory"))
            else:
                done.append(dataclasses.replace(row, seconds=interval(times), verdict="slower"))
        return sorted(done, key=lambda row: row.seconds.median if row.seconds else float("inf"))

    def _racer(self, row: Trial, state: TrainState) -> Racer:
        device = tree.device_of(state.params)
        return Racer(row.step, lambda: state_for(row.step, self.step, state), self.batch, device, row.predicted or 0)

    def verified(self, rows: Sequence[Trial]) -> tuple[Step, list[Trial]]:
        """Return the step of the first whose peak is measured within the limit, and the candidates."""
        done = list(rows)
        for index, row in enumerate(done):
            if row.seconds is None and self.runs:
                continue
            measured = self._measured(row.step)
            if measured is None or measured <= self.memory:
                done[index] = dataclasses.replace(row, measured=measured, verdict=_chosen(row, measured))
                return row.step, done
            done[index] = dataclasses.replace(row, measured=measured, verdict=f"takes {_mib(measured)}, measured")
        raise _nothing_fits(self, done)

    def _measured(self, step: Step) -> int | None:
        """Bytes at the peak; None where nothing runs, or the further state that it takes does not fit."""
        if self.state is None or not self.runs:
            return None
        try:
            return anatomy(step, state_for(step, self.step, self.state), self.batch, fuse=False).measured
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            release(error, tree.device_of(self.state.params))
            return None


def _no_memory(name: str, error: Exception) -> bool:
    return is_out_of_memory(error)


def _chosen(row: Trial, measured: int | None) -> str:
    if row.seconds is None:
        return "<- computes least"
    return f"<- fastest; {'not measured' if measured is None else f'{_mib(measured)} measured'}"


def as_bytes(memory: int | str) -> int:
    """Return an amount of memory in bytes.

    Raises:
        OptionError: for what is no such amount.

    >>> as_bytes("8GB"), as_bytes("1.5 GiB"), as_bytes(1024)
    (8000000000, 1610612736, 1024)
    """
    found = SIZE.fullmatch(memory.strip()) if isinstance(memory, str) else None
    if found:
        base = 1024 if found[3] else 1000
        return int(float(found[1]) * base ** " kmgt".index(found[2].lower() or " "))
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise OptionError(f"tune: memory is {memory!r}; needs bytes, as a number or as in '8GB' or '512MiB'")
    return memory


def _bytes(batch: PyTree) -> int:
    return sum(leaf.nbytes for leaf in tree.leaves(batch) if tree.is_tensor(leaf))


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _below(search: _Search, resting: Counter[str]) -> OptionError:
    total = _mib(resting.total())
    lines = [f"tune: memory is {_mib(search.memory)}, and the state and the batch alone take {total}:"]
    lines += [f"  {kind:<34} {_mib(size):>12}" for kind, size in resting.items()]
    lines.append("What would take less:")
    with suppress(FtrainError):
        for name, other in smaller_optimizers(search.step).items():
            size = anatomy(other, search.outline(other), search.batch, measure=False, fuse=False).at_rest.total()
            lines.append(f"  {f'ft.optim.{name}':<34} {_mib(size):>12}")
    return OptionError("\n".join([*lines, "  fewer parameters that train (trainable=, ft.lora), a smaller model"]))


def _nothing_fits(search: _Search, rows: Sequence[Trial]) -> DeviceError:
    known = [row for row in rows if row.predicted is not None]
    if not known:
        return DeviceError(f"tune: nothing could be tried: {rows[0].verdict}")
    least = min(known, key=lambda row: row.measured or row.predicted or 0)
    size = _mib(least.measured or least.predicted or 0)
    least_of_all = f"in {least.pieces} piece{'s' * (least.pieces != 1)} with remat={least.policy} it is {size}"
    head = f"tune: nothing fits into {_mib(search.memory)}; {least_of_all}"
    other = [f"Other pieces do not apply: {search.whole}"] * bool(search.whole)
    return DeviceError("\n".join([head, *other, *search.shortage(least)]))
