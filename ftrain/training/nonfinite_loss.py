"""Warn about a loss that is infinite or NaN, or raise an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftrain.checkpoint import Checkpoints
from ftrain.errors import NonFiniteError, require_choice, warn

WARN, RAISE, IGNORE = "warn", "raise", "ignore"


class NonFiniteLossCheck:
    """Checks records for losses that are not finite, and warns or raises an error as ``fit(on_nonfinite=action)`` says.

    The first rank warns and pins the checkpoint. Raises an OptionError for an unknown `action`.
    """

    def __init__(self, action: str, checkpoints: Checkpoints | None, *, is_first: bool) -> None:
        require_choice("fit", "on_nonfinite", action, (WARN, RAISE, IGNORE))
        self._action, self._checkpoints, self._is_first = action, checkpoints, is_first
        self._has_warned = False

    def __call__(
        self,
        records: Sequence[Mapping[str, Any]],
        params_are_finite: Callable[[], bool],
        history: Sequence[Mapping[str, Any]],
    ) -> None:
        """Warn about the first loss in `records` that is not finite; with ``"raise"``, raises a NonFiniteError instead.

        A NaN is no error if all parameters are finite: the batch had nothing to average, such as one without labels.
        `history` ends with the records; if the run continues another, it may have earlier losses that are not finite.
        """
        if self._action == IGNORE:
            return
        record = next((record for record in records if _is_nonfinite(record)), None)
        if record is None:
            return
        has_infinite_loss = any(_is_nonfinite(record) and not math.isnan(record["loss"]) for record in records)
        if not has_infinite_loss and params_are_finite():
            if self._is_first and not self._has_warned:
                self._has_warned = True
                warn(
                    f"fit: the loss of step {record['step']} is nan, and the parameters after it are finite: its batch "
                    "has nothing to average, as if no label counts"
                )
            return
        record = _first_in_row(history, record)
        good_step = self._newest_good_step(record["step"])
        text = (
            f"fit: the loss of step {record['step']} is {record['loss']}, and the parameters after it are probably not "
            "finite; lower the learning rate, clip the gradient with ft.clip(1.0), or skip such steps with "
            "ft.skip_nonfinite()"
        )
        if self._action == RAISE:
            raise NonFiniteError(
                text + (f". The newest checkpoint before it is that of step {good_step}" if good_step else "")
            )
        self._action = IGNORE
        if not self._is_first:
            return
        if self._checkpoints is not None and good_step:
            self._checkpoints.pin(good_step)
            text += (
                f". The checkpoint of step {good_step}, the newest before it, is pinned: it will not be removed; to go "
                "on from it, delete the later ones and run again"
            )
        warn(f"{text}. on_nonfinite='raise' stops the run instead")

    def _newest_good_step(self, step: int) -> int | None:
        if self._checkpoints is None:
            return None
        self._checkpoints.wait()
        earlier = [saved for saved in self._checkpoints.steps() if saved < step]
        # Not the step right before it if possible: its loss was finite, but its gradient may not have been.
        return max([saved for saved in earlier if saved < step - 1] or earlier, default=None)


def _first_in_row(history: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first record of the steps in a row, up to `record`, whose losses are not finite."""
    for earlier in reversed(history):
        if "loss" in earlier and earlier["step"] < record["step"]:
            if not _is_nonfinite(earlier):
                break
            record = earlier
    return record


def _is_nonfinite(record: Mapping[str, Any]) -> bool:
    """Whether the loss of a step is not finite, and no wrapper has skipped the step."""
    loss = record.get("loss")
    return isinstance(loss, float) and not math.isfinite(loss) and not record.get("skipped")
