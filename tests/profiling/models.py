"""A small transformer and a small convolutional net, and the wrappers that they train with."""

import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain import optim

VOCABULARY, WIDTH, HEADS = 512, 64, 4
BATCH, LENGTH = 8, 64


class Block(nn.Module):
    def __init__(self, width, causal):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)
        self.causal = causal

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Transformer(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformer(causal):
    """Return the loss of a small Transformer, and a batch."""
    draw = torch.Generator().manual_seed(0)
    batch = {"x": torch.randint(VOCABULARY, (BATCH, LENGTH), generator=draw)}

    def token_loss(model, batch):
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())

    return ft.from_module(Transformer(causal), token_loss), batch


def convnet():
    """Return the loss of a small convolutional net, and a batch."""

    def stage(in_channels, out_channels):
        convolution = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU(), nn.MaxPool2d(2))

    model = nn.Sequential(stage(3, 16), stage(16, 32), nn.Flatten(), nn.Linear(32 * 8 * 8, 10))
    draw = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(32, 3, 32, 32, generator=draw), "y": torch.randint(10, (32,), generator=draw)}
    return ft.from_module(model, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])), batch


MODELS = {"gpt": lambda: transformer(causal=True), "bert": lambda: transformer(causal=False), "convnet": convnet}
"""Name -> function that returns a loss and a batch."""

WRAPPERS = {
    "plain": (),
    "donated": (ft.donated(),),
    "bf16": (ft.with_amp("bf16"),),
    "fp16": (ft.with_amp("fp16"),),
    "remat": (ft.remat(),),
    "dots": (ft.remat("dots"),),
    "attention": (ft.remat("attention"),),
    "budget": (ft.remat(budget=0.5),),
    "update in backward": (ft.update_in_backward(), ft.donated()),
    "by value": (ft.clip(value=0.01),),
    "clip within": (ft.clip(1.0), ft.accumulate(2)),
    "watched": (ft.with_amp("bf16", watch=True),),
    "accumulate": (ft.accumulate(4),),
    "clip": (ft.clip(1.0),),
    "ema": (ft.ema(),),
    "swa": (ft.swa(),),
    "skip": (ft.skip_nonfinite(),),
    "all": (ft.remat(), ft.with_amp("bf16"), ft.accumulate(2), ft.clip(1.0), ft.ema(), ft.donated()),
    "others": (ft.remat("dots"), ft.clip(value=0.01), ft.skip_nonfinite(), ft.swa()),
}


def build(model, wrappers, **options):
    """Return the step of a model of `MODELS` with wrappers of `WRAPPERS`, both by name, and a batch."""
    loss, batch = MODELS[model]()
    return ft.compose(ft.train_step(loss, optim.adamw(1e-3), **options), *WRAPPERS[wrappers]), batch
