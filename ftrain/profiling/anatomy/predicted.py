"""Predict the memory and the work of a step by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import tree
from ftrain._torch import NEEDS_VALUES, FakeTensorMode, dtensor, fake_like
from ftrain._torch.fake import CaptureFakeTensorMode
from ftrain.backends.transfers import is_abstract, is_in_file
from ftrain.errors import FtrainError, StructureError, TraceError
from ftrain.parallel.sharded import NAME as SHARDED
from ftrain.profiling.anatomy.kinds import BATCH, FROZEN, GRADIENTS, NEXT, OPTIMIZER, PARAMETERS, REST, classify
from ftrain.profiling.anatomy.timeline import AllocationRecorder, Timeline
from ftrain.profiling.step_variants import nbytes, remove_wrapper
from ftrain.step.core import Eager
from ftrain.step.step import Step
from ftrain.step.swap_params import bound, preserve_attributes, slots_of
from ftrain.tree.wrapped_tensors import map_plain, plain_tensors
from ftrain.types import Gradients, Hyper, LossFn, LossOutput, Metrics, PyTree, TrainState, UpdateFn, replace


def whole_state(function: str, step: Step, state: TrainState | None) -> TrainState:
    """Return `state`; if it is None, the initial state of the step on one device, as fake tensors.

    Raises a StructureError if there is no state and the loss has no module.
    """
    if state is not None:
        return state
    if step.base.module is None:
        raise StructureError(
            f"{function}: {step.base.text} has no module; pass a state: {function}(step, step.init(params), batch)"
        )
    mode, slots = CaptureFakeTensorMode(allow_non_fake_inputs=True), slots_of(step.base.module)
    fakes: dict[str, Tensor] = {}
    for slot in slots:
        if slot.name not in fakes:
            tensor = slot.tensors[slot.key]
            fake = fake_like(mode, tensor, tree.HOST)
            fakes[slot.name] = fake if slot.is_buffer else nn.Parameter(fake, tensor.requires_grad)
    with mode, bound(slots, [fakes[slot.name] for slot in slots]):
        return remove_wrapper(step, SHARDED).init()


@contextmanager
def fake_run(function: str, step: Step, mode: FakeTensorMode) -> Iterator[None]:
    """Context in which a step runs on fake tensors. Attributes of its module that the run sets are restored.

    Raises a TraceError if the step reads the value of a tensor, or calls an operation that has no such tensors.
    """
    try:
        with (
            preserve_attributes(step.base.module),
            mode,
            torch.no_grad(),
            torch.autograd.set_detect_anomaly(False),  # It reads values.
            step.loss.scope(True),
        ):
            yield
    except NEEDS_VALUES as error:
        raise TraceError(
            f"{function}: runs the step on fake tensors, which have no values, and {step.base.text} reads a value "
            f"({getattr(error, 'func', error)}); use torch.where or a mask instead of .item(), bool() and shapes that "
            "depend on values"
        ) from error
    except FtrainError:
        raise
    except RuntimeError as error:
        raise TraceError(
            f"{function}: runs the step on fake tensors, which have no values, and there {step.base.text} fails: "
            f"{error}; if the step itself runs, torch has no fake form of one of its operations: use another one"
        ) from error


def predict(function: str, step: Step, state: TrainState, batch: PyTree) -> Timeline:
    """Return the allocations and operations of a step, which runs eagerly on fake tensors, even if it is compiled.

    If it is `sharded`, its mesh must be a planned one, and the batch that of all ranks. Raises a TraceError for a
    nested tensor, and the errors of `fake_run`.
    """
    mode = CaptureFakeTensorMode(allow_non_fake_inputs=True)
    hyper = {name: float(schedule(0)) for name, schedule in step.optimizer.schedules.items()}
    state = replace(state, rng=None)
    is_offloaded = _is_offloaded(state)
    # While the step uses them, offloaded tensors have device memory.
    state = replace(state, opt_state=tree.map(_materialized, state.opt_state))
    inputs = _tensors((state.buffers, batch))
    if any(leaf.is_nested for leaf in inputs):
        raise TraceError(f"{function}: runs the step on fake tensors, and a nested tensor has none; pass a padded one")
    state, batch = tree.map(lambda leaf: _fake(mode, leaf), (state, batch))
    tensors_by_kind = {
        PARAMETERS: _tensors(state.params),
        FROZEN: _tensors(state.frozen),
        OPTIMIZER: _tensors(state.opt_state),
        REST: _tensors((state.buffers, state.slots)),
        BATCH: _tensors(batch),
    }
    recorder = AllocationRecorder(tensors_by_kind, step.base.module)
    for leaf, is_outside in zip(_tensors(state.opt_state), is_offloaded, strict=True):
        if is_outside:
            recorder.set_size(leaf, 0)
    for leaf, real in zip(_tensors((state.buffers, batch)), inputs, strict=True):
        if real.layout != torch.strided:
            recorder.set_size(leaf, nbytes(real))

    run = _RecordedRun(step, recorder)
    on_ranks = next((each.step.on_ranks for each in step.wrappers if each.step and each.step.on_ranks), None)
    with fake_run(function, step, mode), recorder:
        if on_ranks is None:
            run(state, batch, hyper, (0, 0))
        else:
            local, rows, around = on_ranks(step, state, batch)
            around(run)(local, rows, hyper, (0, 0))
    classify(recorder)
    return recorder.timeline


class _RecordedRun(Eager):
    """Runs a step operation by operation, and marks the kinds of its tensors in a recorder."""

    def __init__(self, step: Step, recorder: AllocationRecorder) -> None:
        super().__init__(step, around_loss=self._counting, around_update=self._marking)
        self._recorder = recorder

    def __call__(
        self, state: TrainState, batch: PyTree, hyper: Hyper, key_data: tuple[int, int]
    ) -> tuple[TrainState, Metrics]:
        self._recorder.mark(_tensors(batch), BATCH)
        new_state, metrics = super().__call__(state, batch, hyper, key_data)
        self._recorder.mark(_tensors(new_state), NEXT)
        return new_state, metrics

    def _counting(self, loss: LossFn) -> LossFn:
        def counted(params: PyTree, batch: PyTree, *, rng: Tensor | None, buffers: PyTree) -> LossOutput:
            timeline = self._recorder.timeline
            timeline.losses.append((len(timeline.operations), len(timeline.collectives)))
            with self._recorder.running.tracked():
                return loss(params, batch, rng=rng, buffers=buffers)

        return counted

    def _marking(self, update: UpdateFn) -> UpdateFn:
        def marked(state: TrainState, gradients: Gradients, hyper: Hyper, *, donate: bool) -> TrainState:
            self._recorder.mark(_tensors(gradients.grads), GRADIENTS)
            self._recorder.update_start = len(self._recorder.timeline.operations)
            return update(state, gradients, hyper, donate=donate)

        return marked


def _fake(mode: FakeTensorMode, leaf: Any) -> Any:
    """Return a tensor as a fake tensor, a DTensor with a fake local tensor, and other leaves unchanged."""
    if dtensor.is_dtensor(leaf):
        return dtensor.with_local_part(leaf, fake_like(mode, dtensor.local_part(leaf), tree.HOST))
    # On the CPU: the size of a tensor does not depend on the device.
    return map_plain(lambda plain: fake_like(mode, plain, tree.HOST), leaf) if isinstance(leaf, Tensor) else leaf


def _is_offloaded(state: TrainState) -> list[bool]:
    """Return for each tensor of the optimizer state whether it is outside the memory of the device."""
    # A meta tensor represents one that will be on the device.
    resident = tree.device_of(state.params), torch.device("meta")
    return [
        is_in_file(leaf) or (leaf.device not in resident and leaf.ndim > 0) or _materialized(leaf) is not leaf
        for leaf in _tensors(state.opt_state)
    ]


def _materialized(leaf: Any) -> Any:
    """Return an abstract tensor of an offloaded one as a tensor with memory of its size; other leaves unchanged."""
    if isinstance(leaf, Tensor) and is_abstract(leaf) and leaf.untyped_storage().nbytes() < leaf.nbytes:
        return torch.empty_like(leaf, memory_format=torch.contiguous_format)
    return leaf


def _tensors(node: PyTree) -> list[Any]:
    """Return the tensors of a tree: the local tensors of DTensors, and the tensors within quantised weights."""
    leaves = [dtensor.local_part(leaf) for leaf in tree.leaves(node) if isinstance(leaf, Tensor)]
    return [plain for leaf in leaves for plain in plain_tensors(leaf)]
