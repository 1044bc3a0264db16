"""Schedules: pure functions from the optimizer step, counted from 0, to a value, evaluated on the host.

The step is that of the optimizer: accumulating over microbatches does not advance it.

Values are those of ``transformers.optimization``, to the last bit: a warm-up starts at 0 and reaches the
peak at ``k = warmup``; a decay reaches its end at ``k = total`` (which counts the warm-up) and holds it
exactly from there on, where transformers' cosine would rise again.

Two schedules are equal if the same call made them; they pickle, and ``eval(repr(schedule))`` gives
the schedule back.

>>> schedule = warmup_cosine(0.0003, warmup=100, total=2000)
>>> schedule
warmup_cosine(3e-4, 100, 2000)
>>> schedule(0), schedule(50), schedule(100), schedule(2000)
(0.0, 0.00015, 0.0003, 0.0)
"""

from ftrain.optim.schedules.cosines import cosine as cosine
from ftrain.optim.schedules.cosines import cosine_restarts as cosine_restarts
from ftrain.optim.schedules.cosines import warmup_cosine as warmup_cosine
from ftrain.optim.schedules.cosines import warmup_cosine_restarts as warmup_cosine_restarts
from ftrain.optim.schedules.cycle import one_cycle as one_cycle
from ftrain.optim.schedules.decays import constant as constant
from ftrain.optim.schedules.decays import linear as linear
from ftrain.optim.schedules.decays import polynomial as polynomial
from ftrain.optim.schedules.decays import warmup_constant as warmup_constant
from ftrain.optim.schedules.decays import warmup_linear as warmup_linear
from ftrain.optim.schedules.decays import warmup_polynomial as warmup_polynomial
from ftrain.optim.schedules.drawing import plot as plot
from ftrain.optim.schedules.exponential import exponential as exponential
from ftrain.optim.schedules.exponential import step_decay as step_decay
from ftrain.optim.schedules.inverse_sqrt import inverse_sqrt as inverse_sqrt
from ftrain.optim.schedules.inverse_sqrt import warmup_inverse_sqrt as warmup_inverse_sqrt
from ftrain.optim.schedules.joined import ahead as ahead
from ftrain.optim.schedules.joined import as_schedule as as_schedule
from ftrain.optim.schedules.joined import chain as chain
from ftrain.optim.schedules.joined import scale as scale
from ftrain.optim.schedules.names import named as named
from ftrain.optim.schedules.piecewise import piecewise as piecewise
from ftrain.optim.schedules.plateau import Plateau as Plateau
from ftrain.optim.schedules.plateau import reduce_on_plateau as reduce_on_plateau
from ftrain.optim.schedules.stable import warmup_stable_decay as warmup_stable_decay
from ftrain.optim.schedules.text import describe as describe

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
