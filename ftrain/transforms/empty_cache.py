"""Return the memory that the allocator has cached to the device, after every n-th step."""

from __future__ import annotations

import functools

from ftrain.backends import Backend
from ftrain.errors import log_on_first_rank, require_positive
from ftrain.step.wrapper import OnStep, Wrapper, wrapper
from ftrain.types import PyTree


@wrapper
def empty_cache(every: int) -> Wrapper:
    """Return the memory that the device's allocator has cached to the device after every n-th step.

    Use it for other processes on the device, and against fragmentation where the lengths of batches change. Torch must
    then allocate the memory again: often a tenth of a step for ``every=1``. The host does this after it has queued the
    step, outside of any graph. On a device without such a cache, the log says once that this does nothing.

    Args:
        every: the cache is emptied after each step whose number, the state's `step`, is a multiple of this.

    Raises:
        OptionError: when `every` is not a positive whole number.
    """
    require_positive("empty_cache", "every", every)
    log_once = functools.cache(log_on_first_rank)

    def require(backend: Backend, params: PyTree) -> None:
        if backend.empty_cache is None:
            log_once("empty_cache: does nothing on %s, which has no cache to empty", backend.describe())

    def on_step_end(backend: Backend, steps: int) -> None:
        if backend.empty_cache is not None and steps % every == 0:
            backend.empty_cache()

    return Wrapper("empty_cache", f"empty_cache(every={every})", step=OnStep(on_step_end=on_step_end), require=require)
