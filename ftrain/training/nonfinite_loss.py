"""Warn about a loss that is infinite or NaN, or raise an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftrain.checkpoint import Checkpoints
from ftrain.errors import NonFiniteError, require_choice, warn

WARN, RAISE, IGNORE = "warn", "raise", "ignore"


class NonFiniteLossCheck:
    """Searches records for the first loss that is not finite, and does what `fit` documents of ``on_nonfinite``.

    The first rank warns and pins the checkpoint. Raises an OptionError for another `action`.
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
        """Warn about the first loss that is not finite; for ``"raise"`` this raises a NonFiniteError instead.

        A NaN that has changed no parameter is no error: its batch has nothing to average, such as one without labels.
        In `history`, which ends with the records, a run that continues may have such losses already.
        """
        if self._action == IGNORE:
            return
        record = next((record for record in records if _is_nonfinite(record)), None)
        if record is None:
            return
        infinite = [each for each in records if _is_nonfinite(each) and not math.isnan(each["loss"])]
        if not infinite and params_are_finite():
            if self._is_first and not self._has_warned:
                self._has_warned = True
                warn(
                    f"fit: the loss of step {record['step']} is nan, and the parameters after it are finite: its batch "
                    "has nothing to average, as if no label counts"
                )
            return
        record = _first_of_its_kind(history, record)
        good = self._newest_good_step(record["step"])
        text = (
            f"fit: the loss of step {record['step']} is {record['loss']}, and the parameters after it are probably not "
            "finite; lower the learning rate, clip the gradient with ft.clip(1.0), or skip such steps with "
            "ft.skip_nonfinite()"
        )
        if self._action == RAISE:
            raise NonFiniteError(text + (f". The newest checkpoint before it is that of step {good}" if good else ""))
        self._action = IGNORE
        if not self._is_first:
            return
        if self._checkpoints is not None and good:
            self._checkpoints.pin(good)
            text += (
                f". The checkpoint of step {good}, the newest before it, is pinned: it will not be removed; to go on "
                "from it, delete the later ones and run again"
            )
        warn(f"{text}. on_nonfinite='raise' stops the run instead")

    def _newest_good_step(self, step: int) -> int | None:
        if self._checkpoints is None:
            return None
        self._checkpoints.wait()
        earlier = [saved for saved in self._checkpoints.steps() if saved < step]
        # The gradient of the last step with a finite loss may not have been finite.
        return max([saved for saved in earlier if saved < step - 1] or earlier, default=None)


def _first_of_its_kind(history: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first of the steps without a finite loss that lead to a record."""
    for earlier in reversed(history):
        if "loss" in earlier and earlier["step"] < record["step"]:
            if not _is_nonfinite(earlier):
                break
            record = earlier
    return record


def _is_nonfinite(record: Mapping[str, Any]) -> bool:
    """Return whether the loss of a step is not finite, and no wrapper has skipped the step."""
    loss = record.get("loss")
    return isinstance(loss, float) and not math.isfinite(loss) and not record.get("skipped")
