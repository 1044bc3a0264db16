"""How schedules print: short, with every digit that counts, and so that `eval` gives them back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ftrain.types import Schedule


@dataclass(frozen=True, repr=False)
class Written:
    """What prints as the call that made it."""

    text: str

    def __repr__(self) -> str:
        return self.text


def describe(value: float | Schedule) -> str:
    """How a number or a schedule prints in a pipeline: short, with every digit that counts.

    >>> from ftrain.optim.schedules import warmup_constant
    >>> describe(0.0003), describe(0.1), describe(1.0), describe(warmup_constant(0.001, 5)), describe(abs)
    ('3e-4', '0.1', '1', 'warmup_constant(1e-3, 5)', 'abs')
    """
    if callable(value):
        return str(getattr(value, "__name__", value))
    number = Decimal(repr(float(value))).normalize()
    return format(number, "f" if -3 < number.adjusted() < 6 else "e").replace("e+", "e")


def spelled(function: Callable[..., Any], **arguments: Any) -> str:
    """The call of a function: what it needs by position, what is not at its default by name."""
    parts = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty:
            parts.append(_spell(arguments[name]))
        elif arguments[name] != parameter.default:
            parts.append(f"{name}={_spell(arguments[name])}")
    return f"{function.__name__}({', '.join(parts)})"


def _spell(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_spell(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_spell, value))}]"
    return repr(value) if isinstance(value, int | str) else describe(value)
