"""Compute once what a captured graph makes on the host from constants alone, and keep it on the device.

``torch.tensor([0.2, 0.3]).to(x.device)`` or ``torch.arange(n).to(x.device)`` in a loss is a copy in each step,
for which the host waits, and which a device cannot record.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, fx

from ftrain import _torch, tree
from ftrain._torch import operations
from ftrain.transforms.compile.lowered import storages

Values: TypeAlias = dict[fx.Node, Tensor]
"""The values of the nodes of a graph that are the same in each run."""

LIFTED = torch.ops.aten.lift_fresh_copy.default
"""How a capture records ``torch.tensor(...)``. A tensor of the host that is not lifted comes from outside of the step,
and may have other values in the next one."""


def move_constants(captured: fx.GraphModule, device: torch.device) -> None:
    """Give the operations on `device` what they read of the host's constants on `device`; change the graph in place."""
    constants = _constants(captured)
    for constant, value in constants.items():
        readers = [node for node in constant.users if _is_on(device, node) and not is_passed_as_number(constant, node)]
        if not readers:
            continue
        name = f"_{constant.name}_on_device"
        captured.register_buffer(name, value.to(device), persistent=False)
        with captured.graph.inserting_after(constant):
            moved = captured.graph.get_attr(name)
        for node in readers:
            node.replace_input_with(constant, moved)
    for node in reversed(captured.graph.nodes):
        if not node.users and (node in constants or node.op == "get_attr"):
            captured.graph.erase_node(node)
    captured.recompile()


def is_passed_as_number(used: fx.Node, node: fx.Node) -> bool:
    """Whether an elementwise operation reads a scalar that the step itself makes of a number, as ``torch.tensor(2.)``.

    The device gets its value with the kernel. That of a scalar from outside of the step may change, and is not
    recorded.
    """
    is_scalar = used.target is LIFTED and all(each.dim() == 0 for each in tensors_of(used))
    return is_scalar and torch.Tag.pointwise in getattr(node.target, "tags", ())


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the tensors of a node of a captured graph, without values."""
    if node.op == "get_attr":
        constant = getattr(node.graph.owning_module, str(node.target))
        return [constant] if isinstance(constant, Tensor) else []  # It may be a part of the graph.
    return [each for each in tree.leaves(node.meta.get("val")) if isinstance(each, Tensor)]


def _constants(captured: fx.GraphModule) -> Values:
    """Compute the tensors of the host that depend on no input, no random number, and no tensor from outside.

    A tensor that is changed in place, itself or by a view, has several values and is left out.
    """
    constants: Values = {}
    written = {key for node in captured.graph.nodes for used in _changed_by(node) for key, _ in storages(used)}
    for node in captured.graph.nodes:
        if not _is_on(tree.HOST, node) or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        # A sparse tensor has no one storage.
        if node.meta["val"].layout != torch.strided or not written.isdisjoint(key for key, _ in storages(node)):
            continue
        if node.target is LIFTED and node.args[0].op == "get_attr":
            constants[node] = getattr(captured, node.args[0].target).detach()
        elif all(used in constants for used in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), constants.__getitem__)
            constants[node] = node.target(*args, **kwargs)
    return constants


def _changed_by(node: fx.Node) -> list[fx.Node]:
    """Return what an operation writes to."""
    if not isinstance(node.target, _torch.OpOverload):
        return []
    written = [
        (place, each.name) for place, each in enumerate(operations.schema_of(node.target).arguments) if each.is_write
    ]
    changed: list[fx.Node] = []
    for place, name in written:
        # The lists of a graph are of a class of their own, which `tree.leaves` would take for a leaf.
        fx.map_arg(node.args[place] if place < len(node.args) else node.kwargs.get(name), changed.append)
    return changed


def _is_on(device: torch.device, node: fx.Node) -> bool:
    """Whether a node is an operation that returns a tensor, and on this device."""
    value = node.meta.get("val")
    return isinstance(node.target, _torch.OpOverload) and isinstance(value, Tensor) and value.device == device
