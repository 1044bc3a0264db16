"""ftrain: functional training in pure PyTorch. A step is a pure function, everything else a wrapper.

A training step maps ``(state, batch)`` to ``(state, metrics)``; mixed precision, accumulation,
rematerialisation, clipping, averaging and compilation are wrappers that take a step and return a step.
"""

import importlib
import typing

from ftrain import _torch as _torch
from ftrain import backends as backends
from ftrain import checkpoint as checkpoint
from ftrain import data as data
from ftrain import errors as errors
from ftrain import losses as losses
from ftrain import optim as optim
from ftrain import parallel as parallel
from ftrain import random as random
from ftrain import tree as tree
from ftrain._version import __version__ as __version__
from ftrain.checkpoint import Checkpoints as Checkpoints
from ftrain.optim import schedules as schedules
from ftrain.parallel.sharded import sharded as sharded
from ftrain.step.blocks import block as block
from ftrain.step.compose import compose as compose
from ftrain.step.compose import train_step as train_step
from ftrain.step.evaluate import EvalStep as EvalStep
from ftrain.step.evaluate import eval_step as eval_step
from ftrain.step.evaluate import evaluate as evaluate
from ftrain.step.module import from_module as from_module
from ftrain.step.module import to_module as to_module
from ftrain.step.step import Step as Step
from ftrain.step.wrapper import OnGrad as OnGrad
from ftrain.step.wrapper import OnLoss as OnLoss
from ftrain.step.wrapper import OnStep as OnStep
from ftrain.step.wrapper import OnUpdate as OnUpdate
from ftrain.step.wrapper import SlotSpec as SlotSpec
from ftrain.step.wrapper import Wrapper as Wrapper
from ftrain.step.wrapper import wrapper as wrapper
from ftrain.training import loggers as loggers
from ftrain.training.early_stopping import patience as patience
from ftrain.training.early_stopping import plateau as plateau
from ftrain.training.fit import fit as fit
from ftrain.training.iterate import iterate as iterate
from ftrain.training.replay import replay as replay
from ftrain.training.run import FitResult as FitResult
from ftrain.transforms import lora as adapters
from ftrain.transforms.accumulate import accumulate as accumulate
from ftrain.transforms.amp.wrapper import with_amp as with_amp
from ftrain.transforms.averages import averaged as averaged
from ftrain.transforms.averages import ema as ema
from ftrain.transforms.averages import swa as swa
from ftrain.transforms.clip import clip as clip
from ftrain.transforms.compile.wrapper import compiled as compiled
from ftrain.transforms.donated import donated as donated
from ftrain.transforms.empty_cache import empty_cache as empty_cache
from ftrain.transforms.lora import lora as lora
from ftrain.transforms.matmul_precision import matmul_precision as matmul_precision
from ftrain.transforms.offload.wrapper import offload as offload
from ftrain.transforms.remat.wrapper import remat as remat
from ftrain.transforms.sam import sam as sam
from ftrain.transforms.skip_nonfinite import skip_nonfinite as skip_nonfinite
from ftrain.transforms.skip_spikes import skip_spikes as skip_spikes
from ftrain.transforms.sync_batch_norm import sync_batch_norm as sync_batch_norm
from ftrain.transforms.update_in_backward import update_in_backward as update_in_backward
from ftrain.types import Gradients as Gradients
from ftrain.types import Mean as Mean
from ftrain.types import TrainState as TrainState

if typing.TYPE_CHECKING:
    from ftrain.profiling.anatomy import Anatomy as Anatomy
    from ftrain.profiling.anatomy import anatomy as anatomy
    from ftrain.profiling.hints import Hint as Hint
    from ftrain.profiling.hints import hints as hints
    from ftrain.profiling.ladder import Ladder as Ladder
    from ftrain.profiling.ladder import Technique as Technique
    from ftrain.profiling.ladder import ladder as ladder
    from ftrain.profiling.precision_report import PrecisionReport as PrecisionReport
    from ftrain.profiling.precision_report import precision_report as precision_report
    from ftrain.profiling.tuning import Trials as Trials
    from ftrain.profiling.tuning import trials as trials
    from ftrain.profiling.tuning import tune as tune

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
        """Import what measures steps, which most programs do not, when it is first used."""
        if name not in _IMPORTED_WHEN_USED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_IMPORTED_WHEN_USED[name]), name)
        globals()[name] = value
        return value
