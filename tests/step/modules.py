"""Modules with dropout, BatchNorm, tied weights and reassigned buffers, and a plain torch loop that trains them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import ftrain as ft

LR = 0.1
STEPS = 3


class Net(nn.Module):
    """BatchNorm, dropout and tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.embed(tokens))))


class Recurrent(nn.Module):
    def __init__(self, layer_class):
        super().__init__()
        self.inner = layer_class(4, 5, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.inner(x)[0])


class Reassigning(nn.Module):
    """Assigns new tensors to its buffers in the forward, also to one of a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.inner.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.inner.calls = self.inner.calls + 1
        self.largest = torch.maximum(self.largest, x.detach().max())
        return self.inner(x) * self.largest / self.inner.calls


def floats(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(seed=0):
    return torch.randint(7, (8,), generator=torch.Generator().manual_seed(seed))


def vectors(seed=0):
    return floats(8, 4, seed=seed)


def sequences(seed=0):
    return floats(2, 6, 4, seed=seed)


def mean_square(model, batch):
    return model(batch).square().mean()


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch), batch.flip(0))


CASES = {
    "net": (Net, tokens, cross_entropy),
    "lstm": (lambda: Recurrent(nn.LSTM), sequences, mean_square),
    "gru": (lambda: Recurrent(nn.GRU), sequences, mean_square),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), sequences, mean_square),
    "weight_norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()),
        vectors,
        mean_square,
    ),
    "spectral_norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh()),
        vectors,
        mean_square,
    ),
    "reassigned": (Reassigning, vectors, mean_square),
}
"""Name -> function that builds a module, function from a seed to a batch, criterion."""

all_cases = pytest.mark.parametrize("name", CASES)


def make_case(name):
    """Return a module in float64, the function that makes its batches, and its criterion."""
    build, make_batch, criterion = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double(), make_batch, criterion


def make_step(module, criterion, *wrappers, optimizer=None, **options):
    step = ft.train_step(ft.from_module(module, criterion), optimizer or ft.optim.sgd(LR), **options)
    return ft.compose(step, *wrappers)


def train(step, make_batch, **options):
    """Return the state after some steps; the options are those of `init`."""
    state = step.init(**options)
    for index in range(STEPS):
        state, _ = step(state, make_batch(index))
    return state


def seed_as_step(index, seed=0):
    """Seed torch as step `index` does, so that stock dropout draws the same."""
    words = ft.random.fold_in_key_data(ft.random.key_data(ft.random.key(seed)), index)
    torch.manual_seed(ft.random.seed_of(words))


def train_by_hand(module, make_batch, criterion, steps=STEPS):
    """Train a copy in a plain torch loop, and return it and the gradients of the first step."""
    module = copy.deepcopy(module).train()
    first_grads = {}
    with torch.random.fork_rng():
        for index in range(steps):
            module.zero_grad()
            seed_as_step(index)
            criterion(module, make_batch(index)).backward()
            with torch.no_grad():
                for name, param in module.named_parameters():
                    first_grads.setdefault(name, param.grad.clone())
                    param -= LR * param.grad
    return module, first_grads
