"""What does a step cost beside the loop one would write by hand? Same model, same data, same maths.

Every variant clips to norm 1 and takes AdamW; the losses of all are compared before anything is timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ftrain as ft
from bench.timing import Run

LR = 1e-3
MAX_NORM = 1.0
Batch = dict[str, Tensor]
Case = tuple[Callable[[], nn.Module], Callable[[], Batch]]


class Block(nn.Module):
    """A pre-norm transformer block of width 128 with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def null() -> nn.Module:
    """One 1x1 linear map: nothing but the cost of a step."""
    return nn.Linear(1, 1)


def mlp() -> nn.Module:
    """Four layers of width 128."""
    layers = [part for _ in range(4) for part in (nn.Linear(128, 128), nn.Tanh())]
    return nn.Sequential(*layers)


def gpt() -> nn.Module:
    """Four blocks of width 128 over 256 tokens of vocabulary."""
    return nn.Sequential(
        nn.Embedding(256, 128), *(Block(128) for _ in range(4)), nn.LayerNorm(128), nn.Linear(128, 256)
    )


def floats(*shape: int) -> Callable[[], Batch]:
    """A batch of numbers to regress on."""
    return lambda: {"x": torch.randn(shape), "y": torch.randn(shape)}


def tokens(*shape: int) -> Callable[[], Batch]:
    """A batch of tokens to predict."""
    return lambda: {"x": torch.randint(256, shape), "y": torch.randint(256, shape)}


CASES: dict[str, Case] = {
    "null": (null, floats(1, 1)),
    "mlp 4x128, batch 64": (mlp, floats(64, 128)),
    "gpt 128x4, 8x128 tokens": (gpt, tokens(8, 128)),
}


def criterion(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error of numbers, cross-entropy of tokens."""
    out: Tensor = model(batch["x"])
    if batch["y"].is_floating_point():
        return F.mse_loss(out, batch["y"])
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


def variants(case: Case) -> dict[str, Run]:
    """The same training as a hand-written loop and as a step of ftrain, each ready to run once more."""
    torch.manual_seed(0)
    model, batch = case[0](), case[1]()
    made = {
        "loop, eager": _loop(copy.deepcopy(model), batch, compiled=False),
        "loop, torch.compile(model)": _loop(copy.deepcopy(model), batch, compiled=True),
        "ftrain, eager": _step(model, batch),
        "ftrain, eager, donated": _step(model, batch, ft.donated()),
        "ftrain, compiled": _step(model, batch, ft.compiled()),
        "ftrain, compiled, donated": _step(model, batch, ft.compiled(donate=True)),
    }
    _require_equal({name: [float(run().detach()) for _ in range(3)] for name, run in made.items()})
    return made


def _loop(model: nn.Module, batch: Batch, *, compiled: bool) -> Callable[[], Any]:
    # Fused wants the decay by groups to do the same as ftrain's default; without decay there is no difference.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    forward = torch.compile(model) if compiled else model

    def run() -> Tensor:
        loss = criterion(forward, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return run


def _step(model: nn.Module, batch: Batch, *wrappers: ft.Wrapper) -> Callable[[], Any]:
    optimizer = ft.optim.adamw(LR)
    step = ft.compose(ft.train_step(ft.from_module(model, criterion), optimizer), ft.clip(MAX_NORM), *wrappers)
    state = step.init()

    def run() -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        loss: Tensor = metrics["loss"]
        return loss

    return run


def _require_equal(losses: dict[str, list[float]]) -> None:
    needed = next(iter(losses.values()))
    for name, found in losses.items():
        if any(abs(a - b) > 1e-4 * max(1.0, abs(b)) for a, b in zip(found, needed, strict=True)):
            raise SystemExit(f"bench: {name} computes something else: {found}, needs {needed}")
