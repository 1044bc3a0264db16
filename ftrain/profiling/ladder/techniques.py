"""The techniques of the performance guides: what each makes of a step and its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftrain import backends, tree
from ftrain.errors import BatchError, DeviceError
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
    """One technique.

    Args:
        method: what the guides call it.
        name: how it is written.
        apply: ``Case -> Case``; raises an `FtrainError` that says why where it does not apply.
        stacks: whether it is tried on top of others, for which it must leave the batch as it is.
    """

    method: str
    name: str
    apply: Callable[[Case], Case]
    stacks: bool = True


def replaced_wrappers(original: Step, variant: Step) -> str:
    """Return which wrappers of a variant have replaced those of the original step, as they print; "" for none."""
    old, new = _texts(original), _texts(variant)
    gone = ", ".join(text for text in old if text not in new)
    return f"{', '.join(text for text in new if text not in old)} in place of {gone}" if gone else ""


def _texts(step: Step) -> list[str]:
    # Wrappers of the loss print as the loss has them, which knows its blocks.
    return [*step.loss.wrappers, *(wrapper.text for wrapper in step.wrappers if wrapper.loss is None)]


def _double(case: Case) -> Case:
    return dataclasses.replace(case, batch=double_batch(case.batch))


def _halve(case: Case) -> Case:
    length, microbatches = length_of(case.batch), microbatches_of(case.step)
    if not length or length % (2 * microbatches):
        examples = "1 example" if length == 1 else f"{length} examples"
        more = f" and each taken in {microbatches} equal pieces" if microbatches > 1 else ""
        raise BatchError(f"{examples} cannot be halved{more}")
    return dataclasses.replace(case, batch=split_batch(case.batch, 2)[0])


def _double_microbatches(case: Case) -> Case:
    return dataclasses.replace(case, step=with_microbatches(case.step, 2 * microbatches_of(case.step), case.batch))


def _wrap(factory: Callable[..., Wrapper], *args: Any, **options: Any) -> Callable[[Case], Case]:
    """Return a function that adds a wrapper, which replaces one of its name."""
    return lambda case: dataclasses.replace(case, step=add_wrapper(case.step, factory(*args, **options)))


def _optimizer(name: str) -> Technique:
    def apply(case: Case) -> Case:
        return dataclasses.replace(case, step=smaller_optimizers(case.step)[name])

    return Technique("optimizer choice", name, apply)


def _empty_cache(case: Case) -> Case:
    record = backends.of(tree.device_of(case.batch))
    if record.empty_cache is None:
        raise DeviceError(f"{record.describe()} has no cache to empty")
    return _wrap(empty_cache, every=1)(case)


TECHNIQUES: tuple[Technique, ...] = (
    Technique("batch size", "batch x2", _double, stacks=False),
    Technique("batch size", "batch /2", _halve, stacks=False),
    Technique("gradient accumulation", "accumulate(2)", _double_microbatches),
    Technique("gradient checkpointing", "remat()", _wrap(remat)),
    Technique("gradient checkpointing", 'remat("dots")', _wrap(remat, "dots")),
    Technique("gradient checkpointing", "remat(budget=0.5)", _wrap(remat, budget=0.5)),
    Technique("mixed precision", 'with_amp("bf16")', _wrap(with_amp, "bf16")),
    Technique("mixed precision", 'with_amp("fp16")', _wrap(with_amp, "fp16")),
    Technique("mixed precision", 'with_amp("tf32")', _wrap(with_amp, "tf32")),
    _optimizer('adamw(state_dtype="bf16")'),
    _optimizer("adamw_8bit"),
    _optimizer("adafactor"),
    Technique("offload", 'offload("activations")', _wrap(offload, "activations")),
    Technique("offload", 'offload("opt_state")', _wrap(offload, "opt_state")),
    Technique("update in backward", "update_in_backward()", _wrap(update_in_backward)),
    Technique("emptied cache", "empty_cache(every=1)", _empty_cache),
    Technique("donation", "donated()", _wrap(donated)),
    Technique("torch.compile", "compiled()", _wrap(compiled)),
)
"""What `ftrain.ladder` tries, in its order."""
