"""Advice when memory runs out: where the memory of a step goes, and what would need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ftrain.errors import FtrainError
from ftrain.profiling.anatomy import Anatomy, anatomy
from ftrain.profiling.step_variants import outline, smaller_optimizers
from ftrain.step.step import Step, compose
from ftrain.transforms.amp.wrapper import with_amp
from ftrain.transforms.donated import donated
from ftrain.transforms.remat.wrapper import remat
from ftrain.types import PyTree, TrainState

WORTHWHILE = 0.995
"""Share of the peak of a step, below which another step is listed."""

SMALLER_STATES = (
    "  fewer parameters that train (trainable=, ft.lora), an optimizer with a smaller state",
    "  (ft.optim.adamw with state_dtype='bf16', ft.optim.adamw_8bit, ft.optim.adafactor), a smaller model",
)


def shortage(step: Step, state: TrainState | None, batch: PyTree) -> list[str]:
    """Return lines that show where the memory of a step goes, and what would need less."""
    lines, parts = [], _predict(step, state, batch)
    if parts is not None:
        lines += ["", str(parts), "", "What would need less, by prediction:"]
        for name, variant in _variants(step):
            with suppress(FtrainError):
                smaller = _predict(variant, None if state is None else outline(variant, step, state), batch)
                if smaller is not None and smaller.peak < WORTHWHILE * parts.peak:
                    lines.append(f"  {name:<34} {smaller.peak / parts.peak - 1:+.0%}")
    return [*lines, "  shorter sequences, ft.losses.linear_cross_entropy for large vocabularies", *SMALLER_STATES]


def _predict(step: Step, state: TrainState | None, batch: PyTree) -> Anatomy | None:
    """Return the predicted anatomy, or None where there is none: the error that is reported matters more."""
    try:
        return anatomy(step, state, batch, measure=False)
    except Exception:  # Of any kind.
        return None


def _variants(step: Step) -> Iterator[tuple[str, Step]]:
    wrappers = {"ft.donated()": donated(), "ft.remat()": remat(), 'ft.with_amp("bf16")': with_amp("bf16")}
    for names in (*((name,) for name in wrappers), tuple(wrappers)[1:]):
        with suppress(FtrainError):
            yield " and ".join(names), compose(step, *(wrappers[name] for name in names))
    with suppress(FtrainError):
        yield from ((f"ft.optim.{name}", variant) for name, variant in smaller_optimizers(step).items())
