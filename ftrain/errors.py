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
    """A checkpoint that may be intact cannot be read now, as for lack of a permission; nothing is done in its place."""


class RankError(FtrainError, RuntimeError):
    """Another rank of the run failed, died or hangs; the message names it."""


LIBRARIES = f"{Path(__file__).parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}"
"""How the names of files of ftrain and torch begin: a message that names a line of the user's skips these."""


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
    """Log a warning of what all ranks know alike: with torchrun, only the first one does."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(logger).warning(message, *args)


MAX_LISTED, MAX_LINES = 8, 20
"""The number of names that a message lists at most, and of the leaves of a checkpoint."""


def listed(names: Sequence[str]) -> str:
    """Join names for a message; ``...`` stands for those after the first `MAX_LISTED`."""
    return ", ".join([*names[:MAX_LISTED], *(["..."] if len(names) > MAX_LISTED else [])])


def first_lines(lines: Sequence[str], most: int = MAX_LISTED) -> str:
    """Join lines for a message, each after a line break; the last one counts those after the first `most`."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error, as `BaseException.add_note` does, which frozen dataclasses refuse."""
    with contextlib.suppress(Exception):
        BaseException.__setattr__(error, "__notes__", [*getattr(error, "__notes__", []), text])


def kind_and_text(error: BaseException) -> str:
    """Return the class of an error and its text, which may be empty, as of a KeyboardInterrupt."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


LARGER_IS_BETTER = {
    *("accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "iou", "miou", "dice"),
    *("map", "ndcg", "mrr", "r2", "psnr", "ssim", "mcc", "kappa", "reward", "top1", "top5"),
}
"""Words in the names of metrics of which more is better."""

SMALLER_IS_BETTER = {"loss", "error", "err", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "wer", "cer"}
"""Words in the names of metrics of which less is better."""

NEGATED = {"neg", "negative", "minus"}
"""Words that reverse which is better, as in neg_log_loss of scikit-learn."""


def warn_of_mode(function: str, metric: str, mode: str) -> None:
    """Warn if the mode contradicts the name of a metric: "min" for an accuracy, or "max" for a loss."""
    words = {*re.split("[^a-z0-9]+", str(metric).lower())}
    words |= {word.rstrip("0123456789") for word in words}  # acc1, bleu4
    if "loss" in words:  # dice_loss
        words -= LARGER_IS_BETTER
    is_less, is_more = not SMALLER_IS_BETTER.isdisjoint(words), not LARGER_IS_BETTER.isdisjoint(words)
    if is_less == is_more or not NEGATED.isdisjoint(words):  # top1_error, error_f1
        return
    if is_less and mode == "max":
        warn(f"{function}: more of {metric!r} counts as better; pass mode='min' if less is")
    elif is_more and mode == "min":
        warn(f"{function}: less of {metric!r} counts as better; pass mode='max' if more is")


def as_path(function: str, name: str, value: Any) -> Path:
    """Return the absolute path of a file or directory, which stays when the program changes its directory.

    ``~`` is the home directory, as in a shell. Raises an OptionError if it is no path, is empty, or has a null
    character.
    """
    if not isinstance(value, str | os.PathLike) or value == "" or "\0" in str(value):
        needed = 'a path as a str or pathlib.Path ("." is the working directory)'
        raise OptionError(f"{function}: {name} is {value!r}, needs {needed}")
    # Not `Path.expanduser`, which raises for a name that is no user: that may be the name of a file.
    return Path(os.path.expanduser(value)).absolute()


def require_positive(function: str, name: str, value: Any) -> None:
    """Check that an argument is an integer of at least 1. Raises an OptionError if not."""
    whole_number(function, name, value, least=1)


def whole_number(function: str, name: str, value: Any, *, least: int = 0) -> int:
    """Return an integer, of Python, numpy or torch, as an int. Raises an OptionError if it is none, or too small."""
    number = None
    with contextlib.suppress(TypeError):
        number = None if isinstance(value, bool) else index(value)
    if number is None or number < least:
        raise OptionError(f"{function}: {name} is {value!r}, needs a whole number of at least {least}")
    return number


def require_range(
    function: str, name: str, value: Any, low: float, high: float = float("inf"), *, closed: bool = False
) -> float:
    """Return a number in [low, high), or [low, high] if `closed`, as a float. Raises an OptionError if it is none."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (value == high and not closed):
        raise OptionError(
            f"{function}: {name} is {value!r}, needs a number in [{low:g}, {high:g}{']' if closed else ')'}"
        )
    return float(value)


def require_positive_number(function: str, name: str, value: Any) -> float:
    """Return a finite number above 0 as a float. Raises an OptionError if it is none."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise OptionError(f"{function}: {name} is {value!r}, needs a positive number")
    return float(value)


def require_switches(function: str, **values: Any) -> None:
    """Check that arguments are True or False: of texts, ``"no"`` counts as true. Raises an OptionError if not."""
    for name, value in values.items():
        if value not in (True, False):
            raise OptionError(f"{function}: {name} is {value!r}, needs True or False")


def require_choice(function: str, name: str, value: Any, choices: Sequence[str]) -> Any:
    """Return a text that is one of the choices. Raises an OptionError that names them if it is not."""
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{function}: {name} is {value!r}; choices are {', '.join(choices)}")
    return value


def require_order(function: str, step: Any, state: Any, needed: str) -> None:
    """Check that a step and a state are not swapped, and the step is not a class. Raises a ComposeError if not.

    `needed` is the right call of the function.
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
