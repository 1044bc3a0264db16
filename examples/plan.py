"""Plan the training of large language models without GPUs: what fits, with which layout, and how much ranks send.

    python examples/plan.py
    python examples/plan.py --models 7B 70B --gpus 8 64 --memory 80GB --sequences 4 --length 2048

Nothing is allocated: models are made on the device ``meta``, and their steps run on tensors without values.
"""

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ftrain as ft

GPUS_OF_A_NODE = 8


class Config(NamedTuple):
    """The sizes of a decoder like Llama 2 (Touvron et al. 2023, arXiv:2307.09288), with experts as in Mixtral."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int = 32_000
    experts: int = 1


CONFIGS = {
    "7B": Config(32, 4096, 32, 32, 11_008),
    "70B": Config(80, 8192, 64, 8, 28_672),
    "8x22B": Config(56, 6144, 48, 8, 16_384, 32_768, experts=8),
}


class Attention(nn.Module):
    """Causal grouped-query attention: keys and values may have fewer heads than queries. It has no positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k, self.v = (nn.Linear(config.width, config.key_heads * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention: (batch, length, width)."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )  # batch, heads, length, size
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """SwiGLU, or several experts, two for each token; every expert is assumed to get equally many tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        shape = config.experts, config.width, config.hidden
        self.gate, self.up = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.router = nn.Linear(config.width, config.experts, bias=False) if config.experts > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of the experts of each token: (batch, length, width)."""
        tokens = x.flatten(0, 1)
        if self.router is None:
            return self._experts(tokens[None])[0].view_as(x)
        weights, experts = self.router(tokens).softmax(-1).topk(2)
        # Sorted by expert, so that each expert computes one block; slot i belongs to token i // 2.
        order = experts.flatten().argsort()
        outputs = self._experts(tokens[order // 2].unflatten(0, (len(self.gate), -1))).flatten(0, 1)
        outputs = outputs * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // 2, outputs.to(tokens.dtype)).view_as(x)

    def _experts(self, x: Tensor) -> Tensor:
        return (F.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Layer(nn.Module):
    """Attention, then a feed-forward part; each gets the normalised input, and its output is added to the input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention, self.feed = Attention(config), Feed(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states: (batch, length, width)."""
        x = x + self.attention(self.norm(x))
        return x + self.feed(self.feed_norm(x))


class Decoder(nn.Module):
    """A language model without its head, which `loss_fn` applies."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm, self.head = nn.RMSNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of tokens: (batch, length, width)."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def loss_fn(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of all next tokens."""
    hidden, targets = model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
    return F.cross_entropy(model.head(hidden).flatten(0, 1).float(), targets.flatten())


def plan(name: str, gpus: int, memory: str, sequences: int, length: int) -> str:
    """Return a row of the table for one model and number of GPUs."""
    with torch.device("meta"):
        model = Decoder(CONFIGS[name])
        tokens = torch.empty(sequences, length + 1, dtype=torch.int64)
    step = ft.compose(
        ft.train_step(ft.from_module(model, loss_fn), ft.optim.adamw(3e-4)),
        ft.clip(1.0),
        ft.with_amp("bf16"),
        ft.donated(),
    )
    mesh = max(gpus // GPUS_OF_A_NODE, 1), min(gpus, GPUS_OF_A_NODE)
    try:
        planned = ft.trials(step, None, {"tokens": tokens}, memory=memory, mesh=mesh)
    except ft.errors.DeviceError as error:
        print(error)
        return f"| {name} | {gpus:,} | nothing fits |"
    print(planned, flush=True)
    best = planned.rows[0]
    rows = sequences // gpus // best.microbatches
    layout = f"{best.layout.replicate} x {best.layout.shard}"
    cells = [name, f"{gpus:,}", f"{best.layout.level}", layout, f"{best.microbatches} x {rows}", best.policy]
    cells += [f"{nbytes / 1e9:,.1f} GB" for nbytes in (best.predicted, best.sent, best.between)]
    return f"| {' | '.join(cells)} |"


def number_of_gpus(text: str) -> int:
    """Parse a number of GPUs. Raises an ArgumentTypeError unless they are at most one node, or whole nodes."""
    gpus = int(text)
    if gpus < 1 or (gpus > GPUS_OF_A_NODE and gpus % GPUS_OF_A_NODE):
        raise argparse.ArgumentTypeError(f"{text} GPUs are not whole nodes of {GPUS_OF_A_NODE}, nor part of one")
    return gpus


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="default: all")
    parser.add_argument("--gpus", nargs="+", type=number_of_gpus, default=[8, 64, 1024], help="default: %(default)s")
    parser.add_argument("--memory", default="80GB", help="of each GPU; default: %(default)s")
    parser.add_argument("--sequences", type=int, default=1, help="of the batch, for each GPU; default: %(default)s")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence; default: %(default)s")
    options = parser.parse_args()
    if options.sequences < 1 or options.length < 1:
        parser.error(f"--sequences {options.sequences} and --length {options.length} must be positive numbers")
    for name in options.models:
        for gpus in options.gpus:
            print(plan(name, gpus, options.memory, options.sequences * gpus, options.length), flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("ended by Ctrl-C") from None
