"""ftrain: functional training in pure PyTorch. A step is a pure function, everything else a wrapper.

A training step maps ``(state, batch)`` to ``(state, metrics)``; mixed precision, accumulation,
rematerialisation, clipping, averaging and compilation are wrappers that take a step and return a step.
"""

import importlib
import typing

from ftrain import _torch as _torch
from ftrain import backends, checkpoint, data, errors, losses, optim, parallel, random, tree
from ftrain._version import __version__
from ftrain.checkpoint import Checkpoints
from ftrain.optim import schedules
from ftrain.parallel.sharded import sharded
from ftrain.step.blocks import block
from ftrain.step.compose import compose
from ftrain.step.eval_step import EvalStep, eval_step
from ftrain.step.evaluate import evaluate
from ftrain.step.module import from_module, to_module
from ftrain.step.step import Step, train_step
from ftrain.step.wrapper import OnGrad, OnLoss, OnStep, OnUpdate, SlotSpec, Wrapper, wrapper
from ftrain.training import loggers
from ftrain.training.early_stopping import patience, plateau
from ftrain.training.fit import fit
from ftrain.training.iterate import iterate
from ftrain.training.replay import replay
from ftrain.training.run import FitResult
from ftrain.transforms import lora as adapters
from ftrain.transforms.accumulate import accumulate
from ftrain.transforms.amp.wrapper import with_amp
from ftrain.transforms.averages import averaged, ema, swa
from ftrain.transforms.clip import clip
from ftrain.transforms.compile.wrapper import compiled
from ftrain.transforms.donated import donated
from ftrain.transforms.empty_cache import empty_cache
from ftrain.transforms.lora import lora
from ftrain.transforms.matmul_precision import matmul_precision
from ftrain.transforms.offload.wrapper import offload
from ftrain.transforms.remat.wrapper import remat
from ftrain.transforms.sam import sam
from ftrain.transforms.skip_nonfinite import skip_nonfinite
from ftrain.transforms.skip_spikes import skip_spikes
from ftrain.transforms.sync_batch_norm import sync_batch_norm
from ftrain.transforms.update_in_backward import update_in_backward
from ftrain.types import Gradients, Mean, TrainState

if typing.TYPE_CHECKING:
    from ftrain.profiling.anatomy import Anatomy, anatomy
    from ftrain.profiling.hints import Hint, hints
    from ftrain.profiling.ladder import Ladder, Technique, ladder
    from ftrain.profiling.precision_report import PrecisionReport, precision_report
    from ftrain.profiling.tuning import Trials, trials, tune

__all__ = [
    "Anatomy",
    "Checkpoints",
    "EvalStep",
    "FitResult",
    "Gradients",
    "Hint",
    "Ladder",
    "Mean",
    "OnGrad",
    "OnLoss",
    "OnStep",
    "OnUpdate",
    "PrecisionReport",
    "SlotSpec",
    "Step",
    "Technique",
    "TrainState",
    "Trials",
    "Wrapper",
    "__version__",
    "accumulate",
    "adapters",
    "anatomy",
    "averaged",
    "backends",
    "block",
    "checkpoint",
    "clip",
    "compiled",
    "compose",
    "data",
    "donated",
    "ema",
    "empty_cache",
    "errors",
    "eval_step",
    "evaluate",
    "fit",
    "from_module",
    "hints",
    "iterate",
    "ladder",
    "loggers",
    "lora",
    "losses",
    "matmul_precision",
    "offload",
    "optim",
    "parallel",
    "patience",
    "plateau",
    "precision_report",
    "random",
    "remat",
    "replay",
    "sam",
    "schedules",
    "sharded",
    "skip_nonfinite",
    "skip_spikes",
    "swa",
    "sync_batch_norm",
    "to_module",
    "train_step",
    "tree",
    "trials",
    "tune",
    "update_in_backward",
    "with_amp",
    "wrapper",
]

_IMPORTED_WHEN_USED = {
    **dict.fromkeys(("Anatomy", "anatomy"), "ftrain.profiling.anatomy"),
    **dict.fromkeys(("Hint", "hints"), "ftrain.profiling.hints"),
    **dict.fromkeys(("Ladder", "Technique", "ladder"), "ftrain.profiling.ladder"),
    **dict.fromkeys(("PrecisionReport", "precision_report"), "ftrain.profiling.precision_report"),
    **dict.fromkeys(("Trials", "trials", "tune"), "ftrain.profiling.tuning"),
}


def __dir__() -> list[str]:
    return __all__


if not typing.TYPE_CHECKING:
    # Type checkers would take any name for one that exists.
    def __getattr__(name: str) -> typing.Any:
        """Import a name of `ftrain.profiling` when it is first used: most programs do not profile steps."""
        if name not in _IMPORTED_WHEN_USED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)
        globals()[name] = value
        return value
