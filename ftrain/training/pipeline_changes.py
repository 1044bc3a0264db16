"""Warn when a run continues with another loss, optimizer or wrappers than the checkpoint was saved with."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ftrain.checkpoint.reading import LoadedCheckpoint
from ftrain.errors import warn
from ftrain.optim.schedules.call import text_defines_values
from ftrain.parallel.same_step import option_texts, without_places
from ftrain.step.step import Step

PIPELINE, OPTIONS, LOSS = "pipeline", "options", "loss"
"""Names of the texts in a checkpoint that are compared."""

TOLERANCE = 1e-6
"""Relative difference up to which two rates are equal: a compiled step may have recorded its rate in float32."""


def pipeline_texts(step: Any) -> dict[str, list[str]]:
    """Return the texts of the loss, the optimizer, the wrappers of a `Step` and their options.

    Without the wrappers of the whole step, such as `compiled`, which a run may change. A function has no texts.
    """
    if not isinstance(step, Step):
        return {PIPELINE: [], OPTIONS: [], LOSS: []}
    # Sorted by the part of the step that they work on, because the order of different parts makes no difference.
    wrappers = sorted((each for each in step.wrappers if each.step is None), key=lambda wrapper: wrapper.arrow)
    texts = [step.optimizer.text, *(wrapper.text for wrapper in wrappers)]
    return {
        PIPELINE: [without_places(text, wrappers) for text in texts],
        OPTIONS: option_texts(step, wrappers),
        LOSS: [without_places(step.base.text, ())],
    }


def warn_of_changes(step: Any, checkpoint: LoadedCheckpoint, history: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the step that continues from a checkpoint differs from the step that saved it, or from its history."""
    saved, current = checkpoint.run["record"], pipeline_texts(step)
    changes = _changes(saved.get(LOSS), current[LOSS])
    pipeline_changes = _changes(saved.get(PIPELINE), current[PIPELINE])
    if pipeline_changes:
        changes += pipeline_changes
    else:
        changes += _changes(saved.get(OPTIONS), _options_also_in(saved.get(OPTIONS), current[OPTIONS]))
        changes += _changed_rates(step, history)
    if changes:
        warn(
            f"fit: continues from {checkpoint.path}, which another pipeline has saved; use another directory for a new "
            "run. What has changed:\n  " + "\n  ".join(changes)
        )


def _changes(saved: Sequence[str] | None, current: Sequence[str]) -> list[str]:
    """Return the lines that differ, as a diff; none for texts that a checkpoint of an earlier version lacks."""
    if not saved or not current:
        return []
    return [line for line in difflib.ndiff([*saved], current) if line[0] in "+-"]


def _options_also_in(saved: Sequence[str] | None, options: Sequence[str]) -> list[str]:
    """Return the options that a checkpoint has too: one of an earlier version lacks some."""
    names = {text.partition("=")[0] for text in saved or ()}
    return [text for text in options if text.partition("=")[0] in names]


def _changed_rates(step: Any, history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return as a diff the schedules that are functions of a user and now return another value than in the history."""
    if not isinstance(step, Step) or step.optimizer.factors:
        return []  # The history has the values times factors, which are not known.
    changes = []
    for name, schedule in step.optimizer.schedules.items():
        record = next((record for record in reversed(history) if name in record), None)
        if text_defines_values(schedule) or record is None:
            continue
        try:
            value = float(schedule(record["step"] - 1))
        except Exception:  # It may have no value for past steps, as a table of the next ones.
            continue
        if not math.isclose(value, record[name], rel_tol=TOLERANCE):
            changes += [f"- {name} of step {record['step']} was {record[name]:g}", f"+ its schedule gives {value:g}"]
    return changes
