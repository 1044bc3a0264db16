"""The techniques of the performance guides, one a line: what each makes of a step and its batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ftrain import backends, tree
from ftrain.errors import BatchError, ComposeError, DeviceError
from ftrain.profiling.step_variants import having, in_pieces_of, length_of, pieces_of, smaller_optimizers, texts, twice
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


def replacement(given: Step, made: Step) -> str:
    """Return which wrappers of a step have taken the place of others, as they print."""
    old, new = texts(given), texts(made)
    gone = ", ".join(text for text in old if text not in new)
    return f"{', '.join(text for text in new if text not in old)} in place of {gone}" if gone else ""


def _doubled(case: Case) -> Case:
    return dataclasses.replace(case, batch=twice(case.batch))


def _halved(case: Case) -> Case:
    length, pieces = length_of(case.batch), pieces_of(case.step)
    if not length or length % (2 * pieces):
        more = f" and each taken in {pieces} equal pieces" * (pieces > 1)
        raise BatchError(f"{length} example{'s' * (length != 1)} cannot be halved{more}")
    return dataclasses.replace(case, batch=split_batch(case.batch, 2)[0])


def _with(make: Callable[[], Wrapper]) -> Callable[[Case], Case]:
    """Give the step a wrapper, in the place of the one of that name."""
    return lambda case: dataclasses.replace(case, step=having(case.step, make()))


def _in_more_pieces(case: Case) -> Case:
    return dataclasses.replace(case, step=in_pieces_of(case.step, 2 * pieces_of(case.step), case.batch))


def _optimized(name: str, case: Case) -> Case:
    return dataclasses.replace(case, step=smaller_optimizers(case.step)[name])


def _emptied(case: Case) -> Case:
    record = backends.of(tree.device_of(case.batch))
    if record.empty_cache is None:
        raise DeviceError(f"{record.describe()} has no cache to empty")
    return dataclasses.replace(case, step=having(case.step, empty_cache(every=1)))


def _compiled(case: Case) -> Case:
    if any(wrapper.step for wrapper in case.step.wrappers):
        raise ComposeError("the step has it already")
    return dataclasses.replace(case, step=having(case.step, compiled()))


TECHNIQUES: tuple[Technique, ...] = (
    Technique("batch size", "batch x2", _doubled, stacks=False),
    Technique("batch size", "batch /2", _halved, stacks=False),
    Technique("gradient accumulation", "accumulate(2)", _in_more_pieces),
    Technique("gradient checkpointing", "remat()", _with(remat)),
    Technique("gradient checkpointing", 'remat("dots")', _with(partial(remat, "dots"))),
    Technique("gradient checkpointing", "remat(budget=0.5)", _with(partial(remat, budget=0.5))),
    Technique("mixed precision", 'with_amp("bf16")', _with(partial(with_amp, "bf16"))),
    Technique("mixed precision", 'with_amp("fp16")', _with(partial(with_amp, "fp16"))),
    Technique("mixed precision", 'with_amp("tf32")', _with(partial(with_amp, "tf32"))),
    *(
        Technique("optimizer choice", name, partial(_optimized, name))
        for name in ('adamw(state_dtype="bf16")', "adamw_8bit", "adafactor")
    ),
    Technique("offload", 'offload("activations")', _with(partial(offload, "activations"))),
    Technique("offload", 'offload("opt_state")', _with(partial(offload, "opt_state"))),
    Technique("update in backward", "update_in_backward()", _with(update_in_backward)),
    Technique("emptied cache", "empty_cache(every=1)", _emptied),
    Technique("donation", "donated()", _with(donated)),
    Technique("torch.compile", "compiled()", _compiled),
)
"""All that `ftrain.ladder` tries, in its order."""
