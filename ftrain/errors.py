"""What can go wrong, by kind. Every message says where, what was found, what was needed and what to do."""

from __future__ import annotations

from typing import Any


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
