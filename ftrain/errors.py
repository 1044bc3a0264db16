"""The kinds of errors, and checks of arguments. Messages say where, what was found, what is needed and what to do."""

from __future__ import annotations

from typing import Any, SupportsIndex

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
    "StructureError",
    "TraceError",
    "VersionError",
]


class FtrainError(Exception):
    """Base of every error that ftrain raises on purpose.

    Raised out of `ftrain.fit`, its `result` holds what was trained until then, as `fit` returns it.
    """

    result: Any = None


class ComposeError(FtrainError, TypeError):
    """Parts were put together in a way that has no meaning."""


class OptionError(FtrainError, ValueError):
    """An option has a value outside its choices or range."""


class LossError(FtrainError, ValueError):
    """A loss function returned or did something a gradient cannot be taken of."""


class BatchError(FtrainError, ValueError):
    """A batch has axes that do not fit what is done to it."""


class StructureError(FtrainError, ValueError):
    """Two trees that must have the same structure, shapes and dtypes do not."""


class ConsumedError(FtrainError, RuntimeError):
    """A state was used after it had been donated."""


class DeviceError(FtrainError, RuntimeError):
    """A device is not there, or lacks what was asked of it."""


class DataError(FtrainError, ValueError):
    """The data is empty, or ends before the training does."""


class NonFiniteError(FtrainError, ArithmeticError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class TraceError(FtrainError, RuntimeError):
    """A step could not be captured as one graph."""


class Interrupted(SystemExit):
    """A signal has ended `ftrain.fit`, which has saved the state; the exit code is 128 plus the signal's number."""

    result: Any = None


class VersionError(FtrainError, ImportError):
    """The installed torch is older than ftrain needs, or lacks something that ftrain relies on."""


class CheckpointError(FtrainError, RuntimeError):
    """A checkpoint could not be written, is damaged, or does not fit."""


def require_positive(function: str, name: str, value: Any) -> None:
    """Check for a positive whole number.

    Raises:
        OptionError: naming the function, the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value.__index__() < 1:
        raise OptionError(f"{function}: {name} is {value!r}, needs a whole number of at least 1")


def require_range(function: str, name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Check that a constant lies in [low, high).

    Raises:
        OptionError: naming the function, the argument, its value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < high:
        raise OptionError(f"{function}: {name} is {value!r}, needs a number in [{low:g}, {high:g})")


def require_order(function: str, step: Any, state: Any, needed: str) -> None:
    """Check that a step does not stand where the state does, and is no class.

    Raises:
        ComposeError: naming the function, what was found and `needed`, how it is called.
    """
    if not callable(step) and callable(state):
        raise ComposeError(f"{function}: the step and the state are swapped; needs {needed}")
    if isinstance(step, type):
        raise ComposeError(f"{function}: the step is the class {step.__name__}; needs an instance of it: {needed}")


def require_callable(function: str, step: Any, state: Any, needed: str) -> None:
    """Check that a step can be called with a state and a batch, as far as can be told without doing so.

    Raises:
        ComposeError: as `require_order`, and for what cannot be called.
    """
    require_order(function, step, state, needed)
    if not callable(step):
        raise ComposeError(f"{function}: the step is {type(step).__name__}; needs a Step or a function (state, batch)")
