"""Models of transformers without the cache of keys and values that they would fill for a later generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn

from ftrain.errors import log_on_first_rank

_LOGGED: dict[str, WeakSet[nn.Module]] = {}
"""The modules of which the log says that they run without their cache, by the reason."""


def without_kv_cache(module: nn.Module | None, reason: str) -> Callable[[], AbstractContextManager[None]]:
    """Return ``() -> context`` in which ``config.use_cache`` is False in all modules of transformers.

    If one of them is True, the log says so once. `reason` begins with the name of the wrapper, and has a ``%s`` for the
    name of the module.
    """
    modules = module.modules() if module is not None else ()
    configs: list[Any] = [getattr(submodule, "config", None) for submodule in modules]
    logged = _LOGGED.setdefault(reason, WeakSet())

    @contextmanager
    def context() -> Iterator[None]:
        caching = [config for config in configs if getattr(config, "use_cache", None) is True]
        if module is not None and caching and module not in logged:
            logged.add(module)
            log_on_first_rank(reason, type(module).__name__)
        try:
            for config in caching:
                config.use_cache = False
            yield
        finally:
            for config in caching:
                config.use_cache = True

    return context
