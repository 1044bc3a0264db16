"""The options of a formula: what its functions read from the factory that has made them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

PLAIN = int, float, str, tuple
"""Types of options of which `repr` says all."""


def read_from_factory(*functions: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the numbers and texts that functions within a factory read from it, by their names there."""
    nonlocals = [inspect.getclosurevars(each).nonlocals for each in functions if inspect.isfunction(each)]
    return {name: value for each in nonlocals for name, value in sorted(each.items()) if isinstance(value, PLAIN)}
