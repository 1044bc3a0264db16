"""Models that fill a cache of keys and values while they run, as those of transformers do by default."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

log = logging.getLogger("ftrain")


def without_cache(module: nn.Module | None) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes a context in which the module fills no cache; the log says once that it had one.

    A cache is filled where the ``config.use_cache`` of the module, or of a part of it, is True.
    """
    parts = module.modules() if module is not None else ()
    configs: list[Any] = [getattr(part, "config", None) for part in parts]
    is_logged = False

    @contextmanager
    def context() -> Iterator[None]:
        nonlocal is_logged
        caching = [config for config in configs if getattr(config, "use_cache", None) is True]
        if caching and not is_logged:
            is_logged = True
            log.warning(
                "remat: %s runs without its cache of keys and values (use_cache=False), which a block that is computed "
                "again would fill twice",
                type(module).__name__,
            )
        try:
            for config in caching:
                config.use_cache = False
            yield
        finally:
            for config in caching:
                config.use_cache = True

    return context
