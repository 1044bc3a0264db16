"""Run attention and recurrent nets with dropout without their fused kernels, which cannot draw from a key."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ftrain import tree
from ftrain.backends.generators import without_fused_draws

ATTENTION: dict[Callable[..., Any], tuple[str, ...]] = {
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    F.multi_head_attention_forward: tuple(inspect.signature(F.multi_head_attention_forward).parameters),
}
"""Function of attention -> names of its parameters, in order."""

_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_PADDED = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train")
_PACKED = ("data", "batch_sizes", *_PADDED[1:])


class Unfused(TorchFunctionMode):
    """Context in which attention and recurrent nets run without fused kernels if they draw random numbers.

    On the host they run unchanged, because no fused kernel draws there.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, without fused kernels if these would draw."""
        kwargs = kwargs or {}
        if func not in ATTENTION and func not in _RECURRENT:
            return func(*args, **kwargs)
        arguments = dict(zip(_names(func, args), args, strict=False)) | kwargs
        on_host = all(value.device == tree.HOST for value in arguments.values() if isinstance(value, Tensor))
        if func in ATTENTION:
            arguments.setdefault("dropout_p", 0.0)
        if on_host or is_inert(arguments):
            return func(*args, **kwargs)
        with without_fused_draws():
            return func(*args, **kwargs)


def is_inert(arguments: dict[str, Any]) -> bool:
    """Return whether an operation that can be random (fused attention, a recurrent net) draws nothing in this call."""
    rate = arguments.get("dropout_p", arguments.get("dropout"))
    return rate == 0 or arguments.get("train") is False or arguments.get("training") is False


def _names(func: Any, args: tuple[Any, ...]) -> tuple[str, ...]:
    if func in ATTENTION:
        return ATTENTION[func]
    # The overload for packed sequences has their batch sizes before the states.
    return _PACKED if len(args) > 3 and not isinstance(args[3], bool) else _PADDED
