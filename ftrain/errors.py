"""The errors that ftrain raises, its warnings, and checks of arguments.

A message names the function, the argument or tree path, what was found, what is needed and what to do.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import warnings
from collections.abc import Sequence
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = [
    "BatchError",
    "CheckpointError",
    "ComposeError",
    "ConsumedError",
    "DataError",
    "DeviceError",
    "FtrainError",
    "Interrupted",
    "LossError",
    "NonFiniteError",
    "OptionError",
    "RankError",
    "StructureError",
    "TraceError",
    "UnreachableError",
    "VersionError",
]


class FtrainError(Exception):
    """Base class of all errors that ftrain raises.

    Attributes:
        result: if `ftrain.fit` raised it, what `fit` would have returned at that point; else None.
    """

    result: Any = None


class ComposeError(FtrainError, TypeError):
    """Parts that cannot be combined, or arguments of the wrong type."""


class OptionError(FtrainError, ValueError):
    """An option is outside its range or choices."""


class LossError(FtrainError, ValueError):
    """A loss function cannot be called or differentiated, or returned something that cannot."""


class BatchError(FtrainError, ValueError):
    """A batch has the wrong shape or structure for an operation."""


class StructureError(FtrainError, ValueError):
    """Two trees that must have the same structure, shapes and dtypes differ."""


class ConsumedError(FtrainError, RuntimeError):
    """A state was used after it was donated."""


class DeviceError(FtrainError, RuntimeError):
    """A device is unknown or unavailable, or lacks a required feature."""


class DataError(FtrainError, ValueError):
    """A dataset or its position is invalid, cannot be read, or ends too early."""


class NonFiniteError(FtrainError, ArithmeticError):
    """Too many steps in a row had a loss or gradient that was not finite."""


class TraceError(FtrainError, RuntimeError):
    """A step could not be captured as one graph."""


class Interrupted(SystemExit):
    """A signal ended `ftrain.fit`, after the state was saved; the exit code is 128 plus the number of the signal.

    Attributes:
        result: what `fit` would have returned at that point.
    """

    result: Any = None


class VersionError(FtrainError, ImportError):
    """The installed torch is too old, or lacks something that ftrain needs."""


class CheckpointError(FtrainError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit the state."""


class UnreachableError(CheckpointError):
    """A checkpoint cannot be read now, because a permission is missing, say, but may be intact.

    It is not replaced by an older checkpoint.
    """


class RankError(FtrainError, RuntimeError):
    """Another rank of the run failed, died or hangs; the message names it."""


LIBRARIES = f"{Path(__file__).parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}"
"""The directories of ftrain and torch. A message that names a line of the user's program skips files in them."""


def warn(message: str) -> None:
    """Issue a UserWarning at the innermost line outside of ftrain and torch: the call in the user's program."""
    skipped = (*LIBRARIES, contextlib.__file__)
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    warnings.warn_explicit(message, UserWarning, *place, registry)


def log_on_first_rank(message: str, *args: object, logger: str = "ftrain") -> None:
    """Log a warning about something that is the same on all ranks. Under torchrun only rank 0 logs it."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(logger).warning(message, *args)


MAX_LISTED = 8
"""The largest number of names or lines in a message."""

MAX_LINES = 20
"""The largest number of leaves of a checkpoint in a message."""


def listed(names: Sequence[str]) -> str:
    """Join names for a message; ``...`` stands for those after the first `MAX_LISTED`."""
    ellipsis = ["..."] if len(names) > MAX_LISTED else []
    return ", ".join([*names[:MAX_LISTED], *ellipsis])


def first_lines(lines: Sequence[str], limit: int = MAX_LISTED) -> str:
    """Join the first `limit` lines for a message, each after a line break. A last line counts the others."""
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "".join(f"\n  {line}" for line in [*lines[:limit], *more])


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, as `BaseException.add_note` does, also to one that is a frozen dataclass."""
    with contextlib.suppress(Exception):
        BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", []), text])


