"""Tell when a run goes on with another pipeline than the one that began it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from ftrain.errors import warn
from ftrain.step.step import Step

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The part of the text of a function that differs between processes."""


def pipeline_texts(step: Any) -> list[str]:
    """Return the optimizer and the wrappers of a step as texts; nothing of a function that is no `Step`.

    Without the wrappers that change how a step runs (`compiled`, `donated`, `sharded`), which a run may change.
    """
    if not isinstance(step, Step):
        return []
    texts = [step.optimizer.text, *(wrapper.text for wrapper in step.wrappers if wrapper.step is None)]
    return [ADDRESS.sub("", text) for text in texts]


def warn_of_changes(path: object, saved: Sequence[str], now: Sequence[str]) -> None:
    """Warn if the pipeline of a checkpoint differs from that of the run that continues from it."""
    if not (saved and now) or [*saved] == [*now]:
        return
    changes = [line for line in difflib.ndiff([*saved], [*now]) if line[0] in "+-"]
    warn(
        f"fit: continues from {path}, which another pipeline has saved; use another directory for a new run. What has "
        "changed:\n  " + "\n  ".join(changes)
    )
