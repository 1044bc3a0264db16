"""A small model to adapt, and the same with its adapters written out by hand as modules."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

import ftrain as ft
from tests.laws.models import VOCABULARY, WIDTH, Drop, make_batch

TARGETS = ["embed", "*.up", "*.down", "head"]


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


def make(p=0.3, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(p).to(dtype)


def loss(model, batch):
    return ft.losses.cross_entropy(model(batch["tokens"]), batch["labels"])


def step_of(model, *wrappers, criterion=loss, optimizer=None, **options):
    base_step = ft.train_step(ft.from_module(model, criterion), optimizer or ft.optim.adamw(0.05), **options)
    return ft.compose(base_step, *wrappers)


def train(step, steps=3, seed=0, state=None):
    state, losses = step.init(seed=seed) if state is None else state, []
    for index in range(steps):
        state, metrics = step(state, make_batch(index))
        losses.append(float(metrics["loss"]))
    return state, losses


def adapters(tree):
    """The adapters in a tree by name, without what is frozen beside them."""
    return {name: leaf for name, leaf in tree.items() if leaf is not None and ".lora_" in name}


class ByHand(nn.Module):
    """``W + s B A`` of a linear map or an embedding, with magnitudes ``m (W + s B A) / |W + s B A|``."""

    def __init__(self, base, rank, scale, *, dropout, dora):
        super().__init__()
        self.base, self.scale, self.dropout = base, scale, nn.Dropout(dropout)
        out = base.weight.shape[1] if isinstance(base, nn.Embedding) else base.weight.shape[0]
        options = {"dtype": base.weight.dtype}
        if isinstance(base, nn.Embedding):
            self.lora_embedding_A = nn.Parameter(torch.zeros(rank, len(base.weight), **options))
            self.lora_embedding_B = nn.Parameter(torch.zeros(out, rank, **options))
        else:
            self.lora_A = nn.Linear(base.weight.shape[1], rank, bias=False, **options)
            self.lora_B = nn.Linear(rank, out, bias=False, **options)
        self.lora_magnitude_vector = nn.Parameter(torch.zeros(out, **options)) if dora else None

    def forward(self, x):
        table = isinstance(self.base, nn.Embedding)
        if table:
            added = (F.embedding(x, self.lora_embedding_A.T) * self.scale) @ self.lora_embedding_B.T
        else:
            dropped = self.dropout(x)
            added = self.lora_B(self.lora_A(dropped) * self.scale)
        if self.lora_magnitude_vector is None:
            return self.base(x) + added
        weight = self.base.weight.T if table else self.base.weight
        a, b = (self.lora_embedding_A, self.lora_embedding_B) if table else (self.lora_A.weight, self.lora_B.weight)
        whole = weight + self.scale * b @ a
        turned = (self.lora_magnitude_vector / whole.norm(dim=1).detach())[:, None] * whole
        if table:
            return F.embedding(x, turned.T)
        return F.linear(x, weight, self.base.bias) + F.linear(dropped, turned - weight)


def by_hand(model, state, rank, alpha, *, dropout=0.0, dora=False, rslora=False):
    """A copy of a model whose targets carry their adapters, with the values they have in a state."""
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    model = copy.deepcopy(model)
    parts = dict(model.named_modules())
    for name in ["embed", "head", *(f"blocks.{i}.{part}" for i in range(2) for part in ("up", "down"))]:
        owner, _, last = name.rpartition(".")
        setattr(parts[owner], last, ByHand(parts[name], rank, scale, dropout=dropout, dora=dora))
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in adapters(state.params).items():
            tensors[name].copy_(value)
    return model
