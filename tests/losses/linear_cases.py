"""Inputs of `linear_cross_entropy`, and the same loss from the logits."""

import functools

import torch

from ftrain.losses import cross_entropy
from tests.losses import cases
from tests.losses.cases import F64, randn

CLASSES, WIDTH = 11, 6
EXACT = {"rtol": 1e-12, "atol": 1e-13}
SMOOTHINGS = [0.0, 0.1, 1.0]
CLASS_WEIGHT = torch.linspace(0, 2, CLASSES, dtype=F64)

random_labels = functools.partial(cases.random_labels, classes=CLASSES)


def layer(dtype=F64, classes=CLASSES, width=WIDTH):
    """Return the weight and the bias of a linear layer."""
    return randn(classes, width, seed=2, dtype=dtype), randn(classes, seed=3, dtype=dtype)


def loss_of_logits(hidden, weight, labels, *, bias=None, class_weight=None, chunk=None, **options):
    """Return the loss with all logits in memory; `chunk` is ignored."""
    logits = hidden @ weight.T
    return cross_entropy(logits if bias is None else logits + bias, labels, weight=class_weight, **options)


def loss_and_grads(function, hidden, weight, labels, *, bias=None, cotangent=1.7, **options):
    """Return the total, the weight, and the gradients of `cotangent` times the total."""
    inputs = [tensor.detach().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    loss = function(*inputs[:2], labels, bias=None if bias is None else inputs[2], **options)
    return loss.total.detach(), loss.weight, *torch.autograd.grad(loss.total * cotangent, inputs)


def assert_all_close(actual, expected, **tolerance):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or EXACT))


def relative_error(actual, expected):
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    return float((actual.double() - expected).norm() / expected.norm())
