"""Optimizers as pairs of pure functions, `(init, update)`: one family a file."""

from ftrain.optim.adamw import adamw as adamw
from ftrain.optim.partition import partition as partition
from ftrain.optim.sgd import sgd as sgd
