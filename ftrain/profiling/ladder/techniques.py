"""The techniques of the performance guides, one a line: what each makes of a step and its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ftrain import backends, tree
from ftrain.errors import BatchError, ComposeError, DeviceError
from ftrain.profiling.step_variants import (
    add_wrapper,
    double_batch,
    length_of,
    microbatches_of,
    smaller_optimizers,
    texts,
    with_microbatches,
)
from ftrain.step.microbatch import split_batch
from ftrain.step.step import Step
from ftrain.step.wrapper import Wrapper
from ftrain.transforms.accumulate import accumulate
from ftrain.transforms.amp.wrapper import with_amp
from ftrain.transforms.compile.wrapper import compiled
from ftrain.transforms.donated import donated
from ftrain.transforms.empty_cache import empty_cache
from ftrain.transforms.offload.wrapper import offload
from ftrain.transforms.remat.wrapper import remat
from ftrain.transforms.update_in_backward import update_in_backward
from ftrain.types import PyTree


@dataclass(frozen=True)
class Case:
    """What is run: a step, and the batch that it is run on."""

    step: Step
    batch: PyTree


@dataclass(frozen=True)
class Technique:
    """One technique.

    Args:
        method: what the guides call it.
        name: how it is written.
        apply: makes a case of another one; raises an `FtrainError` that says why where it does not apply.
        stacks: whether it is tried on top of others, which is for what keeps to the batch.
    """

    method: str
    name: str
    apply: Callable[[Case], Case]
    stacks: bool = True


def replacement(given: Step, other: Step) -> str:
    """Return which wrappers of another step have replaced those of a given one, as they print."""
    old, new = texts(given), texts(other)
    gone = ", ".join(text for text in old if text not in new)
    return f"{', '.join(text for text in new if text not in old)} in place of {gone}" if gone else ""


def _doubled(case: Case) -> Case:
    return dataclasses.replace(case, batch=double_batch(case.batch))


def _halved(case: Case) -> Case:
    length, pieces = length_of(case.batch), microbatches_of(case.step)
    if not length or length % (2 * pieces):
        examples = "1 example" if length == 1 else f"{length} examples"
        more = f" and each taken in {pieces} equal pieces" if pieces > 1 else ""
        raise BatchError(f"{examples} cannot be halved{more}")
    return dataclasses.replace(case, batch=split_batch(case.batch, 2)[0])


def _wrapper(method: str, factory: Callable[..., Wrapper], *args: Any, **options: Any) -> Technique:
    """A technique that is a wrapper, named as it is written; it replaces the one of its name."""

    def apply(case: Case) -> Case:
        return dataclasses.replace(case, step=add_wrapper(case.step, factory(*args, **options)))

    return Technique(method, _written(factory, *args, **options), apply)


def _written(factory: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return a call as it is written: ``remat("dots")``."""
    values = [*map(_literal, args), *(f"{name}={_literal(value)}" for name, value in options.items())]
    return f"{factory.__name__}({', '.join(values)})"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _in_more_pieces(case: Case) -> Case:
    return dataclasses.replace(case, step=with_microbatches(case.step, 2 * microbatches_of(case.step), case.batch))


def _optimized(name: str, case: Case) -> Case:
    return dataclasses.replace(case, step=smaller_optimizers(case.step)[name])


def _emptied(case: Case) -> Case:
    record = backends.of(tree.device_of(case.batch))
    if record.empty_cache is None:
        raise DeviceError(f"{record.describe()} has no cache to empty")
    return dataclasses.replace(case, step=add_wrapper(case.step, empty_cache(every=1)))


def _compiled(case: Case) -> Case:
    if case.step.is_compiled:
        raise ComposeError("the step has it already")
    return dataclasses.replace(case, step=add_wrapper(case.step, compiled()))


TECHNIQUES: tuple[Technique, ...] = (
    Technique("batch size", "batch x2", _doubled, stacks=False),
    Technique("batch size", "batch /2", _halved, stacks=False),
    Technique("gradient accumulation", _written(accumulate, 2), _in_more_pieces),
    _wrapper("gradient checkpointing", remat),
    _wrapper("gradient checkpointing", remat, "dots"),
    _wrapper("gradient checkpointing", remat, budget=0.5),
    _wrapper("mixed precision", with_amp, "bf16"),
    _wrapper("mixed precision", with_amp, "fp16"),
    _wrapper("mixed precision", with_amp, "tf32"),
    *(
        Technique("optimizer choice", name, partial(_optimized, name))
        for name in ('adamw(state_dtype="bf16")', "adamw_8bit", "adafactor")
    ),
    _wrapper("offload", offload, "activations"),
    _wrapper("offload", offload, "opt_state"),
    _wrapper("update in backward", update_in_backward),
    Technique("emptied cache", _written(empty_cache, every=1), _emptied),
    _wrapper("donation", donated),
    Technique("torch.compile", _written(compiled), _compiled),
)
"""All that `ftrain.ladder` tries, in its order."""
