"""The model of the tests of `remat`, which has all that a recomputation can get wrong, and policies for its blocks."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft

WIDTH, LENGTH, BATCH, BYTES = 8, 6, 4, 4
aten = torch.ops.aten


class Block(nn.Module):
    """A block with all that a recomputation can get wrong: random draws, statistics, products that are written over."""

    def __init__(self, p):
        super().__init__()
        self.p, self.norm = p, nn.BatchNorm1d(WIDTH)
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x.flatten(0, 1)).view_as(x)).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        hidden = self.up(mixed.transpose(1, 2).flatten(2))
        hidden += 1.0
        hidden = F.dropout(hidden.mul(2.0), self.p, inplace=True)
        noise = torch.rand_like(hidden) * self.p
        out = self.down(torch.tanh(hidden + noise))
        out.view(-1).mul_(0.5)
        return x + F.dropout(out, self.p)


class Stages(nn.Module):
    def __init__(self, p, stages=2, blocks=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.stages = nn.ModuleList(nn.Sequential(*(Block(p) for _ in range(blocks))) for _ in range(stages))
        # Autocast casts a tied weight once for both blocks, but a recomputation of one block casts it again.
        self.stages[1][0].down.weight = self.stages[0][0].down.weight

    def forward(self, x):
        x = self.embed(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def criterion(model, batch):
    return ft.losses.cross_entropy(model(batch["x"]), batch["y"])


def make_batch(index=0, batch=BATCH):
    draw = torch.Generator().manual_seed(index)
    return {name: torch.randint(11, (batch, LENGTH), generator=draw) for name in ("x", "y")}


def build(*wrappers, p=0.3, dtype=torch.float64, **sizes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Stages(p, **sizes).to(dtype)
    return ft.compose(ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)), *wrappers)


def anatomy(*wrappers, batch=BATCH, **sizes):
    step = build(*wrappers, p=0.0, dtype=torch.float32, **sizes)
    return ft.anatomy(step, None, make_batch(batch=batch), measure=False)


def everything(op, *args, **kwargs):
    return True


def nothing(op, *args, **kwargs):
    return False


def products(op, *args, **kwargs):
    return op in (aten.mm.default, aten.addmm.default)


def every_third():
    """Return a policy that keeps every third operation: the kind of an operation does not tell whether it is kept."""
    count = itertools.count()
    return lambda op, *args, **kwargs: next(count) % 3 == 0


def by_name(name, module):
    return {"stages.0.0": "dots", "stages.0.1": "none", "stages.1": everything}.get(name)


NESTED = ["stages.0", "stages.0.0", "stages.0.1", "stages.1", "stages.1.1"]
MODES = {
    **{policy: lambda policy=policy: ft.remat(policy) for policy in ("full", "dots", "attention", "none")},
    **{policy.__name__: lambda policy=policy: ft.remat(policy=policy) for policy in (everything, nothing, products)},
    "every third": lambda: ft.remat(every_third(), blocks=[Block]),
    "mapping": lambda: ft.remat(blocks={Block: "dots", "stages.0.1": "full", "stages.1.0": "attention"}),
    "function": lambda: ft.remat(blocks=by_name),
    "nested": lambda: ft.remat(blocks=NESTED),
    "nested-dots": lambda: ft.remat("dots", blocks=NESTED),
    "nested-few": lambda: ft.remat("dots", blocks=["stages.0", "stages.0.0", "stages.1"]),
    "nested-mixed": lambda: ft.remat(blocks={nn.Sequential: "full", Block: "dots", nn.Linear: "full"}),
    "budget": lambda: ft.remat(budget=0.6, blocks=[Block]),
    "budget-stages": lambda: ft.remat(budget=0.3),
    "nested-kept": lambda: ft.remat(blocks={nn.Sequential: everything, Block: "full", nn.Linear: "none"}),
}
