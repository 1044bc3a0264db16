"""The problems: a model, a batch and a loss, each in its full size and in a tiny one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import models

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch and the arguments of the model.

    `length` (tokens in a sequence) and `vocabulary` are zero for models whose input is not tokens.
    """

    batch: int
    length: int = 0
    vocabulary: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """A model family in two sizes: the full one, which is measured, and a tiny one for tests.

    `text` describes it, `build` makes the model, `jax` names the function of `bench.peers.jax_models` with the same
    model, and `rate` is the learning rate. Deep models need a small rate: with a larger one, rounding errors grow
    within three steps until equal computations seem to differ.
    """

    text: str
    build: Callable[..., nn.Module]
    full: Sizes
    tiny: Sizes
    jax: str | None = None
    rate: float = 1e-3

    def sizes(self, *, tiny: bool) -> Sizes:
        """Return the tiny or the full sizes."""
        return self.tiny if tiny else self.full

    def model(self, sizes: Sizes) -> nn.Module:
        """Build the model."""
        if sizes.vocabulary:
            return self.build(sizes.vocabulary, length=sizes.length, **sizes.model)
        return self.build(**sizes.model)

    def batch(self, *, tiny: bool) -> Batch:
        """Draw a batch of inputs ``x`` and targets ``y``: next tokens, classes of sequences, or numbers to regress."""
        s = self.sizes(tiny=tiny)
        if s.vocabulary:
            labels = (s.batch,) if self.build is models.BERT else (s.batch, s.length)
            classes = 2 if self.build is models.BERT else s.vocabulary
            return {"x": torch.randint(s.vocabulary, (s.batch, s.length)), "y": torch.randint(classes, labels)}
        width = s.model.get("width", 1)
        return {"x": torch.randn(s.batch, width), "y": torch.randn(s.batch, width)}


