"""Schedules: pure functions from the optimizer step, counted from 0, to a value. They run on the host.

The step counts updates of the optimizer: microbatches of `accumulate` do not advance it.

What the functions share:

* `peak` is the largest value. The functions `warmup_...` begin with a warm-up: ``peak k / warmup`` for ``k < warmup``;
  then the decay counts its steps from 0. `total` counts the warm-up too, and is not less than it.
* A decay reaches `end` at ``k = total`` and stays there, where transformers' cosine would rise again.
* Values are those of ``transformers.optimization`` or of torch's schedulers, to the last bit.
* Values must be finite numbers, and steps integers of at least 0; otherwise an `OptionError` names the function and the
  argument, and says what it needs.
* Two schedules are equal if they are the same call; they pickle, and ``eval(repr(schedule))`` returns an equal one.

>>> schedule = warmup_cosine(0.0003, warmup=100, total=2000)
>>> schedule
warmup_cosine(3e-4, 100, 2000)
>>> schedule(0), schedule(50), schedule(100), schedule(2000)
(0.0, 0.00015, 0.0003, 0.0)
"""

from ftrain.optim.schedules.call import describe
from ftrain.optim.schedules.combine import ahead, as_schedule, chain, scale
from ftrain.optim.schedules.drawing import plot
from ftrain.optim.schedules.named import named
from ftrain.optim.schedules.phases import one_cycle, piecewise, warmup_stable_decay
from ftrain.optim.schedules.plateau import Plateau, reduce_on_plateau
from ftrain.optim.schedules.warmup_and_decay import (
    constant,
    cosine,
    cosine_restarts,
    exponential,
    inverse_sqrt,
    linear,
    polynomial,
    step_decay,
    warmup_constant,
    warmup_cosine,
    warmup_cosine_restarts,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
)

__all__ = [
    "Plateau",
    "ahead",
    "as_schedule",
    "chain",
    "constant",
    "cosine",
    "cosine_restarts",
    "describe",
    "exponential",
    "inverse_sqrt",
    "linear",
    "named",
    "one_cycle",
    "piecewise",
    "plot",
    "polynomial",
    "reduce_on_plateau",
    "scale",
    "step_decay",
    "warmup_constant",
    "warmup_cosine",
    "warmup_cosine_restarts",
    "warmup_inverse_sqrt",
    "warmup_linear",
    "warmup_polynomial",
    "warmup_stable_decay",
]
