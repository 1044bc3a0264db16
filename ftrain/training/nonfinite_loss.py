"""What `fit` says of a loss that is infinite or NaN."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ftrain.checkpoint import Checkpoints
from ftrain.errors import NonFiniteError, OptionError

WARN, RAISE, IGNORE = "warn", "raise", "ignore"


class LossWatch:
    """Looks for the first loss that is not finite, among records as they are read.

    Args:
        choice: ``"warn"``, ``"raise"`` or ``"ignore"``.
        checkpoints: of which the newest from before such a loss is kept.

    Raises:
        OptionError: for another choice.
    """

    def __init__(self, choice: str, checkpoints: Checkpoints | None) -> None:
        if choice not in (WARN, RAISE, IGNORE):
            raise OptionError(f"fit: on_nonfinite is {choice!r}; choices are {WARN}, {RAISE}, {IGNORE}")
        self._choice, self._checkpoints = choice, checkpoints

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Warn of such a loss, once, or raise.

        Raises:
            NonFiniteError: with the step.
        """
        bad = next((record for record in records if _is_bad(record)), None) if self._choice != IGNORE else None
        if bad is None:
            return
        text = (
            f"fit: the loss of step {bad['step']} is {bad['loss']}, and the parameters are probably lost from there "
            "on; lower the learning rate, clip the gradient with ft.clip(1.0), or leave such steps out with "
            "ft.skip_nonfinite()"
        )
        good = self._last_good(bad["step"])
        if self._choice == RAISE:
            raise NonFiniteError(text + (f". The newest checkpoint from before is that of step {good}" if good else ""))
        self._choice = IGNORE
        if self._checkpoints is not None and good:
            self._checkpoints.pin(good)
            text += f". The checkpoint of step {good}, the newest from before, is pinned: no newer one pushes it out"
        warnings.warn(f"{text}. on_nonfinite='raise' stops the run instead", stacklevel=5)

    def _last_good(self, step: int) -> int | None:
        if self._checkpoints is None:
            return None
        self._checkpoints.wait()
        before = [saved for saved in self._checkpoints.steps() if saved < step]
        # The gradient of the last step with a finite loss may not have been finite.
        return max([saved for saved in before if saved < step - 1] or before, default=None)


def _is_bad(record: Mapping[str, Any]) -> bool:
    """Whether its loss is not finite, and no wrapper has left the step out."""
    loss = record.get("loss")
    return isinstance(loss, float) and not math.isfinite(loss) and not record.get("skipped")
