"""What to tell those who have not enough memory: where it goes, and what would need less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ftrain.errors import FtrainError
from ftrain.profiling.anatomy import Anatomy, anatomy
from ftrain.profiling.step_variants import outline, smaller_optimizers
from ftrain.step.compose import compose
from ftrain.step.step import Step
from ftrain.transforms.amp.wrapper import with_amp
from ftrain.transforms.donated import donated
from ftrain.transforms.remat.wrapper import remat
from ftrain.types import PyTree, TrainState

WORTH = 0.995
"""Of the memory of a step, what another one may take at most to be worth a line."""


def shortage(step: Step, state: TrainState | None, batch: PyTree) -> list[str]:
    """Return lines that show where the memory of a step goes, and what would need less."""
    lines, found = [], peak_of(step, state, batch)
    if found is not None:
        lines += ["", str(found), "", "What would need less, by prediction:"]
        lines += [f"  {name:<34} {size / found.peak - 1:+.0%}" for name, size in _smaller(step, state, batch, found)]
    return [
        *lines,
        "  shorter sequences, fewer parameters that train (trainable=, ft.lora), an optimizer with a smaller state",
        "  (state_dtype='bf16', adamw_8bit), ft.losses.linear_cross_entropy for large vocabularies",
    ]


def peak_of(step: Step, state: TrainState | None, batch: PyTree) -> Anatomy | None:
    """Return what `anatomy` predicts, or None where it cannot: the error that is being told of matters more."""
    try:
        return anatomy(step, state, batch, measure=False)
    except Exception:  # Of whatever kind.
        return None


def _smaller(step: Step, state: TrainState | None, batch: PyTree, found: Anatomy) -> Iterator[tuple[str, int]]:
    """Predicted peaks of a step with what it does not have, as far as they are lower."""
    for name, other in _ways(step):
        try:
            there = None if state is None else outline(other, step, state)
        except FtrainError:
            continue
        least = peak_of(other, there, batch)
        if least is not None and least.peak < WORTH * found.peak:
            yield name, least.peak


def _ways(step: Step) -> Iterator[tuple[str, Step]]:
    ways = {"ft.donated()": donated(), "ft.remat()": remat(), 'ft.with_amp("bf16")': with_amp("bf16")}
    for names in (*((name,) for name in ways), tuple(ways)[1:]):
        with suppress(FtrainError):
            yield " and ".join(names), compose(step, *(ways[name] for name in names))
    with suppress(FtrainError):
        yield from ((f"ft.optim.{name}", other) for name, other in smaller_optimizers(step).items())
