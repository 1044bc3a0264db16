"""Whether a position of a `Loader` fits another one: the same data and the same options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from ftrain.data.iterable_source import IterableSource
from ftrain.data.map_source import MapSource

Source: TypeAlias = MapSource | IterableSource

BATCH_FACTORS = "batch_size", "num_ranks"
"""The options whose product is the number of samples in a batch of all ranks."""


def differences_of(source: Source, state: Mapping[str, Any]) -> list[str]:
    """Return why a state is not one of this source, a line for each reason; [] if it is."""
    counters = ["epoch", "skipped", *source.start]
    options = source.fingerprint
    differences = [f"{name}: missing" for name in [*counters, *options] if name not in state]
    differences += [f"{name}: unexpected" for name in state if name not in {*counters, *options, *source.optional_keys}]
    differences += [
        f"{name}: found {state[name]!r}, needs a whole number of at least 0"
        for name in counters
        if name in state and not _is_count(state[name])
    ]
    may_differ: tuple[str, ...] = ()
    if (size := _global_batch_size(options)) is not None and _global_batch_size(state) == size:
        may_differ = BATCH_FACTORS
    differences += [
        f"{name}: found {state[name]!r}, this loader has {value!r}"
        for name, value in options.items()
        if name in state and state[name] != value and name not in may_differ
    ]
    num_windows = source.num_windows
    if not differences and num_windows is not None and state["window"] > num_windows:
        return [f"window is {state['window']}, and an epoch has {num_windows}"]
    return differences


def _global_batch_size(options: Mapping[str, Any]) -> int | None:
    """Return the number of samples in a batch of all ranks; None if it is not fixed."""
    factors = [options.get(name) for name in BATCH_FACTORS]
    if "max_tokens" in options or "pack" in options or not all(map(_is_count, factors)):
        return None
    return math.prod(factors)  # type: ignore[arg-type]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
