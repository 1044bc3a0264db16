"""Trees of everything that a checkpoint can hold, and whether two are the same to the bit."""

import torch

import ftrain as ft
from tests.faults.problem import batch, make, params, squares


def state(steps=1, seed=0):
    """A state of training, of an optimizer and a wrapper with memories."""
    step = make(squares, ft.ema(0.9))
    made = step.init(params(), seed=seed)
    for _ in range(steps):
        made, _ = step(made, batch())
    return made


def everything(seed=0):
    """Tensors of all sorts, tied and strided, beside leaves that are none."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randn(4, 6, generator=draw)
    tied = torch.randn(5, generator=draw)
    return {
        "wide": wide,
        "turned": torch.randn(3, 4, generator=draw).t(),
        "tied": [tied, tied],
        "half": (torch.randn(7, generator=draw).bfloat16(), torch.randn(2, 3, generator=draw).half()),
        "complex": torch.randn(3, generator=draw, dtype=torch.complex64),
        "small": torch.randint(0, 200, (9,), generator=draw, dtype=torch.uint8),
        "yes": torch.randint(0, 2, (5,), generator=draw).bool(),
        "long": torch.randint(-9, 9, (2, 1, 2), generator=draw),
        "point": torch.randn((), generator=draw, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "mean": ft.Mean(torch.randn((), generator=draw), torch.randn((), generator=draw)),
        "größe": {1: torch.randn(2, generator=draw), "1": torch.randn(2, generator=draw)},
        "leaves": [None, True, 3, -0.1, 1 + 2j, "text", b"bytes", [], {}],
    }


def same(one, other):
    """Whether two trees agree in structure and in every bit; leaves that are no tensors by what is written of them."""
    left, spec = ft.tree.flatten(one)
    right, other_spec = ft.tree.flatten(other)
    return spec == other_spec and all(map(_same, left, right))


def _same(one, other):
    if type(one) is not type(other):
        return False
    if not isinstance(one, torch.Tensor):
        return repr(one) == repr(other)
    alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    return alike and torch.equal(_bits(one), _bits(other))


def _bits(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(-1).view(torch.uint8)
