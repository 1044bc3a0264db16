"""A step on tensors without memory, and what it would take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ftrain import backends, tree
from ftrain.backends.transfers import is_abstract, is_in_file
from ftrain.errors import TraceError
from ftrain.profiling.anatomy.kinds import BATCH, FROZEN, NEXT, OPTIMIZER, PARAMETERS, REST, name_the_rest
from ftrain.profiling.anatomy.parts import Beside, Rehearsal
from ftrain.profiling.anatomy.timeline import Scratch, Timeline, Tracker
from ftrain.profiling.anatomy.whole import predict_whole
from ftrain.step.eager import Eager
from ftrain.step.step import Step
from ftrain.step.swap_params import bound, pristine, slots_of
from ftrain.transforms.compile.capture import VALUE_NEEDED
from ftrain.types import PyTree, TrainState, replace


def abstract_state(step: Step, module: nn.Module) -> TrainState:
    """Return the state of a step whose loss is that of a module, of tensors without memory."""
    mode, slots = FakeTensorMode(allow_non_fake_inputs=True), slots_of(module)
    made: dict[str, Tensor] = {}
    for slot in slots:
        if slot.name not in made:
            tensor = slot.place[slot.key]
            fake = _fake(mode, tensor)
            made[slot.name] = fake if slot.is_buffer else nn.Parameter(fake, tensor.requires_grad)
    with mode, bound(slots, [made[slot.name] for slot in slots]):
        return step.init()


@contextmanager
def abstractly(function: str, step: Step, mode: FakeTensorMode) -> Iterator[None]:
    """Context in which a step runs on tensors without values, and after which none of them is left in its module.

    Args:
        function: who asks, for messages.
        step: the step.
        mode: that the tensors are of.

    Raises:
        TraceError: when the step asks for the value of a tensor.
    """
    try:
        with pristine(step.base.module), mode, torch.no_grad(), step.loss.scope(True):
            yield
    except VALUE_NEEDED as error:
        raise TraceError(
            f"{function}: runs the step on tensors without values, and {step.base.text} asks for one "
            f"({getattr(error, 'func', error)}); use torch.where or a mask in place of .item(), bool() and shapes that "
            "depend on values"
        ) from error


def predict(step: Step, state: TrainState, batch: PyTree, *, fuse: bool) -> Timeline:
    """Run a step on tensors without memory, and return what it took.

    A step that is compiled whole is captured, and what its graph takes is returned; see `predict_whole`. What of a
    split one is compiled runs as Inductor plans it, with `fuse`, and the rest operation by operation.

    Raises:
        TraceError: when the step asks for the value of a tensor.
    """
    mode, device = FakeTensorMode(allow_non_fake_inputs=True), tree.device_of(state.params)
    # A model on meta may be meant for any device.
    scratch: Scratch = backends.of(device).scratch if device.type != "meta" else lambda name, args: 0
    hyper, words = {name: float(schedule(0)) for name, schedule in step.optimizer.schedules.items()}, (0, 0)
    state = replace(state, step=None, rng=None)
    elsewhere = _elsewhere(state)
    # Where it is in use, it has the memory that it is without while it waits.
    state = replace(state, opt_state=tree.map(_dense, state.opt_state))
    state, batch = tree.map(lambda leaf: _fake(mode, leaf) if isinstance(leaf, Tensor) else leaf, (state, batch))
    if (found := predict_whole(step, state, batch, hyper, scratch, fuse=fuse)) is not None:
        return found
    known = {
        PARAMETERS: state.params,
        FROZEN: state.frozen,
        OPTIMIZER: state.opt_state,
        REST: (state.buffers, state.slots),
        BATCH: batch,
    }
    kinds, given = {kind: _tensors(part) for kind, part in known.items()}, (state, batch, hyper, words)
    rehearsal, parts = Rehearsal(step.base.module, mode, scratch), None
    if fuse and hasattr(runner := step.runner, "rehearsal"):
        parts = runner.rehearsal(rehearsal.execute, tree.device_of(state.params), rehearsal.watching)
    if parts is None:
        tracker, run = Tracker(kinds, step.base.module, scratch), Eager(step, around_update=rehearsal.watching)
    else:
        # What compiles would be written down, too.
        with abstractly("anatomy", step, mode):
            parts(*given)
        tracker, run = Beside(kinds, None, scratch), parts
    rehearsal.ledger = tracker.ledger
    tracker.ledger.leave_out([leaf for leaf, away in zip(_tensors(state.opt_state), elsewhere, strict=True) if away])
    with abstractly("anatomy", step, mode), tracker, tracker.running.followed() if parts is None else nullcontext():
        new, _ = run(*given)
        tracker.ledger.mark(_tensors(new), NEXT)
    name_the_rest(tracker.ledger.timeline, rehearsal.began)
    return tracker.ledger.timeline


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor of that shape on the CPU: the memory that it would take does not depend on where it is."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _elsewhere(state: TrainState) -> list[bool]:
    """Of each leaf of the optimizer's state, whether it is kept where the device has no memory for it."""
    device = tree.device_of(state.params)
    # What is on meta stands for what will be there.
    here = device, torch.device("meta")
    return [
        is_in_file(leaf) or (leaf.device not in here and leaf.ndim > 0) or _dense(leaf) is not leaf
        for leaf in _tensors(state.opt_state)
    ]


def _dense(leaf: Any) -> Any:
    """A tensor without values that stands for one which is elsewhere has less memory than it is large."""
    if isinstance(leaf, Tensor) and is_abstract(leaf) and leaf.untyped_storage().nbytes() < leaf.nbytes:
        return torch.empty_like(leaf, memory_format=torch.contiguous_format)
    return leaf


def _tensors(node: PyTree) -> list[Any]:
    return [leaf for leaf in tree.leaves(node) if isinstance(leaf, Tensor)]
