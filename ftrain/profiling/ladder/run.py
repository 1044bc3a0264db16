"""The step as given, with each technique alone, and with those that pay one on top of the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ftrain import backends, tree
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import ComposeError, FtrainError, OptionError, TraceError, require_order, require_positive
from ftrain.profiling.anatomy import anatomy
from ftrain.profiling.anatomy.measured import measure
from ftrain.profiling.hints import Hint, facts_of, run_rules
from ftrain.profiling.ladder.record import ALONE, FASTER, SMALLER, Ladder, Row
from ftrain.profiling.ladder.techniques import TECHNIQUES, Case, Technique, replacement
from ftrain.profiling.step_variants import outline, state_for
from ftrain.profiling.timing import Loading, Racer, interval, loading, race
from ftrain.step.autocast import DTYPES
from ftrain.step.purity import as_tree
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

GIVEN = "as given"
LESS = 0.99
"""Of the peak of the step as given: what saves less does not save memory."""

Counts: TypeAlias = Mapping[str, Callable[[PyTree], float]]


def ladder(
    step: Step,
    state: TrainState,
    batch: PyTree,
    *,
    data: Iterable[PyTree] | None = None,
    techniques: Sequence[str | Technique] | None = None,
    stacked: bool = True,
    throughput: Counts | None = None,
    rounds: int = 9,
) -> Ladder:
    """Return what the techniques of the performance guides bring to a step: time and memory, measured here.

    The techniques are those of "Methods and tools for efficient training on a single GPU" in the documentation of
    transformers, and a few more. Each is tried alone; then those that made the step faster are stacked one on top of
    the other, and those that made it smaller. All take turns with the step as given, and speeds are relative to it in
    the same round. Memory is that of `ftrain.anatomy`; of a step that asks for the value of a tensor it is measured
    alone, and there are no hints. What does not apply is a row that says why, and so is what does not fit into memory.
    Steps run as they are given: `fit` donates, which here is a technique. Takes a minute or more, most of it for what
    is compiled.

    Args:
        step: the step.
        state: a state of it, which is not changed: all run on copies.
        batch: a batch.
        data: batches, to find out whether the device waits for them; their position is restored.
        techniques: those to try, by how they are written or by what the guides call them, or `Technique` of your own;
            default: all of `ftrain.profiling.ladder.TECHNIQUES`.
        stacked: also try stacks.
        throughput: name -> how many of that a batch holds, such as tokens; the first is shown in place of examples.
        rounds: how often each is timed.

    Raises:
        ComposeError: when `step` is no `Step`.
        StructureError: when the state is that of another step.
        ConsumedError: when the state was donated.
        OptionError: for an unknown technique, or a number of rounds that is not positive.
        DataError: when the data cannot be iterated several times.
        Exception: what the step as given raises, except running out of memory, which is a result.
    """
    require_order("ladder", step, state, "ladder(step, state, batch)")
    if not isinstance(step, Step):
        raise ComposeError(f"ladder: the step is {type(step).__name__}; needs a Step, such as ft.train_step returns")
    require_positive("ladder", "rounds", rounds)
    chosen = _chosen(techniques)
    step.require(state)
    given = Case(step, tree.to(as_tree(batch), tree.device_of(state.params)))
    trial = _Trial(given, state, rounds, throughput or {})
    fed = None if data is None else loading(step, state_for(step, step, state), data, trial.device)
    rows = trial.rows(ALONE, {each: _applied(each, given) for each in chosen})
    base, alone = rows[0], dict(zip(chosen, rows[1:], strict=True))
    if stacked:
        for group, climbed in ((FASTER, _fastest(alone)), (SMALLER, _smallest(alone, base))):
            if len(climbed) > 1:
                rows += trial.rows(group, dict(_stack(climbed, given)))[1:]
    hints = [] if base.seconds is None or base.predicted is None else _hints(given, state, base, alone, fed)
    return Ladder(trial.title, rows, rounds, fed, hints)


def _hints(
    given: Case, state: TrainState, base: Row, alone: Mapping[Technique, Row], fed: Loading | None
) -> list[Hint]:
    tried = {row.name: row.speed for row in alone.values() if row.speed is not None}
    parts = anatomy(given.step, state, given.batch, measure=False)
    seconds = base.seconds.median if base.seconds else 0.0
    doubled = tried.get("batch x2")
    return run_rules(
        facts_of(given.step, state, given.batch, parts, seconds, doubled=doubled, loading=fed, tried=tried)
    )


def _chosen(wanted: Sequence[str | Technique] | None) -> list[Technique]:
    if wanted is None:
        return list(TECHNIQUES)
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        raise OptionError(f"ladder: techniques is {wanted!r}; needs a list of names, or of Technique")
    chosen: list[Technique] = []
    for each in wanted:
        matches = (
            [each] if isinstance(each, Technique) else [one for one in TECHNIQUES if each in (one.name, one.method)]
        )
        if not matches:
            names = ", ".join(dict.fromkeys(name for one in TECHNIQUES for name in (one.method, one.name)))
            raise OptionError(f"ladder: there is no technique {each!r}; choices are {names}, and a Technique")
        chosen += [one for one in matches if one not in chosen]
    if len({each.name for each in chosen}) < len(chosen):
        raise OptionError(f"ladder: techniques of one name among {', '.join(each.name for each in chosen)}")
    return chosen


def _applied(technique: Technique, case: Case) -> Case | FtrainError:
    try:
        return technique.apply(case)
    except FtrainError as error:
        return error


def _fastest(alone: Mapping[Technique, Row]) -> list[Technique]:
    """Of each method the fastest technique, if it is faster than the step as given beyond doubt."""
    best: dict[str, tuple[float, Technique]] = {}
    for each, row in alone.items():
        if each.stacks and row.speed is not None and row.speed.low > 1:
            best[each.method] = max(
                best.get(each.method, (0.0, each)), (row.speed.median, each), key=lambda one: one[0]
            )
    return [each for _, each in best.values()]


def _smallest(alone: Mapping[Technique, Row], base: Row) -> list[Technique]:
    """Of each method the technique with the lowest peak, if it is lower than that of the step as given."""
    best: dict[str, tuple[float, Technique]] = {}
    limit = LESS * (base.peak or 0)
    for each, row in alone.items():
        if each.stacks and row.seconds is not None and row.peak is not None and row.peak < limit:
            best[each.method] = min(best.get(each.method, (limit, each)), (row.peak, each), key=lambda one: one[0])
    return [each for _, each in best.values()]


def _stack(climbed: Sequence[Technique], given: Case) -> Iterator[tuple[Technique, Case | FtrainError]]:
    """Put techniques one on top of the other; one that does not fit there is left out above."""
    case = given
    for number, each in enumerate(climbed):
        applied = _applied(each, case)
        yield dataclasses.replace(each, name=f"+ {each.name}" if number else each.name), applied
        case = case if isinstance(applied, FtrainError) else applied


@dataclass
class _Trial:
    """Runs cases beside the step as given, and makes rows of them."""

    given: Case
    state: TrainState
    rounds: int
    counts: Counts

    def __post_init__(self) -> None:
        step, batch = self.given.step, self.given.batch
        self.device = tree.device_of(self.state.params)
        self._resting: dict[str, int] = {}
        params = sum(leaf.numel() for leaf in tree.leaves(self.state.params))
        device = backends.of(self.device).describe()
        self.title = f"{step.base.text}, {params:,} parameters, {_examples(batch):,} examples; {device}"

    def rows(self, group: str, cases: Mapping[Technique, Case | FtrainError]) -> list[Row]:
        """Return a row for the step as given, and one for each case."""
        unchanged = Technique("", GIVEN, lambda case: case)
        cases = {unchanged: self.given, **cases}
        rows = {each.name: self._row(group, each, case) for each, case in cases.items()}
        run = {each.name: case for each, case in cases.items() if isinstance(case, Case) and not rows[each.name].note}
        racers = {name: self._racer(case, rows[name].predicted) for name, case in run.items()}
        times = race(racers, self.rounds, spares=lambda name, error: name != GIVEN or is_out_of_memory(error))
        base = times.get(GIVEN)
        for name, case in run.items():
            rows[name] = self._timed(rows[name], case, times[name], base)
        return list(rows.values())

    def _row(self, group: str, technique: Technique, case: Case | FtrainError) -> Row:
        """What is known of a case before it runs, and in its note why it does not run."""
        row = Row(group, technique.method, technique.name, _examples(self.given.batch))
        if isinstance(case, FtrainError):
            return dataclasses.replace(row, note=str(case))
        row = dataclasses.replace(row, examples=_examples(case.batch), emulated=self._emulates(case.step))
        try:
            begun = outline(case.step, self.given.step, self.state)
            self._resting[row.name] = sum(
                leaf.nbytes for leaf in tree.leaves((begun, case.batch)) if tree.is_tensor(leaf)
            )
            parts = anatomy(case.step, begun, case.batch, measure=False)
        except TraceError:
            return row  # What cannot be predicted can still be measured.
        except Exception as error:  # Of any kind: a technique that does not work is a row.
            if technique.name == GIVEN:
                raise
            return dataclasses.replace(row, note=_reason(error))
        self._resting[row.name] = parts.at_rest.total()
        each = sum(parts.bytes_a_parameter.values())
        row = dataclasses.replace(row, predicted=parts.peak, bytes_a_parameter=each)
        free = backends.of(self.device).free()
        if free is not None and parts.peak > free:
            note = f"does not fit: {format_bytes(parts.peak)} predicted, {format_bytes(free)} free"
            return dataclasses.replace(row, note=note)
        return row

    def _emulates(self, step: Step) -> bool:
        return DTYPES.get(step.loss.narrow) in backends.of(self.device).emulated_dtypes()

    def _racer(self, case: Case, needs: int | None) -> Racer:
        return Racer(case.step, lambda: self._begun(case), case.batch, self.device, needs or 0)

    def _begun(self, case: Case) -> TrainState:
        return state_for(case.step, self.given.step, self.state)

    def _timed(self, row: Row, case: Case, times: list[float] | Exception, base: list[float] | Exception | None) -> Row:
        if isinstance(times, Exception):
            return dataclasses.replace(row, note=_reason(times))
        seconds, speed = interval(times), None
        if isinstance(base, list):
            examples = _examples(self.given.batch)
            speed = interval([row.examples * b / (examples * a) for a, b in zip(times, base, strict=True)])
        rates = {name: count(case.batch) / seconds.median for name, count in self.counts.items()}
        note, measured = replacement(self.given.step, case.step), self._measured(row, case)
        return dataclasses.replace(row, seconds=seconds, speed=speed, rates=rates, measured=measured, note=note)

    def _measured(self, row: Row, case: Case) -> int | None:
        """Bytes at the peak, or None where the second state that it takes does not fit."""
        try:
            return self._resting[row.name] + measure(case.step, self._begun(case), case.batch).beyond_start
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release(error, self.device)
            return None


def _examples(batch: PyTree) -> int:
    return tree.batch_length(batch) or 1


def _reason(error: Exception) -> str:
    """Why something did not run, in one line."""
    if is_out_of_memory(error):
        return "does not fit: out of memory"
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, FtrainError) else f"fails: {type(error).__name__}: {text}"
