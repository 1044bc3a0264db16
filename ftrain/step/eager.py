"""A step as it is, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ftrain import backends, random, tree
from ftrain.types import RNG, Core, Hyper, LossFn, Metrics, PyTree, TrainState, UpdateFn


class Eager:
    """Runs a step operation by operation.

    Args:
        step: the step.
        around_loss: what becomes of its loss.
        around_update: what becomes of its update.
    """

    def __init__(
        self,
        step: Any,
        around_loss: Callable[[LossFn], LossFn] = lambda loss: loss,
        around_update: Callable[[UpdateFn], UpdateFn] = lambda update: update,
    ) -> None:
        self._core: Core = step.assemble(donate=step.donate, around_loss=around_loss, around_update=around_update)
        self._needs_rng, self._draws = step.base.needs_rng, step.optimizer.needs_rng
        self._backends: dict[torch.device, backends.Backend] = {}
        self.text = "eager(donate)" if step.donate else "eager"

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Hyper, words: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        """Return the next state and the metrics."""
        device = tree.device_of(state.params)
        rng = random.to_device(random.wrap_key_data(words), device) if self._needs_rng else None
        if self._draws:
            hyper = {**hyper, RNG: random.to_device(random.wrap_key_data(random.update_key_data(words)), device)}
        backend = self._backends.get(device) or self._backends.setdefault(device, backends.of(device))
        with torch.set_grad_enabled(False), backend.seeded(random.seed_of(words)), backend.deterministic():
            return self._core(state, batch, hyper, rng)
