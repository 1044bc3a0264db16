"""The step as given, with each technique alone, and with those that pay one on top of the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ftrain import backends, tree
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.oom import is_out_of_memory
from ftrain.errors import FtrainError, OptionError, TraceError, require_positive
from ftrain.profiling.anatomy import anatomy
from ftrain.profiling.comparison import Original
from ftrain.profiling.hints import Hint, Remedy, facts_of, run_rules
from ftrain.profiling.ladder.record import ALONE, FASTER, SMALLER, Ladder, Row
from ftrain.profiling.ladder.techniques import TECHNIQUES, Case, Technique, replaced_wrappers
from ftrain.profiling.step_variants import require_one_rank, require_step
from ftrain.profiling.timing import Loading, interval, loading, race
from ftrain.step.autocast import DTYPES
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

ORIGINAL = "as given"
SMALLER_PEAK = 0.99
"""Share of the peak of the step as given, below which a technique saves memory."""

Throughput: TypeAlias = Mapping[str, Callable[[PyTree], float]]


def ladder(
    step: Step,
    state: TrainState,
    batch: PyTree,
    *,
    data: Iterable[PyTree] | None = None,
    techniques: Sequence[str | Technique] | None = None,
    stacked: bool = True,
    throughput: Throughput | None = None,
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
        ComposeError: when `step` is no `Step`, or runs on several ranks.
        StructureError: when the state is that of another step.
        ConsumedError: when the state was donated.
        OptionError: for an unknown technique, or a number of rounds that is not positive.
        DataError: when the data cannot be iterated several times.
        Exception: what the step as given raises, except running out of memory, which is a result.
    """
    require_step("ladder", step, state)
    require_one_rank("ladder", step)
    require_positive("ladder", "rounds", rounds)
    chosen = _choose(techniques)
    step.require(state)
    case = Case(step, tree.to(tree.as_tree(batch), tree.device_of(state.params)))
    runner = _Runner(Original(step, state), case, rounds, throughput or {})
    data_times = None if data is None else loading(step, runner.original.state_for(step), data, runner.original.device)
    base, *others = runner.rows(ALONE, {technique: _apply(technique, case) for technique in chosen})
    rows, alone = [base, *others], dict(zip(chosen, others, strict=True))
    if stacked:
        for group, stack in ((FASTER, _fastest(alone)), (SMALLER, _smallest(alone, base))):
            if len(stack) > 1:
                rows += runner.rows(group, dict(_stack(stack, case)))[1:]
    hints = [] if base.predicted is None else _hints(runner, base, alone, data_times)
    return Ladder(runner.title, rows, rounds, data_times, hints)


def _hints(runner: _Runner, base: Row, alone: Mapping[Technique, Row], data_times: Loading | None) -> list[Hint]:
    if base.seconds is None:
        return []
    step, state, batch = runner.case.step, runner.original.state, runner.case.batch
    speeds = {each.remedy: row.speed for each, row in alone.items() if row.speed is not None}
    tried = {remedy: speed for remedy, speed in speeds.items() if remedy is not None}
    parts = anatomy(step, state, batch, measure=False)
    doubled = tried.get(Remedy.LARGER_BATCH)
    facts = facts_of(step, state, batch, parts, base.seconds.median, doubled=doubled, loading=data_times, tried=tried)
    return run_rules(facts)


def _choose(wanted: Sequence[str | Technique] | None) -> list[Technique]:
    if wanted is None:
        return list(TECHNIQUES)
    if isinstance(wanted, str) or not isinstance(wanted, Sequence):
        raise OptionError(f"ladder: techniques is {wanted!r}; needs a list of names, or of Technique")
    chosen: list[Technique] = []
    for name in wanted:
        matches = [each for each in TECHNIQUES if name in (each.name, each.method)]
        if isinstance(name, Technique):
            matches = [name]
        if not matches:
            names = ", ".join(dict.fromkeys(text for each in TECHNIQUES for text in (each.method, each.name)))
            raise OptionError(f"ladder: there is no technique {name!r}; choices are {names}, and a Technique")
        chosen += [each for each in matches if each not in chosen]
    if len({each.name for each in chosen}) < len(chosen):
        raise OptionError(f"ladder: techniques of one name among {', '.join(each.name for each in chosen)}")
    return chosen


def _apply(technique: Technique, case: Case) -> Case | FtrainError:
    try:
        return technique.apply(case)
    except FtrainError as error:
        return error


def _fastest(alone: Mapping[Technique, Row]) -> list[Technique]:
    """Return of each method the fastest technique, if its interval says that it is faster than the step as given."""
    speeds = {each: row.speed for each, row in alone.items() if each.stacks and row.speed is not None}
    return _best({each: -speed.median for each, speed in speeds.items() if speed.low > 1})


