"""Models with random weights: a null model, many leaves, an MLP, GPT, BERT and Llama.

They need only torch, so that a GPU machine needs no more libraries than ftrain does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Leaves(nn.Module):
    """`count` parameters of two elements each, which are all used at almost no cost."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(self.leaves)).tanh().mean() * x


def null() -> nn.Module:
    """Return one 1x1 linear map, whose training step has only overhead."""
    return nn.Sequential(nn.Linear(1, 1))


def mlp(width: int, layers: int) -> nn.Module:
    """Return linear layers of equal width, each followed by tanh."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))


class FeedForward(nn.Module):
    """The feed-forward part of a block: two linear maps with exact GELU between them, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer block with exact GELU and no dropout, pre-norm as in GPT-2 or post-norm as in BERT."""

    def __init__(self, width: int, heads: int, *, causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.norm_first = heads, causal, norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = FeedForward(width)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (_split(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(_merge(attended))

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x))
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.feed(x))


class GPT(nn.Module):
    """A decoder with learned position embeddings; with `tied` the head shares the token embedding, as in GPT-2."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, length: int, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True, norm_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.apply(_init_weights)
        if tied:
            self.head.weight = self.tokens.weight

    def hidden(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.norm(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


class BERT(nn.Module):
    """A post-norm encoder and a classifier of two classes, without dropout so that losses can be compared."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.segments, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, norm_first=False) for _ in range(layers))
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 2)
        self.apply(_init_weights)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.tokens(x) + self.positions.weight[: x.shape[1]] + self.segments.weight[0])
        for block in self.blocks:
            h = block(h)
        return self.head(torch.tanh(self.pool(h[:, 0])))


class Head(nn.Module):
    """The last linear layer alone. Its input is a parameter too, so that its gradient is computed."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(1, length, width))
        self.weight = nn.Parameter(torch.randn(vocabulary, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.hidden, self.weight)


class LlamaBlock(nn.Module):
    """RMS norms, grouped queries, rotary positions and SwiGLU (Touvron et al. 2023, arXiv:2307.09288)."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * groups * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm1(x)
        q = _split(self.q(h), self.heads)
        k, v = (_split(part, self.groups) for part in self.kv(h).chunk(2, -1))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(_merge(attended))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A decoder like Llama 3, with the embedding tied to the head as in Llama 3.2 1B."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, heads: int, groups: int, inner: int, length: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)
        self.apply(_init_weights)
        self.head.weight = self.tokens.weight
        size = width // heads
        angles = torch.outer(torch.arange(length).float(), 500_000.0 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        h, cos, sin = self.tokens(x), self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.norm(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def _split(x: Tensor, heads: int) -> Tensor:
    """Reshape (batch, time, heads * size) to (batch, heads, time, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    """Reshape (batch, heads, time, size) to (batch, time, heads * size)."""
    return x.transpose(1, 2).flatten(2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
