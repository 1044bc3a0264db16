"""Variants of a step, each run on a copy of the state of the original one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ftrain import tree
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.profiling.anatomy.measured import measure
from ftrain.profiling.step_variants import outline, state_for
from ftrain.profiling.timing import Racer
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState


@dataclass(frozen=True)
class Original:
    """A step with its state, which is not changed.

    Args:
        step: the step.
        state: a state of it.
    """

    step: Step
    state: TrainState

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return tree.device_of(self.state.params)

    def outline(self, variant: Step) -> TrainState:
        """Return the state as one of a variant, without taking memory."""
        return outline(variant, self.step, self.state)

    def state_for(self, variant: Step) -> TrainState:
        """Return a copy of the state as one of a variant."""
        return state_for(variant, self.step, self.state)

    def racer(self, variant: Step, batch: PyTree, needs: int = 0) -> Racer:
        """Return a variant that is ready to be timed; it takes `needs` bytes at its peak."""
        return Racer(variant, partial(self.state_for, variant), batch, self.device, needs)

    def measured_peak(self, variant: Step, batch: PyTree, at_rest: int) -> int | None:
        """Run a variant, and return the bytes at its peak.

        None where the copy of the state does not fit beside the original one. Waits for the device.

        Args:
            variant: the step that runs.
            batch: a batch.
            at_rest: bytes of the state of the variant and of the batch.
        """
        try:
            return at_rest + measure(variant, self.state_for(variant), batch).beyond_start
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release(error, self.device)
            return None
