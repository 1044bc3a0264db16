"""Trees with everything that a checkpoint can hold, and a comparison of two trees to the bit."""

import torch

import ftrain as ft
from tests.faults.problem import batch, make, params, squares


def state(steps=1, seed=0):
    """Return a state after some steps, with the state of an optimizer and of a wrapper."""
    step = make(squares, ft.ema(0.9))
    new_state = step.init(params(), seed=seed)
    for _ in range(steps):
        new_state, _ = step(new_state, batch())
    return new_state


def everything(seed=0):
    """Return a tree with tensors of many dtypes, tied and strided ones, and other leaves."""
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


def have_same_bits(first, second):
    """Whether two trees have the same structure and bits; other leaves than tensors are compared as text."""
    first_leaves, spec = ft.tree.flatten(first)
    second_leaves, other_spec = ft.tree.flatten(second)
    return spec == other_spec and all(map(_leaves_have_same_bits, first_leaves, second_leaves))


def _leaves_have_same_bits(first, second):
    if type(first) is not type(second):
        return False
    if not isinstance(first, torch.Tensor):
        return repr(first) == repr(second)
    same_layout = (first.dtype, first.shape, first.stride()) == (second.dtype, second.shape, second.stride())
    return same_layout and torch.equal(_bits(first), _bits(second))


def _bits(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(-1).view(torch.uint8)
