"""Describe a compiled step: its graphs, operations, memory, what ranks send, and where a graph breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from ftrain import _torch, tree
from ftrain._torch import compile as torch_compile
from ftrain.parallel.mesh import Group
from ftrain.step.traffic import Collective, Traffic, collectives_of, traffic_of


def count_nodes(*graphs: fx.GraphModule) -> dict[str, int]:
    """Count the calls of each operation in graphs, most frequent first."""
    calls = (node for each in graphs for node in each.graph.nodes if node.op.startswith("call_"))
    return dict(Counter(_operation(node.target) for node in calls).most_common())


def _operation(target: Any) -> str:
    if isinstance(target, _torch.OpOverload):
        return str(target.overloadpacket).removeprefix("aten.")
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))


def peak_bytes(captured: fx.GraphModule) -> int:
    """Return how many bytes of intermediate results a captured graph holds at once, at most.

    A result lives from the operation that makes it to the last one that reads it or a view of it. Inputs
    do not count.
    """
    nodes = list(captured.graph.nodes)
    last_uses = {node: index for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        last_uses.update(dict.fromkeys(node.all_input_nodes, index))
    inputs = {key for node in nodes if node.op == "placeholder" for key, _ in storages(node)}
    sizes: dict[int, int] = {}
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for key, size in storages(node):
            if key not in inputs:
                sizes[key] = size
                begins.setdefault(key, index)
                ends[key] = max(ends.get(key, 0), last_uses[node])
    changes = [0] * (len(nodes) + 1)
    for key, size in sizes.items():
        changes[begins[key]] += size
        changes[ends[key] + 1] -= size
    return max(accumulate(changes))


def storages(node: fx.Node) -> list[tuple[int, int]]:
    """Return the storages of what a node of a captured graph returns: of each an identity and its bytes."""
    values = [leaf for leaf in tree.leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return [(_torch.storage_id(value), value.untyped_storage().nbytes()) for value in values]


def traffic(captured: fx.GraphModule, groups: Mapping[str, Group]) -> tuple[Traffic, ...]:
    """Return what each rank sends in a captured graph.

    Args:
        captured: the graph of a step.
        groups: of ranks, by the axis of the mesh along which they communicate.
    """
    axes = {group.name: axis for axis, group in groups.items()}
    # A group that has all ranks is known by the axis along which it has them.
    sizes = {axis: group.size for axis, group in groups.items()}
    return tuple(traffic_of(_collectives(captured, axes), sizes))


def _collectives(captured: fx.GraphModule, axes: Mapping[str, str]) -> Iterator[Collective]:
    """The collectives of a graph, by the names of groups; their operations take the name of the group at last."""
    for node in collectives_of(captured):
        target: Any = node.target
        nbytes = sum(value.meta["val"].nbytes for value in node.all_input_nodes)
        yield Collective(target.overloadpacket.__name__, axes[str(node.args[-1])], nbytes)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[fx.GraphModule], tuple[str, ...]]:
    """Return the graphs into which `torch.compile` cuts a function, and why; runs it once."""
    explanation = torch_compile.explain_graph_breaks(function)(*args, **kwargs)
    return list(explanation.graphs), tuple(_reason(each) for each in explanation.break_reasons)


def _reason(graph_break: Any) -> str:
    why = str(graph_break.reason).strip().splitlines()[0]
    place = graph_break.user_stack[-1] if graph_break.user_stack else None
    return f"{why} ({place.filename}:{place.lineno}: {place.line})" if place else why
