"""Classify operations, and count their floating-point operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ftrain import tree

CONTRACTION, NORMALISATION, ELEMENTWISE, MOVEMENT = GROUPS = (
    "tensor contractions",
    "statistical normalisations",
    "element-wise",
    "data movement",
)
"""The classes of Ivanov et al. 2021 (arXiv:2007.00072), and data movement, which computes nothing."""

NORMS = ("softmax", "_norm", "norm_backward", "nll_loss", "logsumexp", "cross_entropy")
"""Parts of the names of operations that read their input several times to compute a statistic."""

REDUCTIONS = (
    *("sum", "nansum", "mean", "nanmean", "var", "var_mean", "std", "std_mean", "norm", "max", "min", "amax", "amin"),
    *("aminmax", "argmax", "argmin", "prod", "cumsum", "cumprod", "logcumsumexp", "all", "any"),
)
MOVES = (
    *("_to_copy", "to", "copy_", "_foreach_copy_", "clone", "cat", "stack", "contiguous", "constant_pad_nd", "fill_"),
    "split_with_sizes_copy",
    *("index", "index_select", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"),
    *("index_add", "index_add_", "index_copy", "index_copy_", "gather", "scatter", "scatter_", "scatter_add"),
    *("scatter_add_", "take", "embedding", "embedding_dense_backward", "slice_backward", "select_backward"),
    *("slice_scatter", "select_scatter", "zero_", "zeros", "ones", "full", "empty", "zeros_like", "ones_like"),
    *("empty_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty", "arange", "_foreach_zero_"),
    *("empty_strided", "new_empty_strided", "empty_permuted", "scalar_tensor", "repeat", "repeat_interleave"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *("all_reduce", "all_reduce_", "broadcast", "broadcast_"),
    *("expand_copy", "masked_fill", "masked_fill_", "tril", "triu", "roll", "flip", "sort", "argsort", "topk"),
)
PASSES = 5
"""Operations of a normalisation for each element: statistic, difference, power, division, scale."""

CONTRACTIONS = {
    *("mm", "addmm", "bmm", "addbmm", "baddbmm", "hspmm", "sspaddmm", "matmul", "mv", "addmv", "dot", "vdot", "vecdot"),
    *("einsum", "tensordot", "linear", "bilinear", "trilinear", "convolution", "conv1d", "conv2d", "conv3d"),
    *("attention", "rnn"),
}
"""Words in the names of contractions."""

_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_CPU_RECURRENT_LAYER = {"mkldnn_rnn_layer": 1, "mkldnn_rnn_layer_backward": 2}
"""Operations of a layer of `nn.LSTM` -> how many times the matrix products of the forward pass each one computes."""


def group_of(name: str) -> str:
    """Return the group of an operation, by its name without overload: ``"addmm"``.

    >>> [group_of(name) for name in ("addmm", "_log_softmax", "lgamma", "_to_copy")]
    ['tensor contractions', 'statistical normalisations', 'element-wise', 'data movement']
    """
    if not CONTRACTIONS.isdisjoint(name.split("_")):
        return CONTRACTION
    if any(mark in name for mark in NORMS) and not name.startswith("_foreach_norm"):
        return NORMALISATION
    if name in MOVES:
        return MOVEMENT
    return NORMALISATION if name in REDUCTIONS or name.startswith("_foreach_norm") else ELEMENTWISE


def flops(operation: Any, name: str, args: Any, kwargs: Any, returned: Any) -> int:
    """Return the number of floating-point operations of a call: exact for contractions, else estimated.

    An element-wise operation has one for each element that it returns, a reduction one and a normalisation `PASSES` for
    each element that it reads, and a contraction that torch cannot count (matrix with vector) two for each element of
    its largest input.
    """
    group = group_of(name)
    if group == CONTRACTION:
        return _contraction(operation, name, args, kwargs, returned)
    if group == MOVEMENT:
        return 0
    if group == ELEMENTWISE:
        # In-place operations on lists return nothing.
        return _elements(returned) or max((_elements(arg) for arg in args), default=0)
    read = max((_elements(arg) for arg in args), default=0)
    return read * (PASSES if any(mark in name for mark in NORMS) else 1)


def _contraction(operation: Any, name: str, args: Any, kwargs: Any, returned: Any) -> int:
    """Return the number of floating-point operations of a contraction."""
    if name == _CPU_ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))  # type: ignore[no-untyped-call]
    if name == f"{_CPU_ATTENTION}_backward":
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]
    if name == "_grouped_mm":
        a, b = args[:2]
        return int(2 * a.numel() * b.shape[-1] if a.ndim == 2 or b.ndim == 3 else 2 * b.numel() * a.shape[-2])
    if name == "convolution_backward":
        gradient, inputs, weight, *_, is_transposed, _, _, wanted = args
        # Torch's count takes the gradient of a weight with groups for that of one without them.
        source = inputs if is_transposed else gradient
        positions = source.numel() // source.shape[1]
        return int(2 * positions * weight.numel() * sum(wanted[:2]))
    if name in _CPU_RECURRENT_LAYER:
        inputs, input_weight, hidden_weight = args[:3]
        positions = inputs.numel() // inputs.shape[-1]
        return int(2 * positions * (input_weight.numel() + hidden_weight.numel())) * _CPU_RECURRENT_LAYER[name]
    count: Callable[..., int] | None = flop_registry.get(operation.overloadpacket)
    if count is None:
        return 2 * max((_elements(arg) for arg in args), default=0)
    return int(count(*args, **kwargs, out_val=returned))


def _elements(values: Any) -> int:
    return sum(leaf.numel() for leaf in tree.leaves(values) if isinstance(leaf, Tensor))


def is_view(operation: Any) -> bool:
    """Whether an operation returns a view."""
    return bool(operation.is_view) or torch.Tag.inplace_view in operation.tags
