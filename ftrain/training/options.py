"""The arguments of `fit` that say what is done after which steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftrain.training.early_stopping import Adapt, Stop
from ftrain.training.loggers import Logger
from ftrain.training.metrics import Evaluate
from ftrain.training.throughput import Count


@dataclass(frozen=True)
class Options:
    """The arguments of `fit` that say what is done after which steps."""

    steps: int | None
    epochs: int | None
    evaluate: Evaluate | None
    evaluate_every: int | None
    stop: Stop | None
    adapt: Adapt | None
    loggers: Sequence[Logger]
    log_every: int
    throughput: Mapping[str, Count]
    on_oom: str

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate after this step."""
        if self.evaluate is None:
            return False
        return step == self.steps or (self.evaluate_every is not None and step % self.evaluate_every == 0)
