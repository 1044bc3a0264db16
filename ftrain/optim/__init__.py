"""Optimizers as pairs of pure functions, `(init, update)`: one family per file."""

from ftrain.optim.adafactor import adafactor as adafactor
from ftrain.optim.adagrad import adagrad as adagrad
from ftrain.optim.adam import adam as adam
from ftrain.optim.adam import adamw as adamw
from ftrain.optim.adam import adamw_8bit as adamw_8bit
from ftrain.optim.chain import GradientTransform as GradientTransform
from ftrain.optim.chain import centralize as centralize
from ftrain.optim.chain import chain as chain
from ftrain.optim.chain import noise as noise
from ftrain.optim.chain import project as project
from ftrain.optim.chain import sign as sign
from ftrain.optim.inject_hyperparams import adjust as adjust
from ftrain.optim.inject_hyperparams import adjustable as adjustable
from ftrain.optim.lamb import lamb as lamb
from ftrain.optim.lion import lion as lion
from ftrain.optim.lookahead import lookahead as lookahead
from ftrain.optim.muon import muon as muon
from ftrain.optim.nadam import nadam as nadam
from ftrain.optim.partition import partition as partition
from ftrain.optim.radam import radam as radam
from ftrain.optim.rmsprop import rmsprop as rmsprop
from ftrain.optim.schedule_free import schedule_free_adamw as schedule_free_adamw
from ftrain.optim.schedule_free import schedule_free_params as schedule_free_params
from ftrain.optim.sgd import sgd as sgd
from ftrain.tree.name_patterns import everything as everything
from ftrain.tree.name_patterns import matrices as matrices

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
