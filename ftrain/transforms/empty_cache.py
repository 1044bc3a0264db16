"""Give cached memory back to the device now and then."""

from __future__ import annotations

import logging

from ftrain.backends import Backend
from ftrain.errors import require_positive
from ftrain.step.wrapper import OnStep, Wrapper, wrapper
from ftrain.types import PyTree

log = logging.getLogger("ftrain")


@wrapper
def empty_cache(every: int) -> Wrapper:
    """Give the memory that the device's allocator caches back to it after every n-th step.

    For other processes on the device, and against fragments where the lengths of batches change; torch then has to ask
    for memory again, which takes time (often a tenth of a step for ``every=1``). It happens on the host when the step
    has been queued, outside of any graph; nothing here waits for the device, though its driver may. The results are the
    same to the bit. Which steps these are follows from the state's `step`, so that a resumed run goes on with the same.

    On a device without a cache, or one that cannot be emptied, it does nothing and says so once, in the log.

    Args:
        every: how many steps there are from one time to the next.

    Raises:
        OptionError: when `every` is not a positive whole number.
    """
    require_positive("empty_cache", "every", every)
    said: set[str] = set()

    def require(backend: Backend, params: PyTree) -> None:
        if backend.empty_cache is None and backend.name not in said:
            said.add(backend.name)
            log.warning("empty_cache: does nothing on %s, which has no cache to empty", backend.describe())

    def on_step_end(backend: Backend, steps: int) -> None:
        if backend.empty_cache is not None and steps % every == 0:
            backend.empty_cache()

    return Wrapper("empty_cache", f"empty_cache(every={every})", step=OnStep(on_step_end=on_step_end), require=require)
