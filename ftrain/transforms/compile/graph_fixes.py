"""Replace operations of a captured graph whose kernels differ from what the fake tensors of the capture promised.

Fake tensors promise a memory layout that a kernel, or what a compiler makes of an operation, need not keep: then a view
of the result fails where a reshape works. And a kernel may depend on more than its arguments.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
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
BY_LAYOUT = _aten._linalg_det.default, _aten._linalg_slogdet.default
"""They factorize the transpose of a contiguous matrix, and the gradient was captured for one or for the other."""


def _register(name: str, schema: str, function: Callable[..., Any]) -> _torch.OpOverload:
    """Return a new operation that runs a function, with tensors without values too."""
    torch.library.custom_op(f"ftrain::{name}", function, mutates_args=(), schema=schema).register_fake(function)
    return getattr(torch.ops.ftrain, name).default  # type: ignore[no-any-return]


def _register_in_place_of(name: str, function: Callable[..., Any]) -> tuple[_torch.OpOverload, _torch.OpOverload]:
    """Return an operation of ATen, and a new one with its arguments that runs ``function(operation, *args)``."""
    operation = getattr(_aten, name).default
    schema = str(_torch.schema_of(operation)).removeprefix(f"aten::{name}")
    return operation, _register(name, schema, functools.partial(function, operation))


def _rnn_layer(kernel: Any, *args: Any) -> Any:
    # The kernel keeps what its backward pass needs only where gradients are on, and else returns no tensor for it.
    with torch.enable_grad():
        return kernel(*args)


def _rnn_layer_backward(kernel: Any, *args: Any) -> Any:
    # The kernel takes contiguous memory for granted.
    contiguous = (each.contiguous() if isinstance(each, Tensor) else each for each in args)
    *gradients, hidden_bias, grad_hx, grad_cx = kernel(*contiguous)
    # It returns one tensor for both biases, and an operation must not return a tensor twice.
    return *gradients, hidden_bias.clone(), grad_hx, grad_cx


def _nearest_backward(kernel: Any, grad_output: Tensor, *sizes: Any) -> Any:
    return kernel(grad_output.contiguous(), *sizes)


def _padding_backward(kernel: Any, *args: Any) -> Any:
    # Of an input that is channels-last the kernel returns another layout than the capture was promised.
    return kernel(*args).contiguous()


def _reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(shape)


def _lay(matrices: Tensor, contiguous: bool) -> Tensor:
    if contiguous:
        return matrices.clone(memory_format=torch.contiguous_format)
    return matrices.mT.clone(memory_format=torch.contiguous_format).mT


REPLACEMENTS = dict(
    [
        _register_in_place_of("mkldnn_rnn_layer", _rnn_layer),
        _register_in_place_of("mkldnn_rnn_layer_backward", _rnn_layer_backward),
        _register_in_place_of("replication_pad1d_backward", _padding_backward),
        _register_in_place_of("replication_pad2d_backward", _padding_backward),
        _register_in_place_of("replication_pad3d_backward", _padding_backward),
    ]
)
NEAREST, NEAREST_BY_SCALES = _register_in_place_of("upsample_nearest2d_backward", _nearest_backward)
"""Inductor's own takes the ratio of the sizes for the scales, which differ where the output was rounded down."""
RESHAPED = _register("reshaped", "(Tensor x, SymInt[] shape) -> Tensor", _reshape)
LAID = _register("laid", "(Tensor matrices, bool contiguous) -> Tensor", _lay)


def fix_graph(captured: fx.GraphModule) -> fx.GraphModule:
    """Change a captured graph, in place, so that it computes on kernels what was captured; return it."""
    nodes = list(captured.graph.nodes)
    written = set(_written(nodes))
    for node in nodes:
        if node.target in VIEWS and written.isdisjoint(_storages(node)):
            node.target = _aten.reshape.default
        elif node.target is NEAREST and _is_rounded(*node.args[1:]):
            node.target = NEAREST_BY_SCALES
        else:
            node.target = REPLACEMENTS.get(node.target, node.target)
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
        laid = node.graph.call_function(LAID, (matrices, value.is_contiguous()))
    laid.meta["val"] = LAID(value, value.is_contiguous())
    node.args = laid, *rest


def materialize_reshapes(captured: fx.GraphModule) -> fx.GraphModule:
    """Let reshapes be decided when they run, in place, where a compiler would decide by promises; return the graph.

    Some kernels return contiguous memory (batch norm, the gradient of log-softmax) where other strides are promised.
    """
    for node in captured.graph.nodes:
        if node.target is _aten.reshape.default and _is_promised(_base(node)):
            node.target = RESHAPED
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
