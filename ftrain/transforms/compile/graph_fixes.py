"""Replace operations of a captured graph whose kernels differ from what the fake tensors of the capture promised.

Fake tensors promise a memory layout that a kernel, or what a compiler makes of an operation, need not keep: then a view
of the result fails where a reshape works. And a kernel may depend on more than its arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ftrain import _torch, tree

_aten = torch.ops.aten
VIEWS = _aten.view.default, _aten._unsafe_view.default
CONTIGUOUS = {
    _aten.native_batch_norm,
    _aten._native_batch_norm_legit,
    _aten._native_batch_norm_legit_functional,
    _aten._native_batch_norm_legit_no_training,
    _aten.native_batch_norm_backward,
    _aten._log_softmax_backward_data,
    _aten._softmax_backward_data,
}
"""Kernels of the CPU that return contiguous memory where other strides are promised. A view that one missing here makes
impossible is an error, for which ``compiled()`` splits the step."""
NEAREST = _aten.upsample_nearest2d_backward.default
BY_LAYOUT = _aten._linalg_det.default, _aten._linalg_slogdet.default
"""They factorize the transpose of a contiguous matrix, and the gradient was captured for one or for the other."""


@torch.library.custom_op("ftrain::rnn_layer_backward", mutates_args=())
def _rnn_layer_backward(
    x: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor,
    hidden_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    output: Tensor,
    new_hidden: Tensor,
    new_cell: Tensor,
    grad_output: Tensor | None,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
    workspace: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # The kernel takes contiguous memory for granted.
    tensors = x, input_weight, hidden_weight, input_bias, hidden_bias, hidden, cell, output, new_hidden, new_cell
    grads = (each if each is None else each.contiguous() for each in (grad_output, grad_hidden, grad_cell))
    options = reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional, batch_sizes, batch_first
    *gradients, input_bias, hidden_bias, grad_hx, grad_cx = _aten.mkldnn_rnn_layer_backward.default(
        *(each.contiguous() for each in tensors), *grads, *options, workspace
    )
    return *gradients, input_bias, hidden_bias.clone(), grad_hx, grad_cx


@_rnn_layer_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    *gradients, input_bias, hidden_bias, grad_hx, grad_cx = _aten.mkldnn_rnn_layer_backward.default(*args)
    return *gradients, input_bias, hidden_bias.clone(), grad_hx, grad_cx


@torch.library.custom_op("ftrain::reshaped", mutates_args=())
def _reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(shape)


@_reshaped.register_fake
def _(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.new_empty(shape)


@torch.library.custom_op("ftrain::laid", mutates_args=())
def _laid(matrices: Tensor, contiguous: bool) -> Tensor:
    if contiguous:
        return matrices.clone(memory_format=torch.contiguous_format)
    return matrices.mT.clone(memory_format=torch.contiguous_format).mT


@_laid.register_fake
def _(matrices: Tensor, contiguous: bool) -> Tensor:
    return matrices.new_empty(matrices.shape) if contiguous else matrices.new_empty(matrices.mT.shape).mT


@torch.library.custom_op("ftrain::upsample_nearest2d_backward", mutates_args=())
def _upsample_nearest2d_backward(
    grad_output: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Tensor:
    # Inductor's own takes the ratio of the sizes for the scales, which differ where the output was rounded down.
    return _aten.upsample_nearest2d_backward.default(  # type: ignore[no-any-return]
        grad_output.contiguous(), output_size, input_size, scales_h, scales_w
    )


@_upsample_nearest2d_backward.register_fake
def _(grad_output: Tensor, output_size: Sequence[int], input_size: Sequence[int], *_: float | None) -> Tensor:
    return grad_output.new_empty(input_size)


def _padded_backward(name: str) -> Any:
    """Return an operation that is the gradient of replicate padding, in the memory layout that it promises."""
    kernel = getattr(_aten, name).default

    @torch.library.custom_op(f"ftrain::{name}", mutates_args=())
    def backward(grad_output: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
        # Of an input that is channels-last the kernel returns another layout than the capture was promised.
        return kernel(grad_output, x, padding).contiguous()  # type: ignore[no-any-return]

    @backward.register_fake
    def _(grad_output: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
        return x.new_empty(x.shape)

    return getattr(torch.ops.ftrain, name).default


PADDED = {
    getattr(_aten, name).default: _padded_backward(name)
    for name in ("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
}


@torch.library.custom_op("ftrain::rnn_layer", mutates_args=())
def _rnn_layer(
    x: Tensor,
    input_weight: Tensor,
    hidden_weight: Tensor,
    input_bias: Tensor,
    hidden_bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = input_weight, hidden_weight, input_bias, hidden_bias
    options = reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train
    # The kernel keeps what its backward pass needs only where gradients are on, and else returns no tensor for it.
    with torch.enable_grad():
        return _aten.mkldnn_rnn_layer.default(x, *weights, hidden, cell, *options)  # type: ignore[no-any-return]


@_rnn_layer.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _aten.mkldnn_rnn_layer.default(*args)  # type: ignore[no-any-return]


def fix_graph(captured: fx.GraphModule) -> fx.GraphModule:
    """Change a captured graph, in place, so that it computes on kernels what was captured; return it."""
    nodes = list(captured.graph.nodes)
    written = set(_written(nodes))
    replacements = {
        **PADDED,
        _aten.mkldnn_rnn_layer.default: torch.ops.ftrain.rnn_layer.default,
        _aten.mkldnn_rnn_layer_backward.default: torch.ops.ftrain.rnn_layer_backward.default,
    }
    for node in nodes:
        if node.target in VIEWS and written.isdisjoint(_storages(node)):
            node.target = _aten.reshape.default
        elif node.target is NEAREST and _is_rounded(*node.args[1:]):
            node.target = torch.ops.ftrain.upsample_nearest2d_backward.default
        else:
            node.target = replacements.get(node.target, node.target)
        if node.target in BY_LAYOUT:
            _lay_as_captured(node)
    captured.recompile()
    return captured


def _is_rounded(output_size: Any, input_size: Any, *scales: Any) -> bool:
    """Whether scales that an image was resized with differ from the ratio of its sizes."""
    sizes = zip(output_size, input_size[2:], scales, strict=False)
    return any(scale is not None and after != before * scale for after, before, scale in sizes)


def _lay_as_captured(node: fx.Node) -> None:
    """Let the matrices that a node takes lie in memory as they did in the capture, whatever a compiler chooses."""
    arguments: Any = node.args
    matrices, *rest = arguments
    value: Tensor = matrices.meta["val"]
    with node.graph.inserting_before(node):
        laid = node.graph.call_function(torch.ops.ftrain.laid.default, (matrices, value.is_contiguous()))
    laid.meta["val"] = torch.ops.ftrain.laid.default(value, value.is_contiguous())
    node.args = laid, *rest


def materialize_reshapes(captured: fx.GraphModule) -> fx.GraphModule:
    """Let reshapes be decided when they run, in place, where a compiler would decide by promises; return the graph.

    Some kernels return contiguous memory (batch norm, the gradient of log-softmax) where other strides are promised.
    """
    for node in captured.graph.nodes:
        if node.target is _aten.reshape.default and _is_promised(_base(node)):
            node.target = torch.ops.ftrain.reshaped.default
            node.args = node.args[0], list(node.meta["val"].shape)
    captured.recompile()
    return captured


def _base(node: fx.Node) -> fx.Node:
    """What computes that of which a node is a view."""
    while isinstance(node.target, _torch.OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _is_promised(node: fx.Node) -> bool:
    """Whether a tensor has the strides of an input by promise, of a kernel that returns contiguous memory."""
    value = node.meta.get("val")
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    packet = getattr(source.target, "overloadpacket", None)
    return packet in CONTIGUOUS and isinstance(value, Tensor) and not value.is_contiguous()


def _written(nodes: Iterable[fx.Node]) -> Iterator[int]:
    """The storages that something in a graph writes to: a reshape that copies would not see that, or lose it."""
    for node in nodes:
        if isinstance(node.target, _torch.OpOverload) and _torch.schema_of(node.target).is_mutable:
            for used in node.all_input_nodes:
                yield from _storages(used)


def _storages(node: fx.Node) -> list[int]:
    values = [leaf for leaf in tree.leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return [_torch.storage_id(value) for value in values]
