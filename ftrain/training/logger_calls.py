"""Call the loggers of a run, and their `rewind`."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from ftrain.errors import add_note
from ftrain.training.loggers import Logger, Record


def rewind_loggers(loggers: Sequence[Logger], step: int, count: int) -> None:
    """Call ``rewind(step, count)`` of the loggers that have it."""
    for logger in loggers:
        if callable(rewind := getattr(logger, "rewind", None)):
            rewind(step, count)


def call_loggers(loggers: Sequence[Logger], records: Sequence[Record]) -> None:
    """Pass records to every logger, also to those after one that fails. Raises the error of that logger."""
    if loggers:
        record: Record = {}
        try:
            for record in records:
                # A copy, so that a logger that changes it, or a list in it, does not change the history.
                loggers[0](copy.deepcopy(record))
        except Exception as error:
            steps = f"{record['step']} to {records[-1]['step']}"
            add_note(
                error, f"fit: the records of steps {steps} are not logged again by {loggers[0]!r}; history has them"
            )
            raise
        finally:
            call_loggers(loggers[1:], records)
