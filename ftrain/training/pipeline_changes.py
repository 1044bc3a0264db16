"""Warn when a run continues with another loss, optimizer or wrappers than the checkpoint was saved with."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ftrain.checkpoint.reading import LoadedCheckpoint
from ftrain.errors import warn
from ftrain.optim.schedules.call import is_told_by_text
from ftrain.parallel.same_step import option_texts, without_places
from ftrain.step.step import Step

PIPELINE, OPTIONS, LOSS = "pipeline", "options", "loss"
"""The names in a checkpoint of the texts that are compared."""

TOLERANCE = 1e-6
"""Relative difference up to which two rates are the same: those of a compiled step may be in float32."""


def pipeline_texts(step: Any) -> dict[str, list[str]]:
    """Return the loss, the optimizer and the wrappers of a `Step`, and their options.

    Not how it runs, which a run may change. A step of another class has none.
    """
    if not isinstance(step, Step):
        return {PIPELINE: [], OPTIONS: [], LOSS: []}
    # By the part that they work on: the order of those of different parts makes no difference.
    wrappers = sorted((wrapper for wrapper in step.wrappers if wrapper.step is None), key=lambda each: each.arrow)
    texts = [step.optimizer.text, *(wrapper.text for wrapper in wrappers)]
    return {
        PIPELINE: [without_places(text, wrappers) for text in texts],
        OPTIONS: option_texts(step, wrappers),
        LOSS: [without_places(step.base.text, ())],
    }


def warn_of_changes(step: Any, checkpoint: LoadedCheckpoint, history: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the pipeline of a checkpoint differs from the step that continues from it, and from its history."""
    record, now = checkpoint.run["record"], pipeline_texts(step)
    changes = _changes(record.get(LOSS), now[LOSS])
    changes += _changes(record.get(PIPELINE), now[PIPELINE]) or [
        *_changes(record.get(OPTIONS), _known(now[OPTIONS], record.get(OPTIONS))),
        *_changed_rates(step, history),
    ]
    if changes:
        warn(
            f"fit: continues from {checkpoint.path}, which another pipeline has saved; use another directory for a new "
            "run. What has changed:\n  " + "\n  ".join(changes)
        )


def _changes(saved: Sequence[str] | None, now: Sequence[str]) -> list[str]:
    # Checkpoints of earlier versions lack some of the texts.
    return [line for line in difflib.ndiff([*saved], now) if line[0] in "+-"] if saved and now else []


def _known(options: Sequence[str], saved: Sequence[str] | None) -> list[str]:
    """Return the options that a checkpoint has, which an earlier version may have saved."""
    names = {text.partition("=")[0] for text in saved or ()}
    return [text for text in options if text.partition("=")[0] in names]


def _changed_rates(step: Any, history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the functions that are schedules, whose text says little, with the newest values that they gave."""
    if not isinstance(step, Step) or step.optimizer.factors:  # The factors of the newest step are not known any more.
        return []
    changes = []
    for name, schedule in step.optimizer.schedules.items():
        record = next((each for each in reversed(history) if name in each), None)
        if is_told_by_text(schedule) or record is None:
            continue
        try:
            value = float(schedule(record["step"] - 1))
        except Exception:  # It need not have a value for steps that are made, as a table of the next ones.
            continue
        if not math.isclose(value, record[name], rel_tol=TOLERANCE):
            changes += [f"- {name} of step {record['step']} was {record[name]:g}", f"+ its schedule gives {value:g}"]
    return changes
