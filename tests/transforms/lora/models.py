"""A small model to adapt, the same model with its adapters written out as modules, and functions that train them."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

import ftrain as ft
from tests.laws.models import VOCABULARY, WIDTH, Drop, make_batch

TARGETS = ["embed", "*.up", "*.down", "head"]
VARIANTS = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "dropout": {"dora": True, "dropout": 0.3},
}
"""Options of `ft.lora`, by a name for the tests."""


class Block(nn.Module):
    def __init__(self, p, index):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), Drop(p, index)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, rng):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))), rng)


class Net(nn.Module):
    """Predicts the next token."""

    def __init__(self, p=0.3):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(p, index) for index in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, rng=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rng)
        return self.head(x)


def make_model(p=0.3, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(p).to(dtype)


def loss(model, batch):
    return ft.losses.cross_entropy(model(batch["tokens"]), batch["labels"])


def make_step(model, *wrappers, criterion=loss, optimizer=None, **options):
    base_step = ft.train_step(ft.from_module(model, criterion), optimizer or ft.optim.adamw(0.05), **options)
    return ft.compose(base_step, *wrappers)


def train(step, steps=3, state=None):
    """Return the state and the losses of a run on the first batches, from `state` or a new state."""
    if state is None:
        state = step.init(seed=0)
    losses = []
    for index in range(steps):
        state, metrics = step(state, make_batch(index))
        losses.append(float(metrics["loss"]))
    return state, losses


def without_none(tree):
    """Return the leaves of a tree by name, without the names of leaves that another part of the state has."""
    return {name: leaf for name, leaf in tree.items() if leaf is not None}


def adapters_in(tree):
    """Return the adapters among the leaves of a tree, by name."""
    return {name: leaf for name, leaf in without_none(tree).items() if ".lora_" in name}


class AdaptedByHand(nn.Module):
    """A linear map or an embedding with the weight ``W + s B A``, or with magnitudes ``m (W + s B A) / |W + s B A|``.

    The adapters have the names of peft. Their values are to be set.
    """

    def __init__(self, base, rank, scale, *, dropout, dora):
        super().__init__()
        self.base, self.scale, self.dropout = base, scale, nn.Dropout(dropout)
        self.is_embedding = isinstance(base, nn.Embedding)
        inputs, outputs = base.weight.shape if self.is_embedding else reversed(base.weight.shape)
        dtype = base.weight.dtype
        if self.is_embedding:
            self.lora_embedding_A = nn.Parameter(torch.zeros(rank, inputs, dtype=dtype))
            self.lora_embedding_B = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype))
        else:
            self.lora_A = nn.Linear(inputs, rank, bias=False, dtype=dtype)
            self.lora_B = nn.Linear(rank, outputs, bias=False, dtype=dtype)
        self.lora_magnitude_vector = nn.Parameter(torch.zeros(outputs, dtype=dtype)) if dora else None

    def forward(self, x):
        if self.lora_magnitude_vector is not None:
            return self._forward_with_magnitudes(x)
        if self.is_embedding:
            return self.base(x) + (F.embedding(x, self.lora_embedding_A.T) * self.scale) @ self.lora_embedding_B.T
        return self.base(x) + self.lora_B(self.lora_A(self.dropout(x)) * self.scale)

    def _forward_with_magnitudes(self, x):
        if self.is_embedding:
            weight, a, b = self.base.weight.T, self.lora_embedding_A, self.lora_embedding_B
        else:
            weight, a, b = self.base.weight, self.lora_A.weight, self.lora_B.weight
        adapted = weight + self.scale * b @ a
        rescaled = (self.lora_magnitude_vector / adapted.norm(dim=1).detach())[:, None] * adapted
        if self.is_embedding:
            return F.embedding(x, rescaled.T)
        return F.linear(x, weight, self.base.bias) + F.linear(self.dropout(x), rescaled - weight)


def adapt_by_hand(model, state, rank, alpha, *, dropout=0.0, dora=False, rslora=False):
    """Return a copy of a model whose targets are `AdaptedByHand`, with the adapters of a state."""
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    for target in ["embed", "head", *(f"blocks.{i}.{layer}" for i in range(2) for layer in ("up", "down"))]:
        parent, _, attribute = target.rpartition(".")
        setattr(modules[parent], attribute, AdaptedByHand(modules[target], rank, scale, dropout=dropout, dora=dora))
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in adapters_in(state.params).items():
            params[name].copy_(value)
    return model
