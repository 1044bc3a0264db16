"""Replace operations of a captured graph whose kernels behave differently from their fake tensors.

A kernel, or the code of a compiler, may return another memory layout than the fake tensor had in the capture. A view of
the result then fails where a reshape works. Some kernels also depend on more than their arguments.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ftrain import _torch
from ftrain._torch import operations
from ftrain._torch.fake import grouped_product_like
from ftrain.transforms.compile.lowered import storages

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
"""Kernels of the CPU that return contiguous memory where the fake tensor has other strides. If one is missing here, a
view of its result fails, and ``compiled()`` splits the step."""

BY_LAYOUT = _aten._linalg_det.default, _aten._linalg_slogdet.default
"""They factorize the transpose of a contiguous matrix, and the captured gradient is only right for one of the two."""

READ, ARE_ALL_TRUE, ASSERT = _aten._local_scalar_dense.default, _aten._is_all_true.default, _aten._assert_async.msg
FAILED_CHECK = "compiled: a check of values within the loss failed; the step without compiled() raises its own error"


def _register(name: str, schema: str, function: Callable[..., Any]) -> _torch.OpOverload:
    """Register an operation that runs a function, on fake tensors too, and return it."""
    torch.library.custom_op(f"ftrain::{name}", function, mutates_args=(), schema=schema).register_fake(function)
    return getattr(torch.ops.ftrain, name).default  # type: ignore[no-any-return]


def _register_in_place_of(name: str, function: Callable[..., Any]) -> tuple[_torch.OpOverload, _torch.OpOverload]:
    """Return an ATen operation, and a new one of the same arguments that runs ``function(operation, *args)``."""
    operation = getattr(_aten, name).default
    schema = str(operations.schema_of(operation)).removeprefix(f"aten::{name}")
    return operation, _register(name, schema, functools.partial(function, operation))


def _rnn_layer(kernel: Any, *args: Any) -> Any:
    # The kernel returns what its backward pass needs only while gradients are enabled.
    with torch.enable_grad():
        return kernel(*args)


def _rnn_layer_backward(kernel: Any, *args: Any) -> Any:
    # The kernel relies on contiguous memory.
    contiguous = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args]
    *gradients, hidden_bias, grad_hx, grad_cx = kernel(*contiguous)
    # It returns one tensor for both biases, but an operation must not return a tensor twice.
    return *gradients, hidden_bias.clone(), grad_hx, grad_cx


def _nearest_backward(kernel: Any, grad_output: Tensor, *sizes: Any) -> Any:
    return kernel(grad_output.contiguous(), *sizes)


def _padding_backward(kernel: Any, *args: Any) -> Any:
    # For a channels-last input the kernel returns another layout than the fake tensor has.
    return kernel(*args).contiguous()


def _grouped_product(kernel: Any, *args: Any) -> Any:
    # The kernel pads the rows of its result in memory, and torch has a fake tensor for bfloat16 alone.
    return grouped_product_like(*args) if _torch.is_fake(args[0]) else kernel(*args).contiguous()


def _with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _with_layout(matrices: Tensor, contiguous: bool) -> Tensor:
    if contiguous:
        return matrices.clone(memory_format=torch.contiguous_format)
    return matrices.mT.clone(memory_format=torch.contiguous_format).mT


REPLACEMENTS = dict(
    [
        _register_in_place_of("mkldnn_rnn_layer", _rnn_layer),
        _register_in_place_of("mkldnn_rnn_layer_backward", _rnn_layer_backward),
        *(_register_in_place_of(f"replication_pad{axes}d_backward", _padding_backward) for axes in (1, 2, 3)),
    ]
)
NEAREST, NEAREST_BY_SCALES = _register_in_place_of("upsample_nearest2d_backward", _nearest_backward)
"""Inductor's own lowering uses the ratio of the sizes as the scale, which differs if the output size was rounded."""
GROUPED, GROUPED_IN_ANY_DTYPE = _register_in_place_of("_grouped_mm", _grouped_product)
WITH_STRIDES = _register("with_strides", "(Tensor x, SymInt[] strides) -> Tensor", _with_strides)
WITH_LAYOUT = _register("with_layout", "(Tensor matrices, bool contiguous) -> Tensor", _with_layout)


def fix_graph(captured: fx.GraphModule) -> fx.GraphModule:
    """Change a captured graph in place so that its kernels compute what was captured; return it."""
    nodes = list(captured.graph.nodes)
    # A reshape that copies would lose a write to its result, or not see one to its input.
    written = {
        key
        for node in nodes
        if isinstance(node.target, _torch.OpOverload) and operations.schema_of(node.target).is_mutable
        for used in node.all_input_nodes
        for key, _ in storages(used)
    }
    for node in nodes:
        if node.target in VIEWS and written.isdisjoint(key for key, _ in storages(node)):
            node.target = _aten.reshape.default
        elif node.target is NEAREST and _is_rounded(*node.args[1:]):
            node.target = NEAREST_BY_SCALES
        elif node.target is GROUPED and node.meta["val"].dtype != torch.bfloat16:
            node.target = GROUPED_IN_ANY_DTYPE
        elif node.target is READ and node.args[0].target is ARE_ALL_TRUE:
            node.target, node.args = ASSERT, (*node.args, FAILED_CHECK)
        else:
            node.target = REPLACEMENTS.get(node.target, node.target)
        if node.target in BY_LAYOUT:
            _keep_layout(node)
    captured.recompile()
    return captured


def _is_rounded(output_size: Any, input_size: Any, *scales: Any) -> bool:
    """Whether the scales of a resize differ from the ratio of the sizes."""
    sizes = zip(output_size, input_size[2:], scales, strict=False)
    return any(scale is not None and new_size != size * scale for new_size, size, scale in sizes)


def _keep_layout(node: fx.Node) -> None:
    """Give the matrices that a node reads the memory layout that they had in the capture."""
    arguments: Any = node.args
    matrices, *rest = arguments
    value: Tensor = matrices.meta["val"]
    with node.graph.inserting_before(node):
        with_layout = node.graph.call_function(WITH_LAYOUT, (matrices, value.is_contiguous()))
    with_layout.meta["val"] = WITH_LAYOUT(value, value.is_contiguous())
    node.args = with_layout, *rest


def with_fake_strides(captured: fx.GraphModule) -> fx.GraphModule:
    """Copy the results of `CONTIGUOUS` kernels, in place in the graph, to the strides of their fake tensors; return it.

    A compiler decides by these strides, and those of all that is computed from them, whether a reshape can be a view.
    """
    for node in list(captured.graph.nodes):
        if not node.users or not _has_fake_strides(node):  # What is not used may be None.
            continue
        value = node.meta["val"]
        with node.graph.inserting_after(node):
            copy = node.graph.call_function(WITH_STRIDES, (node, list(value.stride())))
        copy.meta["val"] = value
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    captured.recompile()
    return captured


def _has_fake_strides(node: fx.Node) -> bool:
    """Whether a kernel returns contiguous memory for a node whose fake tensor is not contiguous."""
    value = node.meta.get("val")
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    packet = getattr(source.target, "overloadpacket", None)
    return packet in CONTIGUOUS and isinstance(value, Tensor) and value.is_cpu and not value.is_contiguous()
