"""The options of a formula: the values that its functions capture from their factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

PLAIN = int, float, str, tuple
"""Types of options that `repr` describes completely."""


def read_from_factory(*functions: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the numbers and strings that the functions in a factory capture from it, by name."""
    nonlocals = [inspect.getclosurevars(each).nonlocals for each in functions if inspect.isfunction(each)]
    return {name: value for each in nonlocals for name, value in sorted(each.items()) if isinstance(value, PLAIN)}
