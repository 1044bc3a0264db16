"""`hints`: what makes a step slow, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ftrain import backends, tree
from ftrain.errors import BatchError
from ftrain.profiling import rates
from ftrain.profiling.anatomy import anatomy_for
from ftrain.profiling.comparison import Original
from ftrain.profiling.hints.calls import record_calls
from ftrain.profiling.hints.rules import Facts, Hint, Matmul, Remedy, run_rules
from ftrain.profiling.step_variants import double_batch, require_one_rank, require_step
from ftrain.profiling.timing import Interval, Loading, interval, loading, race
from ftrain.step.flops import CONTRACTION
from ftrain.step.step import Step
from ftrain.transforms.amp.loss_scale import NAME as WITH_AMP
from ftrain.types import PyTree, TrainState

WIDE_AND_NARROW = torch.float32, torch.bfloat16
ROUNDS = 7


def hints(step: Step, state: TrainState, batch: PyTree, *, data: Iterable[PyTree] | None = None) -> list[Hint]:
    """Return what makes a step slow on this machine, and what to do about it.

    The rules look for: data that the device waits for; operations that take longer to launch than the matmuls take; a
    batch too small to fill the device; matmuls in a dtype that the device emulates; matmuls in float32 while bfloat16
    is native and faster, or TF32 is off; axes of matmuls whose lengths are not multiples of what the device needs
    (8 for 16-bit dtypes on NVIDIA GPUs, and 64 from compute capability 8.0 on, by NVIDIA's guide to matrix
    multiplication); and arguments of attention that force a slower kernel. Takes seconds: the step runs on copies of
    the state, with the batch and with twice the batch.

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
    step.require(state)
    original = Original(step, state)
    batch = tree.to(tree.as_tree(batch), original.device)

    data_times = None if data is None else loading(step, original.state_for(step), data, original.device)
    racers, predicted = {"once": original.racer(step, batch)}, anatomy_for("hints", step, state, batch)
    free = backends.of(original.device).free()
    # Predicted: a host that runs out of memory raises no error, its kernel kills the process.
    if free is None or 2 * predicted.peak <= free:
        with suppress(BatchError):  # Its tensors do not agree on a number of examples.
            racers["twice"] = original.racer(step, double_batch(batch))
    times: dict[str, Any] = race(racers, ROUNDS, is_result=lambda name, error: name == "twice")
    tried = {}
    if isinstance(times.get("twice"), list):
        speeds = [2 * once / twice for once, twice in zip(times["once"], times["twice"], strict=True)]
        tried[Remedy.LARGER_BATCH] = interval(speeds)
    seconds = interval(times["once"]).median
    return run_rules(facts_of(step, state, batch, seconds, loading=data_times, tried=tried))


def facts_of(
    step: Step,
    state: TrainState,
    batch: PyTree,
    seconds: float,
    *,
    loading: Loading | None = None,
    tried: Mapping[Remedy, Interval] | None = None,
) -> Facts:
    """Return the facts that the rules read about a step that takes these seconds, after measuring its device."""
    device = tree.device_of(state.params)
    record = backends.of(device)
    predicted = anatomy_for("hints", step, state, batch)
    matmuls, attentions = record_calls(step, state, batch)
    return Facts(
        matmuls,
        attentions,
        compiled=step.is_compiled,
        mixed=any(wrapper.name == WITH_AMP for wrapper in step.wrappers),
        operations=len(predicted.timeline.operations),
        flops=predicted.flops.get(CONTRACTION, 0),
        multiple=record.multiple,
        tf32=record.tf32() is not None,
        rates={
            dtype: rates.matmul_rate(device, dtype)
            for dtype in WIDE_AND_NARROW
            if dtype in (torch.float32, *record.native_dtypes)
        },
        gain=_gain(device, matmuls) if torch.bfloat16 in record.native_dtypes else 1.0,
        launch=rates.launch_seconds(device),
        seconds=seconds,
        emulated=record.emulated_dtypes(),
        loading=loading,
        tried=tried or {},
    )


def _gain(device: torch.device, matmuls: Sequence[Matmul]) -> float:
    """Return the time of the largest matmul in float32, divided by its time in bfloat16."""
    largest = max(matmuls, key=lambda matmul: matmul.flops, default=None)
    if largest is None:
        return 1.0
    sizes = largest.rows, largest.inner, largest.columns
    wide, narrow = (rates.matmul_seconds(device, dtype, *sizes) for dtype in WIDE_AND_NARROW)
    return wide / narrow
