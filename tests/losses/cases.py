"""Inputs of losses, and comparisons with torch."""

import torch

CLASSES = 5
F64 = torch.float64
EXACT = {"rtol": 1e-13, "atol": 1e-14}


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def random_labels(*shape, classes=CLASSES, ignore_index=-100, seed=1):
    """Return labels of which about 30% are ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, ignore_index, labels)


def class_weights():
    return torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0], dtype=F64)


def value_and_grad(function, x):
    x = x.detach().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


def assert_equals_torch(loss, torch_loss, x):
    """Check that a function to a Mean and one to a tensor have the same value, gradient and dtype at `x`."""
    value, grad = value_and_grad(lambda x: loss(x).value, x)
    expected_value, expected_grad = value_and_grad(torch_loss, x)
    assert value.dtype == expected_value.dtype
    torch.testing.assert_close(value, expected_value, **EXACT)
    torch.testing.assert_close(grad, expected_grad, **EXACT)


def is_scalar(mean, dtype):
    """Return whether the total and the weight of a Mean are 0-d tensors of this dtype."""
    return all(tensor.shape == () and tensor.dtype == dtype for tensor in (mean.total, mean.weight))


def numbers(mean):
    """Return the total and the weight."""
    return float(mean.total.detach()), float(mean.weight)
