"""The models of `bench.models` in JAX; parameters have the names that they have in torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Params = Mapping[str, Any]


def sequential(params: Params, x: Any, *, dtype: Any, heads: int) -> Any:
    """Return the output of `bench.models.mlp` or, with one linear map and no tanh, of `bench.models.null`."""
    names = [name.removesuffix(".weight") for name in params if name.endswith(".weight")]
    for name in names:
        x = _linear(params, name, x, dtype)
        x = jnp.tanh(x) if len(names) > 1 else x
    return x


def gpt(params: Params, x: Any, *, dtype: Any, heads: int) -> Any:
    """Return the logits of `bench.models.GPT`, with matrix products in `dtype` where autocast computes in it."""
    h = params["tokens.weight"][x] + params["positions.weight"][: x.shape[1]]
    layers = 1 + max(int(name.split(".")[1]) for name in params if name.startswith("blocks."))
    for layer in range(layers):
        h = _block(params, f"blocks.{layer}", h, dtype, heads)
    head = params.get("head.weight", params["tokens.weight"])
    return _norm(params, "norm", h).astype(dtype) @ head.T.astype(dtype)


def loss(forward: Callable[..., Any], params: Params, batch: Params, **options: Any) -> Any:
    """Return the mean squared error of numbers or the mean cross-entropy of tokens, as `bench.problems.criterion`."""
    out = forward(params, batch["x"], **options).astype(jnp.float32)
    if jnp.issubdtype(batch["y"].dtype, jnp.floating):
        return jnp.mean((out - batch["y"]) ** 2)
    target_logits = jnp.take_along_axis(out, batch["y"][..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(out, -1) - target_logits)


def _block(params: Params, name: str, x: Any, dtype: Any, heads: int) -> Any:
    b, t, w = x.shape
    mixed = _linear(params, f"{name}.qkv", _norm(params, f"{name}.norm1", x), dtype)
    q, k, v = jnp.moveaxis(mixed.reshape(b, t, 3, heads, w // heads), 2, 0)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(w // heads))
    x = x + _linear(params, f"{name}.out", attended.reshape(b, t, w), dtype)
    inner = jax.nn.gelu(_linear(params, f"{name}.feed.up", _norm(params, f"{name}.norm2", x), dtype), approximate=False)
    return x + _linear(params, f"{name}.feed.down", inner, dtype)


def _linear(params: Params, name: str, x: Any, dtype: Any) -> Any:
    return x.astype(dtype) @ params[f"{name}.weight"].T.astype(dtype) + params[f"{name}.bias"].astype(dtype)


def _norm(params: Params, name: str, x: Any) -> Any:
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]
