"""`hints`: what makes a step slow, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from ftrain import backends, tree
from ftrain.errors import BatchError, ComposeError
from ftrain.profiling import rates
from ftrain.profiling.anatomy import anatomy_for
from ftrain.profiling.comparison import Original
from ftrain.profiling.hints.calls import record_calls
from ftrain.profiling.hints.rules import Facts, Hint, Remedy, run_rules
from ftrain.profiling.step_variants import double_batch, require_one_rank, require_step
from ftrain.profiling.timing import Interval, Loading, Racer, interval, loading, race
from ftrain.step.compose import compose
from ftrain.step.flops import CONTRACTION
from ftrain.step.step import Step
from ftrain.transforms.amp.loss_scale import NAME as WITH_AMP
from ftrain.transforms.amp.wrapper import with_amp
from ftrain.types import PyTree, TrainState

ROUNDS = 7


def hints(step: Step, state: TrainState, batch: PyTree, *, data: Iterable[PyTree] | None = None) -> list[Hint]:
    """Return what makes a step slow on this machine, and what to do about it.

    The rules look for data that the device waits for, launches that take longer than the matmuls, a batch too small to
    fill the device, a dtype that is emulated or slower than another, axes of matmuls whose lengths are not multiples of
    what the device needs (`Backend.multiple`), and arguments of attention that force a slower kernel. Takes seconds, or
    minutes if the step is compiled: it runs on copies of the state, in bfloat16 too, and with twice the batch if that
    is predicted to fit.

    Args:
        step: the step.
        state: its state, which does not change.
        batch: a batch.
        data: batches, to time how they are loaded; their position is restored. Default: loading is not timed.

    Raises:
        ComposeError: if `step` is not a `Step`, or runs on several ranks.
        StructureError: if the state is of another step.
        ConsumedError: if the state was donated.
        DataError: if the data cannot be iterated several times.
        TraceError: if the step reads the value of a tensor.
    """
    require_step("hints", step, state)
    require_one_rank("hints", step)
    original = Original(step, state)
    batch = tree.to(tree.as_tree(batch), original.device)
    data_times = None if data is None else loading(step, original.state_for(step), data, original.device)
    return measured_hints(original, step, batch, loading=data_times, with_larger_batch=True)


def measured_hints(
    original: Original, step: Step, batch: PyTree, *, with_larger_batch: bool, loading: Loading | None = None
) -> list[Hint]:
    """Return hints for a step, or a variant of it, after timing it and the remedies that need no compilation."""
    racers: dict[Remedy | None, Racer] = {None: original.racer(step, batch)}
    state = original.outline(step)
    record, peak = backends.of(original.device), anatomy_for("hints", step, state, batch).peak
    free = record.free()
    # By prediction, because a host that runs out of memory raises no error: its kernel kills the process.
    if with_larger_batch and (free is None or 2 * peak <= free):
        with suppress(BatchError):  # The number of examples is not known.
            racers[Remedy.LARGER_BATCH] = original.racer(step, double_batch(batch))
    if torch.bfloat16 in record.native_dtypes:
        with suppress(ComposeError):  # The step has `with_amp` already.
            racers[Remedy.BFLOAT16] = original.racer(compose(step, with_amp("bf16")), batch)
    times: dict[Any, Any] = race(racers, ROUNDS, is_result=lambda remedy, error: remedy is not None)
    tried = {}
    for remedy, remedy_times in times.items():
        if remedy is not None and isinstance(remedy_times, list):
            size = 2 if remedy is Remedy.LARGER_BATCH else 1
            pairs = zip(times[None], remedy_times, strict=True)
            tried[remedy] = interval([size * base / time for base, time in pairs])
    seconds = interval(times[None]).median
    return run_rules(facts_of(step, state, batch, seconds, loading=loading, tried=tried))


def facts_of(
    step: Step,
    state: TrainState,
    batch: PyTree,
    seconds: float,
    *,
    loading: Loading | None = None,
    tried: Mapping[Remedy, Interval] | None = None,
) -> Facts:
    """Return the facts about a step that takes these `seconds`, for the rules; measures the rates of its device."""
    device = tree.device_of(state.params)
    record = backends.of(device)
    predicted = anatomy_for("hints", step, state, batch)
    matmuls, attentions = record_calls(step, state, batch)
    largest = max(matmuls, key=lambda matmul: matmul.flops, default=None)
    return Facts(
        matmuls,
        attentions,
        compiled=step.is_compiled,
        mixed=any(wrapper.name == WITH_AMP for wrapper in step.wrappers),
        operations=len(predicted.timeline.operations),
        flops=predicted.flops.get(CONTRACTION, 0),
        multiple=record.multiple,
        tf32=record.tf32() is not None,
        rate=rates.matmul_rate(device, torch.float32 if largest is None else largest.dtype),
        launch=rates.launch_seconds(device),
        seconds=seconds,
        emulated=record.emulated_dtypes(),
        loading=loading,
        tried=tried or {},
    )
