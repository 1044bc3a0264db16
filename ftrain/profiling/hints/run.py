"""`hints`: what makes a step slow, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ftrain import backends, tree
from ftrain.errors import BatchError
from ftrain.profiling import rates
from ftrain.profiling.anatomy import Anatomy, anatomy
from ftrain.profiling.comparison import Original
from ftrain.profiling.hints.calls import record_calls
from ftrain.profiling.hints.facts import Facts, Product
from ftrain.profiling.hints.rules import Hint, run_rules
from ftrain.profiling.step_variants import double_batch, require_one_rank, require_step
from ftrain.profiling.timing import interval, loading, race
from ftrain.step.flops import CONTRACTION
from ftrain.step.step import Step
from ftrain.transforms.amp.wrapper import NAME as WITH_AMP
from ftrain.types import PyTree, TrainState

WIDE_AND_NARROW = torch.float32, torch.bfloat16
ROUNDS = 7


def hints(step: Step, state: TrainState, batch: PyTree, *, data: Iterable[PyTree] | None = None) -> list[Hint]:
    """Return what makes a step slow, measured on this machine: short sentences with the evidence and what to do.

    The rules look for: data that the device waits for; operations that take longer to launch than their matrix
    products take; a batch too small to fill the device; products in a narrow dtype that the device emulates; products
    in float32 where bfloat16 is native and faster, or TF32 is off; lengths of axes that are no multiples of what the
    device's record says (NVIDIA's guide to matrix multiplication has 8, and from compute capability 8.0 on 64, in 16
    bits); and arguments of attention that force a slower kernel. Takes seconds: the step runs on copies of the state,
    with the batch and with twice the batch.

    Args:
        step: the step.
        state: a state of it, which is not changed.
        batch: a batch.
        data: batches, to time loading them; their position is restored. Default: loading is not timed.

    Raises:
        ComposeError: when `step` is no `Step`, or runs on several ranks.
        StructureError: when the state is that of another step.
        ConsumedError: when the state was donated.
        DataError: when the data cannot be iterated several times.
        TraceError: when the step asks for the value of a tensor.
    """
    require_step("hints", step, state)
    require_one_rank("hints", step)
    step.require(state)
    original = Original(step, state)
    batch = tree.to(tree.as_tree(batch), original.device)

    measured: dict[str, Any] = {}
    if data is not None:
        measured["loading"] = loading(step, original.state_for(step), data, original.device)
    parts = anatomy(step, state, batch, measure=False)
    racers = {"once": original.racer(step, batch)}
    with suppress(BatchError):  # Its tensors do not say how many examples it has.
        racers["twice"] = original.racer(step, double_batch(batch))
    times: dict[str, Any] = race(racers, ROUNDS, is_result=lambda name, error: name == "twice")
    if isinstance(times.get("twice"), list):
        measured["doubled"] = interval([2 * a / b for a, b in zip(times["once"], times["twice"], strict=True)])
    return run_rules(facts_of(step, state, batch, parts, interval(times["once"]).median, **measured))


def facts_of(
    step: Step,
    state: TrainState,
    batch: PyTree,
    parts: Anatomy,
    seconds: float,
    **measured: Any,
) -> Facts:
    """Return the facts that the rules read; measures the rates of the device.

    Args:
        step: the step.
        state: a state of it.
        batch: a batch.
        parts: their anatomy.
        seconds: of a step.
        measured: the fields `doubled`, `loading` and `tried` of `Facts`, as far as they were measured.
    """
    device = tree.device_of(state.params)
    record = backends.of(device)
    products, attentions = record_calls(step, state, batch)
    return Facts(
        products,
        attentions,
        compiled=step.is_compiled,
        mixed=any(wrapper.name == WITH_AMP for wrapper in step.wrappers),
        operations=len(parts.timeline.operations),
        flops=parts.flops.get(CONTRACTION, 0),
        multiple=record.multiple,
        tf32=record.tf32() is not None,
        rates={
            dtype: rates.product_rate(device, dtype)
            for dtype in WIDE_AND_NARROW
            if dtype in (torch.float32, *record.native_dtypes)
        },
        gain=_gain(device, products) if torch.bfloat16 in record.native_dtypes else 1.0,
        launch=rates.launch_seconds(device),
        seconds=seconds,
        emulated=record.emulated_dtypes(),
        **measured,
    )


def _gain(device: torch.device, products: Sequence[Product]) -> float:
    """Return the time of the largest product of a step in float32, divided by that in bfloat16."""
    largest = max(products, key=lambda product: product.flops, default=None)
    if largest is None:
        return 1.0
    sizes = largest.rows, largest.inner, largest.columns
    wide, narrow = (rates.product_seconds(device, dtype, *sizes) for dtype in WIDE_AND_NARROW)
    return wide / narrow
