"""Losses and metrics that return a `Mean`, so that the sum over microbatches is exactly that of the batch.

Every total and weight is a 0-d tensor in the dtype of the logits or predictions, at least float32. Shapes and dtypes
are checked; the values of labels are not, because the host would have to read them.
"""

from ftrain.losses.classes import accuracy, cross_entropy
from ftrain.losses.elementwise import binary_cross_entropy, mse
from ftrain.losses.linear import linear_cross_entropy

__all__ = ["accuracy", "binary_cross_entropy", "cross_entropy", "linear_cross_entropy", "mse"]