def _smallest(alone: Mapping[Technique, Row], base: Row) -> list[Technique]:
    """Return of each method the technique with the lowest peak, if it is lower than that of the step as given."""
    peaks = {each: row.peak for each, row in alone.items() if each.stacks and row.seconds and row.peak is not None}
    return _best({each: peak for each, peak in peaks.items() if peak < SMALLER_PEAK * (base.peak or 0)})


def _best(costs: Mapping[Technique, float]) -> list[Technique]:
    """Return of each method the technique that costs least."""
    best: dict[str, Technique] = {}
    for technique in sorted(costs, key=lambda each: costs[each]):
        best.setdefault(technique.method, technique)
    return [technique for technique in costs if best[technique.method] is technique]


def _stack(techniques: Sequence[Technique], case: Case) -> Iterator[tuple[Technique, Case | FtrainError]]:
    """Apply techniques one on top of the other; one that does not apply there is left out above."""
    for number, technique in enumerate(techniques):
        applied = _apply(technique, case)
        yield dataclasses.replace(technique, name=f"+ {technique.name}" if number else technique.name), applied
        case = case if isinstance(applied, FtrainError) else applied


@dataclass
class _Runner:
    """Runs cases in turns with the step as given, and makes rows of them."""

    original: Original
    case: Case
    rounds: int
    throughput: Throughput

    @property
    def title(self) -> str:
        """What is run, and where."""
        step, params = self.original.step, sum(leaf.numel() for leaf in tree.leaves(self.original.state.params))
        device = backends.of(self.original.device).describe()
        return f"{step.base.text}, {params:,} parameters, {_examples(self.case.batch):,} examples; {device}"

    def rows(self, group: str, cases: Mapping[Technique, Case | FtrainError]) -> list[Row]:
        """Return a row for the step as given, and one for each case."""
        cases = {Technique("", ORIGINAL, lambda case: case): self.case, **cases}
        rows = {technique.name: self._predict(group, technique, case) for technique, case in cases.items()}
        run = {each.name: case for each, case in cases.items() if isinstance(case, Case) and not rows[each.name].note}
        racers = {
            name: self.original.racer(case.step, case.batch, rows[name].predicted or 0) for name, case in run.items()
        }
        times = race(racers, self.rounds, is_result=lambda name, error: name != ORIGINAL or is_out_of_memory(error))
        for name, case in run.items():
            rows[name] = self._measure(rows[name], case, times[name], times.get(ORIGINAL))
        return list(rows.values())

    def _predict(self, group: str, technique: Technique, case: Case | FtrainError) -> Row:
        """Return what is known of a case before it runs, with a note if it cannot run."""
        row = Row(group, technique.method, technique.name, _examples(self.case.batch))
        if isinstance(case, FtrainError):
            return dataclasses.replace(row, note=str(case))
        try:
            row = dataclasses.replace(row, examples=_examples(case.batch), emulated=self._is_emulated(case.step))
            state = self.original.outline(case.step)
            at_rest = sum(leaf.nbytes for leaf in tree.leaves((state, case.batch)) if tree.is_tensor(leaf))
            row = dataclasses.replace(row, at_rest=at_rest)
            parts = anatomy(case.step, state, case.batch, measure=False)
        except TraceError:
            return row  # What cannot be predicted can still be measured.
        except Exception as error:  # Of any kind: a technique that does not work is a row.
            if technique.name == ORIGINAL:
                raise
            return dataclasses.replace(row, note=_reason(error))
        free = backends.of(self.original.device).free()
        note = ""
        if free is not None and parts.peak > free:
            note = f"does not fit: {format_bytes(parts.peak)} predicted, {format_bytes(free)} free"
        return dataclasses.replace(
            row,
            at_rest=parts.at_rest.total(),
            predicted=parts.peak,
            bytes_a_parameter=sum(parts.bytes_a_parameter.values()),
            note=note,
        )

    def _is_emulated(self, step: Step) -> bool:
        return DTYPES.get(step.loss.narrow) in backends.of(self.original.device).emulated_dtypes()

    def _measure(
        self, row: Row, case: Case, times: list[float] | Exception, base_times: list[float] | Exception | None
    ) -> Row:
        if isinstance(times, Exception):
            return dataclasses.replace(row, note=_reason(times))
        seconds, speed = interval(times), None
        if isinstance(base_times, list):
            size = row.examples / _examples(self.case.batch)
            speed = interval([size * base / time for time, base in zip(times, base_times, strict=True)])
        return dataclasses.replace(
            row,
            seconds=seconds,
            speed=speed,
            rates={name: count(case.batch) / seconds.median for name, count in self.throughput.items()},
            measured=self.original.measured_peak(case.step, case.batch, row.at_rest or 0),
            note=replaced_wrappers(self.original.step, case.step),
        )


def _examples(batch: PyTree) -> int:
    return tree.batch_length(batch) or 1


def _reason(error: Exception) -> str:
    """Return why something did not run, in one line."""
    if is_out_of_memory(error):
        return "does not fit: out of memory"
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, FtrainError) else f"fails: {type(error).__name__}: {text}"
