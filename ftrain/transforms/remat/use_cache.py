"""Models that fill a cache of keys and values while they run, as those of transformers do by default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

NAME = "use_cache"


def configs_of(module: nn.Module) -> list[Any]:
    """Return the configurations, of a module and its parts, that say whether it fills a cache."""
    configs = [getattr(part, "config", None) for part in module.modules()]
    return list({id(config): config for config in configs if hasattr(config, NAME)}.values())


def filling(configs: list[Any]) -> list[Any]:
    """Return those of configurations by which a cache is filled now."""
    return [config for config in configs if getattr(config, NAME) is True]


@contextmanager
def turned_off(configs: list[Any]) -> Iterator[None]:
    """Let nothing fill a cache; afterwards the configurations are as they were."""
    try:
        for config in configs:
            setattr(config, NAME, False)
        yield
    finally:
        for config in configs:
            setattr(config, NAME, True)
