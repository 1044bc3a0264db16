"""Run variants of a step, each on its own copy of the state, to compare them with the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ftrain import tree
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.profiling.anatomy.measured import measure
from ftrain.profiling.timing import Racer
from ftrain.step.step import Step
from ftrain.types import PyTree, TrainState, mark_donatable, replace


@dataclass(frozen=True)
class Original:
    """A step with its state, which never changes."""

    step: Step
    state: TrainState

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return tree.device_of(self.state.params)

    def outline(self, variant: Step) -> TrainState:
        """Return the state for a variant without allocating memory: new tensors are on the device ``meta``."""
        params = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), self.state.params)
        return self._adapt(self.state, variant, params)

    def state_for(self, variant: Step) -> TrainState:
        """Return a copy of the state for a variant; an optimizer or a wrapper that only the variant has starts anew."""
        state = self.state if variant.optimizer is self.step.optimizer else replace(self.state, opt_state=None)
        copied = tree.clone(state)
        return mark_donatable(self._adapt(copied, variant, copied.params))

    def _adapt(self, state: TrainState, variant: Step, params: PyTree) -> TrainState:
        """Return the state for a variant. What `state` lacks is initialised for `params`."""
        is_same_optimizer = variant.optimizer is self.step.optimizer
        slots = {
            wrapper.name: state.slots[wrapper.name] if wrapper.name in state.slots else wrapper.slot.init(params)
            for wrapper in variant.wrappers
            if wrapper.slot
        }
        opt_state = state.opt_state if is_same_optimizer else variant.optimizer.init(params)
        return replace(state, opt_state=opt_state, slots=slots)

    def racer(self, variant: Step, batch: PyTree, needs: int = 0) -> Racer:
        """Return a racer for a variant that needs these bytes at its peak; 0 if that is not known."""
        return Racer(variant, partial(self.state_for, variant), batch, self.device, needs)

    def measured_peak(self, variant: Step, batch: PyTree, at_rest: int) -> int | None:
        """Return the measured peak of memory in bytes of a variant whose state and batch take `at_rest` bytes.

        Runs the variant and waits for the device. Returns None if a copy of the state does not fit beside the original.
        """
        try:
            beyond_start, _ = measure(variant, self.state_for(variant), batch)
            return at_rest + beyond_start
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release(error, self.device)
            return None
