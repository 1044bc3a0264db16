"""Losses and metrics that return a `Mean`, so that pieces of a batch add up to the whole exactly.

Every total and weight is a 0-d tensor in the dtype of the logits or predictions, float32 at least.
Nothing here reads a tensor's values on the host: shapes and dtypes are checked, labels are not.
"""

from ftrain.losses.classes import accuracy as accuracy
from ftrain.losses.classes import cross_entropy as cross_entropy
from ftrain.losses.elementwise import binary_cross_entropy as binary_cross_entropy
from ftrain.losses.elementwise import mse as mse
from ftrain.losses.linear import linear_cross_entropy as linear_cross_entropy

__all__ = [
    "accuracy",
    "binary_cross_entropy",
    "cross_entropy",
    "linear_cross_entropy",
    "mse",
]
