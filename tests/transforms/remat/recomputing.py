"""Functions that are recomputed in the backward pass, and their arguments."""

import torch

from ftrain.transforms.remat.checkpoint import recomputed

SIZE = 4


def recomputing(function):
    """Return a function that computes the same, and is recomputed when its gradient is needed."""
    return lambda *args, **kwargs: recomputed(function, function, args, kwargs)


def random_leaf():
    """Return a random matrix that requires a gradient, float64 of shape (SIZE, SIZE)."""
    return torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)


def catching(x, w):
    """Catches all errors of its own; the exception that ends a recomputation must not be among them."""
    try:
        return torch.tanh(x @ w).sin()
    except Exception:
        return x * 0
