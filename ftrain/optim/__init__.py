r"""Optimizers as pairs of pure functions, `(init, update)`: one family per file.

Arguments that mean the same in every optimizer:

* `lr`: learning rate :math:`\eta`, a number of at least 0 or a schedule.
* `b1`, `b2`: :math:`\beta_1` and :math:`\beta_2`, the decay rates of the first and second moment, in [0, 1).
* `eps`: :math:`\epsilon`, added to the denominator, in [0, 1).
* `weight_decay`: :math:`\lambda`, at least 0; in `adamw`, `adamw_8bit`, `lion` and `muon` a number or a schedule.
* `decay_mask`: which parameters decay, a function ``(name, leaf) -> bool`` or patterns of names. Default: `matrices`,
  those with two axes or more; or `everything` in the optimizers that are as in `torch.optim`.
* `maximize`: maximize the loss instead of minimizing it.
* `state_dtype`: dtype of the moments, ``"bf16"`` or ``"fp32"``; the update is then computed in float32. Default: the
  dtype of each parameter.
* `stochastic_rounding`: round moments and parameters that are stored in bfloat16 up or down at random. Default: if
  `state_dtype` is ``"bf16"``.

Formulas name the parameter :math:`p`, its gradient :math:`g` and the number of the update :math:`t`, which counts from
1. Moments have the shapes of the parameters and their dtypes, or `state_dtype`. Every factory raises an
`ftrain.errors.OptionError` if an argument is out of its range; so does `Optimizer.init` if a pattern of `decay_mask`
matches no parameter.
"""

from ftrain.optim.adafactor import adafactor
from ftrain.optim.adagrad import adagrad
from ftrain.optim.adam import adam, adamw, adamw_8bit
from ftrain.optim.adjustable import adjust, adjustable
from ftrain.optim.chain import GradientTransform, centralize, chain, noise, project, sign
from ftrain.optim.lamb import lamb
from ftrain.optim.lion import lion
from ftrain.optim.lookahead import lookahead
from ftrain.optim.muon import muon
from ftrain.optim.nadam import nadam
from ftrain.optim.partition import partition
from ftrain.optim.radam import radam
from ftrain.optim.rmsprop import rmsprop
from ftrain.optim.schedule_free import schedule_free_adamw, schedule_free_params
from ftrain.optim.sgd import sgd
from ftrain.tree.name_patterns import everything, matrices

__all__ = [
    "GradientTransform",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "adamw_8bit",
    "adjust",
    "adjustable",
    "centralize",
    "chain",
    "everything",
    "lamb",
    "lion",
    "lookahead",
    "matrices",
    "muon",
    "nadam",
    "noise",
    "partition",
    "project",
    "radam",
    "rmsprop",
    "schedule_free_adamw",
    "schedule_free_params",
    "sgd",
    "sign",
]
