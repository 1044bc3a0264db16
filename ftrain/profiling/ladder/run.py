"""`ladder`: measure techniques for a step, first each alone, and then stacks of those that help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ftrain import backends, tree
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.oom import is_out_of_memory
from ftrain.errors import FtrainError, OptionError, TraceError, require_positive, require_switches
from ftrain.profiling.anatomy import anatomy_for
from ftrain.profiling.comparison import Original
from ftrain.profiling.hints import facts_of, run_rules
from ftrain.profiling.ladder.record import ALONE, FASTER, SMALLER, Ladder, Row
from ftrain.profiling.ladder.techniques import TECHNIQUES, Case, Technique, replaced_wrappers
from ftrain.profiling.step_variants import length_or_none, nbytes, require_one_rank, require_step
from ftrain.profiling.timing import interval, loading, race
from ftrain.step.autocast import DTYPES
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState

BASE = Technique("", "as given", lambda case: case)
"""The step of the user, without any technique."""

SMALLER_PEAK = 0.99
"""A technique saves memory if its peak is below this share of the peak of the step as given."""

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
    """Measure how much time and memory the techniques of the performance guides save for a step.

    The techniques are those of "Methods and tools for efficient training on a single GPU" in the documentation of
    transformers, and a few more. Each is tried alone; then those that made the step faster are stacked, and so are
    those that made it smaller. All take turns with the step as given, and speeds are relative to it in the same round.
    Memory is that of `ftrain.anatomy`; for a step that reads the value of a tensor it is only measured, and there are
    no hints. A technique that does not apply or fit is a row that says why. `fit` donates, which here is a technique.
    Takes a minute or more, most of it to compile.

    Args:
        step: the step.
        state: its state, which does not change: all steps run on copies.
        batch: a batch.
        data: batches, to measure whether the device waits for them; their position is restored.
        techniques: those to try, by name (``"remat()"``) or by method (``"mixed precision"``), or a `Technique` of your
            own. Default: all of `ftrain.profiling.ladder.TECHNIQUES`.
        stacked: whether to try stacks too.
        throughput: name -> function that counts something in a batch, such as tokens. The first replaces examples in
            the table. Default: batches, if the tensors of the batch do not agree on the number of its examples.
        rounds: number of times that each is timed.

    Raises:
        ComposeError: if `step` is not a `Step`, or runs on several ranks.
        StructureError: if the state is of another step.
        ConsumedError: if the state was donated.
        OptionError: for an unknown technique, a number of rounds that is not positive, a `throughput` of
            something else than functions, or a count that is no number.
        DataError: if the data cannot be iterated several times.
        Exception: any error of the step as given, except running out of memory, which is a result.
    """
    require_step("ladder", step, state)
    require_one_rank("ladder", step)
    require_positive("ladder", "rounds", rounds)
    require_switches("ladder", stacked=stacked)
    chosen = _choose(techniques)
    original = Original(step, state)
    case = Case(step, tree.to(tree.as_tree(batch), original.device))
    length = length_or_none(case.batch)
    counters = _require_counters(throughput, default={"batches": lambda batch: 1} if length is None else {})
    _counts(counters, case.batch)  # Raises its errors before the measurements, which take minutes.
    runner = _Runner(original, case, rounds, counters)
    data_times = None if data is None else loading(step, original.state_for(step), data, original.device)
    base, *others = runner.rows(ALONE, chosen)
    rows, alone = [base, *others], dict(zip(chosen, others, strict=True))
    if stacked:
        for group, stack in ((FASTER, _fastest(alone)), (SMALLER, _smallest(alone, base))):
            if len(stack) > 1:
                rows += runner.rows(group, stack)[1:]
    hints = []
    if base.predicted is not None and base.seconds is not None:
        tried = {each.remedy: row.speed for each, row in alone.items() if each.remedy and row.speed}
        hints = run_rules(facts_of(step, state, case.batch, base.seconds.median, loading=data_times, tried=tried))
    params, device = sum(leaf.numel() for leaf in tree.leaves(state.params)), backends.of(original.device).describe()
    size = "1 batch" if length is None else f"{length:,} examples"
    title = f"{step.base.text}, {params:,} parameters, {size}; {device}"
    return Ladder(title, rows, rounds, data_times, hints)


def _choose(wanted: Sequence[str | Technique] | None) -> list[Technique]:
    if wanted is None:
        return list(TECHNIQUES)
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        raise OptionError(f'ladder: techniques is {wanted!r}; needs a list, such as ["remat()"]')
    chosen: list[Technique] = []
    for name in wanted:
        matches = [each for each in TECHNIQUES if name in (each.name, each.method)]
        if isinstance(name, Technique):
            matches = [name]
        if not matches:
            names = ", ".join(dict.fromkeys(text for each in TECHNIQUES for text in (each.method, each.name)))
            raise OptionError(f"ladder: there is no technique {name!r}; choose from {names}, or pass a Technique")
        chosen += [each for each in matches if each not in chosen]
    if len({each.name for each in chosen}) < len(chosen):
        raise OptionError(f"ladder: two techniques have the same name: {', '.join(each.name for each in chosen)}")
    return chosen


def _fastest(alone: Mapping[Technique, Row]) -> list[Technique]:
    """Return the fastest technique of each method, if its interval shows that it is faster than the step as given."""
    speeds = {each: row.speed for each, row in alone.items() if each.stacks and row.speed is not None}
    return _best({each: -speed.median for each, speed in speeds.items() if speed.low > 1})


def _smallest(alone: Mapping[Technique, Row], base: Row) -> list[Technique]:
    """Return the technique of each method with the lowest peak, if that is lower than that of the step as given."""
    peaks = {each: row.peak for each, row in alone.items() if each.stacks and row.seconds and row.peak is not None}
    return _best({each: peak for each, peak in peaks.items() if peak < SMALLER_PEAK * (base.peak or 0)})


def _best(costs: Mapping[Technique, float]) -> list[Technique]:
    """Return the technique with the lowest cost of each method, in the order of `costs`."""
    best: dict[str, Technique] = {}
    for technique in sorted(costs, key=lambda each: costs[each]):
        best.setdefault(technique.method, technique)
    return [technique for technique in costs if best[technique.method] is technique]


@dataclass
class _Runner:
    """Runs cases in turns with the step as given, and returns their rows."""

    original: Original
    case: Case
    rounds: int
    throughput: Throughput

    def rows(self, group: str, techniques: Sequence[Technique]) -> list[Row]:
        """Return a row for the step as given, and for each technique: alone, or in a stack with those before it."""
        rows: dict[Technique, Row] = {}
        to_run: dict[Technique, Case] = {}
        free = backends.of(self.original.device).free()
        case = self.case
        for number, technique in enumerate((BASE, *techniques)):
            name = f"+ {technique.name}" if group != ALONE and number > 1 else technique.name
            row = Row(group, technique.method, name, _examples(self.case.batch))
            try:
                applied = technique.apply(case)
                row = self._predict(row, applied)
            except Exception as error:  # Of any kind: a technique that does not work is a row.
                if technique is BASE:
                    raise
                rows[technique] = dataclasses.replace(row, note=_reason(error))
                continue
            if free is not None and row.predicted is not None and row.predicted > free:
                sizes = f"{format_bytes(row.predicted)} predicted, {format_bytes(free)} free"
                row = dataclasses.replace(row, note=f"does not fit: {sizes}")
            else:
                to_run[technique] = applied
            rows[technique] = row
            case = case if group == ALONE else applied
        racers = {
            technique: self.original.racer(case.step, case.batch, rows[technique].predicted or 0)
            for technique, case in to_run.items()
        }
        times = race(
            racers, self.rounds, is_result=lambda technique, error: technique is not BASE or is_out_of_memory(error)
        )
        for technique, case in to_run.items():
            rows[technique] = self._measure(rows[technique], case, times[technique], times.get(BASE))
        return list(rows.values())

    def _predict(self, row: Row, case: Case) -> Row:
        """Return a row with the predictions for a case."""
        state = self.original.outline(case.step)
        row = dataclasses.replace(
            row,
            examples=_examples(case.batch),
            emulated=DTYPES.get(case.step.loss.narrow) in backends.of(self.original.device).emulated_dtypes(),
            at_rest=nbytes((state, case.batch)),
        )
        try:
            prediction = anatomy_for("ladder", case.step, state, case.batch)
        except TraceError:
            return row  # The case can still be measured.
        return dataclasses.replace(
            row,
            at_rest=prediction.at_rest.total(),
            predicted=prediction.peak,
            bytes_per_parameter=sum(prediction.bytes_per_parameter.values()),
        )

    def _measure(
        self, row: Row, case: Case, times: list[float] | Exception, base_times: list[float] | Exception | None
    ) -> Row:
        """Return a row with the measurements of a case, or with the reason why it failed."""
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
            rates={name: count / seconds.median for name, count in _counts(self.throughput, case.batch).items()},
            measured=self.original.measured_peak(case.step, case.batch, row.at_rest or 0),
            note=replaced_wrappers(self.original.step, case.step),
        )


def _require_counters(throughput: Any, default: Throughput) -> Throughput:
    """Return `throughput`, or the default for None. Raises an OptionError unless it has functions by name."""
    if throughput is None:
        return default
    if not isinstance(throughput, Mapping) or not all(map(callable, throughput.values())):
        raise OptionError(
            f"ladder: throughput is {throughput!r}; needs functions of a batch by name, such as "
            '{"tokens": lambda batch: batch["tokens"].numel()}'
        )
    return throughput or default


def _counts(throughput: Throughput, batch: PyTree) -> dict[str, float]:
    """Return the count of each function for a batch. Raises an OptionError if it is not a number."""
    counts: dict[str, float] = {}
    for name, count in throughput.items():
        counted: Any = count(batch)
        try:
            counts[name] = float(counted)
        except (TypeError, ValueError, RuntimeError):
            raise OptionError(f"ladder: throughput[{name!r}] returned {counted!r}; needs a number") from None
    return counts


def _examples(batch: PyTree) -> int:
    return length_or_none(batch) or 1


def _reason(error: Exception) -> str:
    if is_out_of_memory(error):
        return "does not fit: out of memory"
    if isinstance(error, FtrainError):
        return str(error)
    return f"fails: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
