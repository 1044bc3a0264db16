"""Report for a step that ran out of memory what uses the memory, and which changes would use less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ftrain.errors import FtrainError
from ftrain.profiling.anatomy import anatomy
from ftrain.profiling.comparison import Original
from ftrain.profiling.step_variants import smaller_optimizers
from ftrain.step.compose import compose
from ftrain.step.step import Step
from ftrain.transforms.amp.wrapper import with_amp
from ftrain.transforms.donated import donated
from ftrain.transforms.remat.wrapper import remat
from ftrain.types import PyTree, TrainState

WORTHWHILE = 0.995
"""A variant is listed if its peak is below this share of the peak of the step."""


def memory_report(step: Step, state: TrainState | None, batch: PyTree) -> list[str]:
    """Return the lines of the report: what uses the memory of a step, and which changes would use less."""
    lines, peak = [], 0
    for name, variant in _variants(step):
        # The report is part of an error, which no error of a prediction may replace.
        with suppress(Exception):
            outline = None if state is None else Original(step, state).outline(variant)
            predicted = anatomy(variant, outline, batch, measure=False)
            if variant is step:
                lines, peak = ["", str(predicted), "", "What would need less, by prediction:"], predicted.peak
            elif predicted.peak < WORTHWHILE * peak:
                lines.append(f"  {name:<34} {predicted.peak / peak - 1:+.0%}")
    return [
        *lines,
        "  shorter sequences, ft.losses.linear_cross_entropy for large vocabularies",
        "  fewer trained parameters (trainable=, ft.lora), an optimizer with a smaller state",
        "  (ft.optim.adamw with state_dtype='bf16', ft.optim.adamw_8bit, ft.optim.adafactor), a smaller model",
    ]


def _variants(step: Step) -> Iterator[tuple[str, Step]]:
    """Yield the step itself, and then steps with one or two changes that save memory, by their names."""
    yield "", step
    wrappers = {"ft.donated()": donated(), "ft.remat()": remat(), 'ft.with_amp("bf16")': with_amp("bf16")}
    for names in (*((name,) for name in wrappers), tuple(wrappers)[1:]):
        with suppress(FtrainError):
            yield " and ".join(names), compose(step, *(wrappers[name] for name in names))
    with suppress(FtrainError):
        yield from ((f"ft.optim.{name}", variant) for name, variant in smaller_optimizers(step).items())
