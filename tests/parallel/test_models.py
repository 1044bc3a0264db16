"""Models that people train, on four ranks: the numbers of a loop of plain torch, and with dropout of one rank."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ftrain as ft
from tests.exhaustive import exhaustive
from tests.parallel import transformers_models
from tests.parallel.ranks import run, seeded
from tests.parallel.results import assert_leaves_near

STEPS = 3
ADAMW = {"eps": 1e-4, "weight_decay": 0.0}
"""The gradient of some biases of attention is 0 up to rounding, which a small eps would magnify."""


class Convolutions(nn.Module):
    """Blocks of a residual net with the statistics of BatchNorm frozen, as it is fine-tuned."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(*(ConvBlock() for _ in range(2)))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))

    def train(self, mode=True):
        super().train(mode)
        for part in self.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
        return self


class ConvBlock(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return (x + self.norm(self.conv(x))).relu()


class Recurrent(nn.Module):
    """Two LSTMs of two layers each in a list, and a tied head."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    """An LSTM with a residual connection."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)

    def forward(self, x):
        return x + self.lstm(x)[0]


def images(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 3, 6, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(5, (7,), generator=generator)}


def tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(20, (7, 6), generator=generator)
    labels = x.roll(-1, 1).masked_fill(torch.rand(x.shape, generator=generator) < 0.4, -100)
    labels[:2] = -100  # The first rank has no label at all.
    return {"x": x, "labels": labels}


def text(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(64, (7, 8), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -100)
    labels[:2] = -100
    return {"input_ids": ids, "labels": labels}


def entropy(model, batch):
    logits, labels = model(batch["x"]), batch["labels"]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return ft.Mean(total, (labels != -100).sum())


MODELS = {
    "convolutions": (Convolutions, images, entropy),
    "lstm": (Recurrent, tokens, entropy),
    **{name: (build, text, None) for name, build in transformers_models.TINY.items()},
}


def built(name, dropout):
    with seeded(1):
        module = MODELS[name][0]().double()
    for part in module.modules():
        if isinstance(part, nn.Dropout) and not dropout:
            part.p = 0.0
        if isinstance(vars(part).get("dropout"), float) and not dropout:
            part.dropout = 0.0
    return module.train()


def by_hand(name):
    """Train with plain torch, on the mean over all labels of a batch."""
    module, (_, batch, criterion) = built(name, dropout=False), MODELS[name]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **ADAMW)
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = module(**batch(seed)).loss if criterion is None else criterion(module, batch(seed)).value
        loss.backward()
        optimizer.step()
    return dict(module.named_parameters())


def on_ranks(name, size, level, *, dropout):
    _, batch, criterion = MODELS[name]

    def rank(_):
        loss = ft.from_module(built(name, dropout), criterion)
        step = ft.compose(ft.train_step(loss, ft.optim.adamw(1e-2, **ADAMW)), ft.sharded(ft.parallel.mesh(), level))
        state = step.init(seed=2)
        for seed in range(STEPS):
            state, _ = step(state, batch(seed))
        return ft.parallel.whole(state).params

    return run(size, rank)


@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_equal_a_loop_of_plain_torch(name):
    expected = by_hand(name)
    # One of them at level 0 too, where nothing depends on the model.
    for level in (0, 3) if name == "gpt2" else (3,):
        for params in on_ranks(name, 4, level, dropout=False):
            assert_leaves_near(params, expected)


@pytest.mark.parametrize("name", ["gpt2", "bert", *exhaustive(["t5"])])
def test_dropout_on_four_ranks_is_that_of_one(name):
    (expected,) = on_ranks(name, 1, 0, dropout=True)
    for params in on_ranks(name, 4, 3, dropout=True):
        assert_leaves_near(params, expected)
