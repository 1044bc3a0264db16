"""The memory of the tensors that are alive while code runs, measured without torch's profiler."""

import dataclasses
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain import tree
from ftrain.step.core import Eager


class LivePeak(TorchDispatchMode):
    """Records the most bytes of live tensors in a real run, without the memory that kernels allocate for themselves."""

    def __init__(self, trees):
        super().__init__()
        self.peak, self.live = 0, {}
        self.add(trees)

    def add(self, trees):
        for leaf in tree.leaves(trees):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key not in self.live:
                self.live[key] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, key)
        self.peak = max(self.peak, sum(self.live.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        self.add(returned)
        return returned


def live_peak(step, state, batch):
    """Return the peak of the live tensors of a step that runs eagerly."""
    if step.donate:
        state = tree.clone(state)
    state = dataclasses.replace(state, step=0, rng=None)
    hyper = {name: float(schedule(0)) for name, schedule in step.optimizer.schedules.items()}
    mode = LivePeak((state.params, state.frozen, state.buffers, state.opt_state, state.slots, batch))
    with step.loss.scope(True), mode:
        Eager(step)(state, batch, hyper, (0, 0))
    return mode.peak
