"""Steps with each optimizer on a model whose leaves have all shapes, among them empty ones."""

import torch

import ftrain as ft
from ftrain import optim
from tests.laws.optimizers import COMBINED, MATRICES_ONLY, OPTIMIZERS

F64 = torch.float64


def make(name, **more):
    """Return the optimizer; one that updates only matrices has AdamW for the other parameters."""
    if name not in MATRICES_ONLY:
        return (OPTIMIZERS | COMBINED)[name](**more)
    parts = {"matrices": OPTIMIZERS[name](**more), "rest": optim.adamw(0.05)}
    return optim.partition(parts, lambda _, leaf: "matrices" if leaf.ndim == 2 else "rest")


def make_params(dtype=F64):
    shapes = {"w": (3, 4), "b": (4,), "out": (4, 2), "scale": (), "one": (1,), "empty": (0,), "hollow": (0, 3)}
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=F64).to(dtype) for name, shape in shapes.items()}


def make_batch(index, rows=8, dtype=F64):
    draw = torch.Generator().manual_seed(100 + index)
    x, y = (torch.randn(rows, n, generator=draw, dtype=F64).to(dtype) for n in (3, 2))
    return {"x": x, "y": y, "weight": torch.rand(rows, generator=draw, dtype=F64).to(dtype)}


def loss(params, batch):
    hidden = torch.tanh(batch["x"] @ params["w"] + params["b"]) * params["scale"] * params["one"]
    nothing = params["empty"].sum() + params["hollow"].sum()
    errors = (hidden @ params["out"] - batch["y"]).square().mean(-1) + nothing
    return ft.Mean((errors * batch["weight"]).sum(), batch["weight"].sum())


def build(name, *wrappers, criterion=loss):
    return ft.compose(ft.train_step(criterion, make(name, weight_decay=0.1)), *wrappers)


def train(step, dtype=F64, steps=4):
    state = step.init(make_params(dtype))
    for index in range(steps):
        state, _ = step(state, make_batch(index, dtype=dtype))
    return state
