"""The tiny model of the laws: dropout, BatchNorm, tied weights and repeated blocks; with its losses and batches."""

import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain.random.keys import dropout

VOCABULARY, WIDTH, LENGTH, BATCH = 7, 6, 5, 8


class Drop(nn.Module):
    """Stock dropout, or in training counter-based dropout if `rng` is a key; `index` tells the blocks apart."""

    def __init__(self, p, index):
        super().__init__()
        self.p, self.index = p, index

    def forward(self, x, rng):
        if rng is None or not self.training:
            return F.dropout(x, self.p, self.training)
        return dropout(ft.random.fold_in(rng, self.index), x, self.p)


class Block(nn.Module):
    def __init__(self, p, index):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), Drop(p, index)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, rng):
        normed = self.norm(x.flatten(0, 1)).view_as(x)
        return x + self.drop(self.down(torch.tanh(self.up(normed))), rng)


class Tiny(nn.Module):
    """Predicts the next token; the embedding is also the output layer."""

    def __init__(self, p=0.3, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(p, index) for index in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, rng=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rng)
        return self.head(x)


def token_loss(model, batch):
    """Return the mean loss over the tokens that are not padding, and the accuracy."""
    logits = model(batch["tokens"])
    return ft.losses.cross_entropy(logits, batch["labels"]), {"accuracy": ft.losses.accuracy(logits, batch["labels"])}


def keyed_loss(model, batch, rng):
    """Return the mean loss over the tokens that are not padding, with counter-based dropout."""
    logits = model(batch["tokens"], rng)
    return ft.losses.cross_entropy(logits, batch["labels"])


def make_model(p=0.3, dtype=torch.float64, blocks=2):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tiny(p, blocks).to(dtype)


def make_batch(index, batch=BATCH):
    """Return tokens and labels, int64 of shape (batch, LENGTH); each row has another number of padded labels."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (batch, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (batch, 1), generator=generator)
    return {"tokens": tokens, "labels": torch.where(torch.arange(LENGTH) < lengths, labels, -100)}
