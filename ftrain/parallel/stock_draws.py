"""Random operations of torch (`nn.Dropout`) in an eager step on many ranks: each example draws as on one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from ftrain import _torch, random, tree
from ftrain._torch import collectives
from ftrain.backends.generators import LOCK
from ftrain.parallel.mesh import Group
from ftrain.random import torch_ops
from ftrain.step.microbatch import first_example
from ftrain.types import TrainState

T = TypeVar("T")

log = logging.getLogger("ftrain")


class StockDraws:
    """Runs functions so that torch's random operations draw from the key of the step, if they draw at all.

    Drawing from a key takes a few microseconds of Python per operation, so all ranks find out in the first run whether
    the function draws. If it did not, later runs only check whether torch's generator has advanced. If it has, a single
    rank runs the function again; one of several ranks cannot, because the others would not run their collectives again.
    """

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._is_drawing: bool | None = None

    def run(self, function: Callable[[], T], state: TrainState) -> tuple[T, AbstractContextManager[Any]]:
        """Return the result of a function, which is called once, or once more after an unexpected draw.

        Also return the context for a backward pass that is run later, and may run parts of the function again.
        """
        device = tree.device_of(state.params)
        if torch_ops.current() is not None or _torch.is_fake(tree.leaves(state.params)[0]):
            return function(), nullcontext()
        if self._is_drawing is False:
            old_state = _generator_state(device)
            result = function()
            if torch.equal(old_state, _generator_state(device)):
                return result, nullcontext()
            self._is_drawing = True
            if self._ranks.size > 1:
                log.warning(
                    "sharded: the loss drew from torch's generator in step %d, but not in the first step: what it drew "
                    "in this step depends on the number of ranks; from now on it does not",
                    int(state.step),
                )
                return result, nullcontext()
        key_data = random.fold_in_key_data(random.key_data(state.rng), int(state.step))
        key = random.wrap_key_data(random.stock_key_data(key_data))
        with torch_ops.Keyed(key, on_host=device == tree.HOST) as stream:
            # The examples are counted by `Rows`, from the first one of a microbatch on.
            stream.examples = first_example(), 1
            result = function()
        if self._is_drawing is None:
            draws = torch.tensor(stream.offset, device=device)
            with collectives.uncounted():
                self._is_drawing = bool(self._ranks.sum(draws) > 0)
        return result, stream


def _generator_state(device: torch.device) -> Tensor:
    module = torch if device == tree.HOST else torch.get_device_module(device)
    with LOCK:
        state: Tensor = module.get_rng_state()
    return state
