"""Changes to the graphs that Inductor compiles, whole steps and parts of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from ftrain._torch import compile as torch_compile
from ftrain.backends import onednn
from ftrain.transforms.compile.lowered import storages

_aten = torch.ops.aten


def options() -> dict[str, Any]:
    """Return the options of Inductor for these changes."""
    name = "ftrain.copies.1"
    least = onednn.least_faster()
    if least is not None:
        onednn.product()  # Registered here, because code from Inductor's cache calls it too.
        name += f".by_onednn.1.{least.by_rows}.{least.transposed}"
    return {
        "post_grad_custom_pre_pass": torch_compile.graph_pass("ftrain.apart.3", _change_first),
        "post_grad_custom_post_pass": torch_compile.graph_pass(name, _change_last),
    }


def _change_first(graph: fx.Graph) -> None:
    scaling_apart(graph)
    products_apart(graph)


def _change_last(graph: fx.Graph) -> None:
    copies_before_writes(graph)
    least = onednn.least_faster()
    if least is not None:
        products_by_onednn(graph, least)


def scaling_apart(graph: fx.Graph) -> None:
    """Turn ``a.add(b, alpha=c)`` into ``a.add(b * c)``.

    Where one of the two is a matrix product, Inductor makes `addmm` of it and leaves out `alpha` (torch 2.13).
    """
    for node in graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1:
            continue
        first, second = node.args
        with graph.inserting_before(node):
            scaled = graph.call_function(_aten.mul.Tensor, (second, alpha))
        scaled.meta = {**second.meta, "val": second.meta["val"] * alpha}
        node.args, node.kwargs = (first, scaled), {}


def products_apart(graph: fx.Graph) -> None:
    """Turn ``_foreach_mul`` by a tensor into one product for each tensor.

    On a GPU Inductor compiles the list as one kernel, and fails where it fuses this kernel with others: with what
    computes the factor if a product has one element, or with what updates parameters (torch 2.11).
    """
    for node in graph.find_nodes(op="call_function", target=_aten._foreach_mul.Tensor):
        tensors, factor = node.args
        for item in list(node.users):
            item.target, item.args = _aten.mul.Tensor, (tensors[item.args[1]], factor)
        graph.erase_node(node)


def copies_before_writes(graph: fx.Graph) -> None:
    """Copy what an input holds before it is written, where a later write reads it.

    Inductor takes an input itself for a copy of it, and so writes the new value of one leaf of a donated state to
    another, which is to get the old one (torch 2.13, https://github.com/pytorch/pytorch/issues/198131).
    """
    first_writes: dict[int, fx.Node] = {}
    for write in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        written: Any = write.args[0]
        source: Any = write.args[1]
        earlier = next((first_writes[key] for key, _ in storages(source) if key in first_writes), None)
        if earlier is not None:
            with graph.inserting_before(earlier):
                copy = graph.call_function(_aten.clone.default, (source,))
            copy.meta["val"] = source.meta["val"].clone()
            write.args = written, copy
        first_writes.update({key: write for key, _ in storages(written) if key not in first_writes})


def products_by_onednn(graph: fx.Graph, least: onednn.Least) -> None:
    """Compute float32 products of matrices on the CPU by oneDNN if they are large enough."""
    for node in graph.find_nodes(op="call_function", target=_aten.mm.default):
        if _is_large(least, *node.args):
            node.target = onednn.product()
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        added, *factors = node.args
        if node.kwargs or not _is_large(least, *factors):
            continue
        with graph.inserting_before(node):
            product = graph.call_function(onednn.product(), tuple(factors))
        product.meta = dict(node.meta)
        node.target, node.args = _aten.add.Tensor, (product, added)


def _is_large(least: onednn.Least, first: fx.Node, second: fx.Node) -> bool:
    # Nodes that other passes have made may have no value yet.
    a: Any = first.meta.get("val")
    b: Any = second.meta.get("val")
    if not all(isinstance(each, Tensor) and each.is_cpu and each.dtype == torch.float32 for each in (a, b)):
        return False
    sizes = [*a.shape, b.shape[1]]
    limit = least.by_rows if a.stride(1) == 1 else least.transposed
    # A size may be symbolic.
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) >= limit
