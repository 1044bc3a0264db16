"""Train a byte-level GPT on the source code of Python's own standard library, with the whole pipeline of ftrain.

Shows how mixed precision, accumulation, clipping, averaging and compilation compose around one pure step, and how
`ft.fit` runs it. Needs no download: the text is the standard library of the interpreter that runs it.

    python examples/train_lm.py            # about two and a half minutes on two CPU cores
    python examples/train_lm.py --help
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import einops
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import ftrain as ft

VOCABULARY = 256
"""A token is a byte."""


# ---------------------------------------------------------------------------------------------------- model


class GPT(nn.Module):
    """A pre-norm transformer decoder: ``tokens (batch, time) -> logits (batch, time, 256)``.

    Rotary positions (Su et al. 2021, arXiv:2104.09864), RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467),
    also of queries and keys (Henry et al. 2020, arXiv:2010.04245), and squared ReLU (So et al. 2021,
    arXiv:2109.08668).
    """

    def __init__(self, *, width: int, layers: int, heads: int, length: int, context: int = 1) -> None:
        super().__init__()
        self.length = length
        self.context = context
        self.embed = nn.Embedding(VOCABULARY * context, width)
        self.blocks = nn.ModuleList(Block(width, heads, length) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=1.0 / math.sqrt(context))
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for back in range(1, self.context):
            x = x + F.pad(self.embed(tokens[:, :-back] + VOCABULARY * back), (0, 0, back, 0))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and a multilayer perceptron, each added to ``x (batch, time, width)``."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, heads, length)
        self.mlp_norm, self.mlp = nn.RMSNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        angles = torch.outer(torch.arange(length), 1.0 / 1000.0 ** torch.linspace(0, 1, width // heads // 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = einops.rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads).unbind()
        x = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        out: Tensor = self.out(einops.rearrange(x, "b h t d -> b t (h d)"))
        return out

    def rotate(self, x: Tensor) -> Tensor:
        """Normalise ``x (batch, heads, time, d)`` and turn each pair of its features by an angle that grows with time."""
        x = F.rms_norm(x, x.shape[-1:])
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """Squared ReLU between two linear maps, four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.relu(self.up(x)).square())
        return x


def next_byte_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[ft.Mean, dict[str, ft.Mean]]:
    """Cross-entropy of every byte given those before it, in nats, and the same in bits."""
    loss = ft.losses.cross_entropy(model(batch["tokens"]), batch["labels"])
    return loss, {"bpb": ft.Mean(loss.total / math.log(2), loss.weight)}


# ----------------------------------------------------------------------------------------------------- data


def standard_library() -> tuple[Tensor, Tensor, str]:
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(path for path in root.rglob("*.py") if excluded.isdisjoint(path.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in files:
        held_out = zlib.crc32(path.relative_to(root).as_posix().encode()) % 20 == 0
        parts[held_out].append(path.read_bytes())
    train, valid = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    text = (
        f"{len(parts[0])} files, {len(train) / 1e6:.1f} MB; "
        f"held out {len(parts[1])} files, {len(valid) / 1e6:.2f} MB"
    )
    return train, valid, text


class Windows:
    def __init__(self, text: Tensor, batch: int, length: int, seed: int) -> None:
        self.text, self.batch, self.length, self.key = text, batch, length, ft.random.key(seed)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        count = 0
        while True:
            key = ft.random.fold_in(self.key, count)
            starts = ft.random.randint(key, (self.batch, 1), 0, len(self.text) - self.length)
            yield example(self.text[starts + torch.arange(self.length + 1)])
            count += 1


def example(bytes_: Tensor) -> dict[str, Tensor]:
    tokens = bytes_.long()
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def in_order(text: Tensor, batch: int, length: int, batches: int) -> Iterator[dict[str, Tensor]]:
    windows = text.unfold(0, length + 1, length)
    n = len(windows) // batch
    step = max(1, n // batches) if batches else 1
    for i in range(0, n * batch, batch * step):
        yield example(windows[i : i + batch])


def main() -> None:
    p = argparse.ArgumentParser()
    for name, v in dict(steps=600, batch=16, accumulate=1, length=256, width=128, layers=4, heads=4, lr=3e-3, warmup=50, ema=0.99, b2=0.99, wd=0.1, seed=0, amp="bf16", eval_batches=40, out="/tmp/lm/x", context=1, clip=1.0, end=0.0).items():
        p.add_argument("--" + name.replace("_", "-"), type=type(v), default=v)
    p.add_argument("--remat", action="store_true")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    a = p.parse_args()
    torch.manual_seed(a.seed)
    train, valid, text = standard_library()
    print(text)
    model = GPT(width=a.width, layers=a.layers, heads=a.heads, length=a.length, context=a.context)
    print(sum(x.numel() for x in model.parameters()))
    same = lambda s: s
    sched = ft.schedules.warmup_cosine(a.lr, warmup=a.warmup, total=a.steps, end=a.end)
    step = ft.compose(
        ft.train_step(ft.from_module(model, next_byte_loss), ft.optim.adamw(sched, b2=a.b2, weight_decay=a.wd)),
        ft.remat() if a.remat else same,
        ft.with_amp(a.amp) if a.amp != "none" else same,
        ft.accumulate(a.accumulate) if a.accumulate > 1 else same,
        ft.clip(a.clip),
        ft.ema(a.ema),
        ft.compiled() if a.compile else same,
    )
    print(step)
    state = step.init(seed=a.seed)
    t0, c0 = time.perf_counter(), time.process_time()
    data = Windows(train, a.batch, a.length, a.seed)
    first = []
    state, history = ft.fit(step, state, data, steps=a.steps, throughput={"tokens": lambda b: b["tokens"].numel()},
        loggers=[lambda r: first.append((time.perf_counter() - t0, time.process_time() - c0))])
    t, c = time.perf_counter() - t0, time.process_time() - c0
    print(f"{a}\n wall {t:.1f} cpu {c:.1f} (/2 = {c/2:.1f}); first10 {first[0]}; tokens/s {(a.steps-10)*a.batch*a.length/(t-first[0][0]):.0f} tokens/cpu2 {(a.steps-10)*a.batch*a.length/(c-first[0][1])*2:.0f}")
    es = ft.eval_step(ft.from_module(model, next_byte_loss))
    dt = None if a.amp == "none" else a.amp
    t0 = time.perf_counter()
    for name, s in (("ema", ft.averaged(state)), ("raw", state)):
        print("RESULT", name, ft.evaluate(es, s, in_order(valid, 32, a.length, a.eval_batches), dtype=dt))
    print("eval", time.perf_counter() - t0)


main()
