"""A plain function ``(state, batch) -> (state, metrics)`` as a compiled graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ftrain.errors import TraceError
from ftrain.transforms.compile.cache import CompiledCache
from ftrain.transforms.compile.constants import Constants
from ftrain.transforms.compile.fallback import CompilerError
from ftrain.transforms.compile.settings import Compiler
from ftrain.types import PyTree

FAILED = TraceError, CompilerError
"""The errors after which a step or a function runs in another way."""
log = logging.getLogger("ftrain")


class CompiledFunction:
    """A plain function ``(state, batch) -> (state, metrics)``, compiled."""

    is_compiled = True
    """As `Step.is_compiled`."""

    def __init__(self, function: Callable[..., Any], compiler: Compiler, *, donate: bool) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._cache: Callable[..., Any] = CompiledCache(
            function, compiler, self.__name__, donate=donate, constants=Constants(function)
        )

    def __call__(self, state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Run the function, compiled if it can be captured."""
        try:
            return self._cache(state, batch)  # type: ignore[no-any-return]
        except FAILED as error:
            failed_stage = "captured" if isinstance(error, TraceError) else "compiled"
            log.warning("compiled: %s runs uncompiled, since it cannot be %s: %s", self.__name__, failed_stage, error)
        self._cache = self._function
        return self._function(state, batch)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"compiled({self.__name__})"
