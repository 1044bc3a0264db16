"""The techniques of the performance guides: each changes a step or its batch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftrain import backends, tree
from ftrain.errors import BatchError, DeviceError
from ftrain.profiling.hints import Remedy
from ftrain.profiling.step_variants import (
    add_wrapper,
    double_batch,
    length_of,
    microbatches_of,
    smaller_optimizers,
    with_microbatches,
)
from ftrain.step.microbatch import split_batch
from ftrain.step.step import Step
from ftrain.step.wrapper import Wrapper
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
    """A step, and the batch that it runs on."""

    step: Step
    batch: PyTree


@dataclass(frozen=True)
class Technique:
    """A technique that `ftrain.ladder` tries.

    Args:
        method: the name of the method in the performance guides.
        name: the technique as code.
        apply: ``Case -> Case``; raises an `FtrainError` if it does not apply, which says why.
        stacks: whether it is tried on top of others. It must then leave the batch as it is.
        remedy: the advice of `ftrain.hints` that this follows. If it was measured not to be faster, the hint is left
        out.
    """

    method: str
    name: str
    apply: Callable[[Case], Case]
    stacks: bool = True
    remedy: Remedy | None = None


def replaced_wrappers(original: Step, variant: Step) -> str:
    """Return text that says which wrappers of a variant replace those of the original step; "" for none."""
    original_texts, variant_texts = _texts(original), _texts(variant)
    removed = [text for text in original_texts if text not in variant_texts]
    added = [text for text in variant_texts if text not in original_texts]
    return f"{', '.join(added)} in place of {', '.join(removed)}" if removed else ""


def _texts(step: Step) -> list[str]:
    """Return the texts of the wrappers of a step. Those of the loss are its own texts, which name its blocks."""
    return [*step.loss.wrapper_texts, *(wrapper.text for wrapper in step.wrappers if wrapper.loss is None)]


def _double(case: Case) -> Case:
    return dataclasses.replace(case, batch=double_batch(case.batch))


def _halve(case: Case) -> Case:
    length, microbatches = length_of(case.batch), microbatches_of(case.step)
    if not length or length % (2 * microbatches):
        raise BatchError(f"{length} examples cannot be halved, for {microbatches} equal microbatches")
    return dataclasses.replace(case, batch=split_batch(case.batch, 2)[0])


def _double_microbatches(case: Case) -> Case:
    return dataclasses.replace(case, step=with_microbatches(case.step, 2 * microbatches_of(case.step), case.batch))


def _wrapping(
    method: str, factory: Callable[..., Wrapper], *args: Any, remedy: Remedy | None = None, **options: Any
) -> Technique:
    """Return the technique that adds a wrapper, or replaces the one of the same name. Its name is the call as text."""

    def apply(case: Case) -> Case:
        return dataclasses.replace(case, step=add_wrapper(case.step, factory(*args, **options)))

    arguments = [*map(json.dumps, args), *(f"{name}={json.dumps(value)}" for name, value in options.items())]
    return Technique(method, f"{factory.__name__}({', '.join(arguments)})", apply, remedy=remedy)


def _optimizer(name: str) -> Technique:
    def apply(case: Case) -> Case:
        return dataclasses.replace(case, step=smaller_optimizers(case.step)[name])

    return Technique("optimizer choice", name, apply)


def _empty_cache() -> Technique:
    technique = _wrapping("emptied cache", empty_cache, every=1)

    def apply(case: Case) -> Case:
        record = backends.of(tree.device_of(case.batch))
        if record.empty_cache is None:
            raise DeviceError(f"{record.describe()} has no cache to empty")
        return technique.apply(case)

    return dataclasses.replace(technique, apply=apply)


TECHNIQUES: tuple[Technique, ...] = (
    Technique("batch size", "batch x2", _double, stacks=False, remedy=Remedy.LARGER_BATCH),
    Technique("batch size", "batch /2", _halve, stacks=False),
    Technique("gradient accumulation", "accumulate(2)", _double_microbatches),
    _wrapping("gradient checkpointing", remat),
    _wrapping("gradient checkpointing", remat, "dots"),
    _wrapping("gradient checkpointing", remat, budget=0.5),
    _wrapping("mixed precision", with_amp, "bf16", remedy=Remedy.BFLOAT16),
    _wrapping("mixed precision", with_amp, "fp16"),
    _wrapping("mixed precision", with_amp, "tf32"),
    _optimizer('adamw(state_dtype="bf16")'),
    _optimizer("adamw_8bit"),
    _optimizer("adafactor"),
    _wrapping("offload", offload, "activations"),
    _wrapping("offload", offload, "opt_state"),
    _wrapping("update in backward", update_in_backward),
    _empty_cache(),
    _wrapping("donation", donated),
    _wrapping("torch.compile", compiled, remedy=Remedy.COMPILE),
)
"""All techniques, in the order of the table."""