def criterion(model: Callable[[Tensor], Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean squared error of numbers, or the mean cross-entropy of tokens or classes."""
    out = model(batch["x"])
    if batch["y"].is_floating_point():
        return F.mse_loss(out.float(), batch["y"])
    return F.cross_entropy(out.flatten(0, -2).float(), batch["y"].flatten())


def flops(model: nn.Module, sizes: Sizes) -> float:
    """Return the floating-point operations of a training step: six per token and weight of a matrix, and attention.

    Source: Kaplan et al. 2020, arXiv:2001.08361, table 1. Of the products of causal attention, half are counted.
    """
    tokens = sizes.batch * max(sizes.length, 1)
    # An embedding multiplies nothing, so only weights of linear maps count; a tied head is such a map.
    matrices = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)}
    layers, width = sizes.model.get("layers", 0), sizes.model.get("width", 0)
    counted = 1.0 if isinstance(model, models.BERT) else 0.5
    attention = 12 * layers * width * sizes.length * counted if sizes.length else 0.0
    return tokens * (6.0 * sum(matrices.values()) + attention)


SMALL = Sizes(2, 8, 32, {"width": 16, "layers": 2, "heads": 2})
TINY = Sizes(4, 8, 32, {"width": 16, "layers": 2, "heads": 2})
GPT2 = {"width": 768, "layers": 12, "heads": 12, "tied": True}
SMALL_TIED = Sizes(2, 8, 32, {"width": 16, "layers": 2, "heads": 2, "tied": True})
LLAMA = {"width": 2048, "layers": 16, "heads": 32, "groups": 8, "inner": 8192}
SMALL_LLAMA = Sizes(1, 8, 32, {"width": 16, "layers": 2, "heads": 4, "groups": 2, "inner": 32})

PROBLEMS: dict[str, Problem] = {
    "null": Problem("one 1x1 linear", models.null, Sizes(1), Sizes(1), jax="sequential"),
    "mlp": Problem(
        "MLP 4x128, batch 64",
        models.mlp,
        Sizes(64, model={"width": 128, "layers": 4}),
        Sizes(4, model={"width": 8, "layers": 2}),
        jax="sequential",
    ),
    "gpt128": Problem(
        "GPT 4x128, 8 x 128 tokens, vocabulary 256",
        models.GPT,
        Sizes(8, 128, 256, {"width": 128, "layers": 4, "heads": 4}),
        SMALL,
        jax="gpt",
    ),
    "gpt384": Problem(
        "GPT 6x384, 4 x 256 tokens, vocabulary 8,192",
        models.GPT,
        Sizes(4, 256, 8192, {"width": 384, "layers": 6, "heads": 6}),
        SMALL,
        jax="gpt",
    ),
    # Most of the memory of `deep` is activations, most of that of `wide` is parameters.
    "deep": Problem(
        "GPT 12x128, 4 x 128 tokens, vocabulary 256",
        models.GPT,
        Sizes(4, 128, 256, {"width": 128, "layers": 12, "heads": 4}),
        TINY,
    ),
    "wide": Problem(
        "GPT 12x256, 1 x 64 tokens, vocabulary 256",
        models.GPT,
        Sizes(1, 64, 256, {"width": 256, "layers": 12, "heads": 4}),
        TINY,
    ),
    **{
        f"gpt2 b{batch}": Problem(
            f"GPT-2 124M, {batch} x 1024 tokens", models.GPT, Sizes(batch, 1024, 50257, GPT2), SMALL_TIED, rate=1e-5
        )
        for batch in (1, 4, 64)
    },
    "head": Problem(
        "loss head, width 256, vocabulary 50,257, 2,048 tokens",
        models.Head,
        Sizes(1, 2048, 50257, {"width": 256}),
        Sizes(1, 8, 32, {"width": 16}),
    ),
    "bert": Problem(
        "bert-large, 4 x 512 tokens",
        models.BERT,
        Sizes(4, 512, 30522, {"width": 1024, "layers": 24, "heads": 16}),
        Sizes(4, 8, 32, {"width": 16, "layers": 2, "heads": 2}),
        rate=1e-5,
    ),
    "llama": Problem(
        "Llama-like 1.2B, 1 x 4096 tokens", models.Llama, Sizes(1, 4096, 128256, LLAMA), SMALL_LLAMA, rate=1e-5
    ),
    **{
        f"leaves {count}": Problem(
            f"{count:,} parameters of two numbers",
            models.Leaves,
            Sizes(1, model={"count": count}),
            Sizes(1, model={"count": max(2, count // 100)}),
        )
        for count in (10, 100, 1_000, 10_000)
    },
    # Two million parameters. The number of tokens on each rank is always the same.
    **{
        f"ranks {count}": Problem(
            f"GPT 4x192, 8 x 64 tokens a rank, vocabulary 512, {count} ranks",
            models.GPT,
            Sizes(8 * count, 64, 512, {"width": 192, "layers": 4, "heads": 6}),
            Sizes(2 * count, 8, 32, {"width": 16, "layers": 2, "heads": 2}),
        )
        for count in (1, 2, 4)
    },
    # Models for the updates, which use only their parameters; the batches are never drawn.
    **{
        f"update {name}": Problem(
            f"{layers} layers of {width}",
            models.mlp,
            Sizes(1, model={"width": width, "layers": layers}),
            Sizes(1, model={"width": 4, "layers": max(2, layers // 100)}),
        )
        for name, layers, width in (("10", 5, 447), ("10 of whole blocks", 5, 448), ("1000", 500, 45))
    },
    **{
        f"update {count}": Problem(
            text,
            models.GPT,
            Sizes(
                1,
                model={
                    "vocabulary": vocabulary,
                    "width": width,
                    "layers": 12,
                    "heads": 1,
                    "length": length,
                    "tied": True,
                },
            ),
            Sizes(1, model={"vocabulary": 8, "width": 4, "layers": 1, "heads": 1, "length": 4, "tied": True}),
        )
        for count, text, vocabulary, width, length in (
            ("148", "GPT 12x64, vocabulary 6,144", 6_144, 64, 256),
            ("25M", "GPT 12x384, vocabulary 8,192", 8_192, 384, 1_024),
        )
    },
}