def kind_and_text(error: BaseException) -> str:
    """Return ``"Class: text"`` of an error, or ``"Class"`` if its text is empty, as that of a KeyboardInterrupt is."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


LARGER_IS_BETTER = {
    *("accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "iou", "miou", "dice"),
    *("map", "ndcg", "mrr", "r2", "psnr", "ssim", "mcc", "kappa", "reward", "top1", "top5"),
}
"""Words in the names of metrics for which a larger value is better."""

SMALLER_IS_BETTER = {"loss", "error", "err", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "wer", "cer"}
"""Words in the names of metrics for which a smaller value is better."""

NEGATED = {"neg", "negative", "minus"}
"""Words that reverse the direction, as in neg_log_loss of scikit-learn."""


def warn_of_mode(function: str, metric: str, mode: str) -> None:
    """Warn if the mode contradicts the name of a metric: "min" for an accuracy, or "max" for a loss."""
    words = {*re.split("[^a-z0-9]+", str(metric).lower())}
    words |= {word.rstrip("0123456789") for word in words}  # acc1, bleu4
    if "loss" in words:  # dice_loss
        words -= LARGER_IS_BETTER
    smaller_is_better = not SMALLER_IS_BETTER.isdisjoint(words)
    larger_is_better = not LARGER_IS_BETTER.isdisjoint(words)
    is_unclear = smaller_is_better == larger_is_better or not NEGATED.isdisjoint(words)  # top1_error, error_f1
    if is_unclear:
        return
    if smaller_is_better and mode == "max":
        warn(f"{function}: more of {metric!r} counts as better; pass mode='min' if less is")
    elif larger_is_better and mode == "min":
        warn(f"{function}: less of {metric!r} counts as better; pass mode='max' if more is")


def as_path(function: str, name: str, value: Any) -> Path:
    """Return the absolute path of a file or directory, which stays valid when the program changes its directory.

    ``~`` is the home directory, as in a shell. Raises an OptionError if `value` is not a path, is empty, or contains a
    null character.
    """
    if not isinstance(value, str | os.PathLike) or value == "" or "\0" in str(value):
        needed = 'a path as a str or pathlib.Path ("." is the working directory)'
        raise OptionError(f"{function}: {name} is {value!r}, needs {needed}")
    # Not `Path.expanduser`, which raises for ~name if there is no user of that name: it may be the name of a file.
    return Path(os.path.expanduser(value)).absolute()


def require_positive(function: str, name: str, value: Any) -> None:
    """Check that an argument is an integer of at least 1. Raises an OptionError if not."""
    whole_number(function, name, value, least=1)


def whole_number(function: str, name: str, value: Any, *, least: int = 0) -> int:
    """Return an integer of Python, numpy or torch as an int. Raises an OptionError for another value, or a small one.

    It must be at least `least`. A bool is not an integer here.
    """
    number = None
    with contextlib.suppress(TypeError):
        number = None if isinstance(value, bool) else index(value)
    if number is None or number < least:
        raise OptionError(f"{function}: {name} is {value!r}, needs a whole number of at least {least}")
    return number


def require_range(
    function: str, name: str, value: Any, low: float, high: float = float("inf"), *, closed: bool = False
) -> float:
    """Return a number in [low, high), or [low, high] if `closed`, as a float. Raises an OptionError if it is not."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (value == high and not closed):
        raise OptionError(
            f"{function}: {name} is {value!r}, needs a number in [{low:g}, {high:g}{']' if closed else ')'}"
        )
    return float(value)


def require_positive_number(function: str, name: str, value: Any) -> float:
    """Return a finite number above 0 as a float. Raises an OptionError if it is not."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise OptionError(f"{function}: {name} is {value!r}, needs a positive number")
    return float(value)


def require_switches(function: str, **values: Any) -> None:
    """Check that arguments are True or False. Raises an OptionError if not.

    Without the check a text such as ``"no"`` would count as true.
    """
    for name, value in values.items():
        if value not in (True, False):
            raise OptionError(f"{function}: {name} is {value!r}, needs True or False")


def require_choice(function: str, name: str, value: Any, choices: Sequence[str]) -> Any:
    """Return a text that is one of the choices. Raises an OptionError that names them if it is not."""
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{function}: {name} is {value!r}; choices are {', '.join(choices)}")
    return value


def require_order(function: str, step: Any, state: Any, needed: str) -> None:
    """Check that a step and a state are not swapped, and that the step is not a class. Raises a ComposeError if not.

    `needed` is the correct call of the function, for the message.
    """
    if not callable(step) and callable(state):
        raise ComposeError(f"{function}: the step and the state are swapped; needs {needed}")
    if isinstance(step, type):
        raise ComposeError(f"{function}: the step is the class {step.__name__}; needs an instance of it: {needed}")


def require_callable(function: str, step: Any, state: Any, needed: str) -> None:
    """Check as `require_order`, and that a step can be called and is no module. Raises a ComposeError if not."""
    require_order(function, step, state, needed)
    if isinstance(step, nn.Module):
        raise ComposeError(
            f"{function}: the step is the module {type(step).__name__}; needs a step that trains it: "
            "ft.train_step(ft.from_module(module, criterion), optimizer)"
        )
    if not callable(step):
        raise ComposeError(f"{function}: the step is {type(step).__name__}; needs a Step or a function (state, batch)")
