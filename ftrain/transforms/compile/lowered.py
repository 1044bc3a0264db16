"""What `Step.lower` reports of a compiled step: operations, memory, traffic between ranks, graph breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from ftrain import _torch, tree
from ftrain._torch import compile as torch_compile
from ftrain.parallel.mesh import Group
from ftrain.step.traffic import Traffic, collective_of, collectives_of, traffic_of


def count_nodes(*graphs: fx.GraphModule) -> dict[str, int]:
    """Count the calls of each operation in graphs, most frequent first."""
    calls = (node for each in graphs for node in each.graph.nodes if node.op.startswith("call_"))
    return dict(Counter(_operation(node.target) for node in calls).most_common())


def _operation(target: Any) -> str:
    if isinstance(target, _torch.OpOverload):
        return str(target.overloadpacket).removeprefix("aten.")
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))


def peak_bytes(captured: fx.GraphModule) -> int:
    """Return the peak of the bytes of intermediate results in a captured graph, without its inputs.

    A result exists from the operation that computes it to the last one that reads it or a view of it.
    """
    nodes = list(captured.graph.nodes)
    last_uses = {node: index for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        last_uses.update(dict.fromkeys(node.all_input_nodes, index))
    inputs = {key for node in nodes if node.op == "placeholder" for key, _ in storages(node)}
    sizes: dict[int, int] = {}
    first_uses: dict[int, int] = {}
    ends: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for key, size in storages(node):
            if key not in inputs:
                sizes[key] = size
                first_uses.setdefault(key, index)
                ends[key] = max(ends.get(key, 0), last_uses[node])
    changes = [0] * (len(nodes) + 1)
    for key, size in sizes.items():
        changes[first_uses[key]] += size
        changes[ends[key] + 1] -= size
    return max(accumulate(changes))


def storages(node: fx.Node) -> list[tuple[int, int]]:
    """Return the identity and the bytes of each storage of the result of a node of a captured graph."""
    values = [leaf for leaf in tree.leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return [(_torch.storage_id(value), value.untyped_storage().nbytes()) for value in values]


def traffic(captured: fx.GraphModule, groups: Mapping[str, Group]) -> tuple[Traffic, ...]:
    """Return what each rank sends in a captured graph, with the groups of ranks by the axis of the mesh."""
    axes = {group.name: (axis, group.rank) for axis, group in groups.items()}
    collectives = []
    for node in collectives_of(captured):
        target: Any = node.target
        nbytes = sum(value.meta["val"].nbytes for value in node.all_input_nodes)
        # The last argument of a collective is the name of its group.
        axis, rank = axes[str(node.args[-1])]
        collectives.append(collective_of(target.overloadpacket.__name__, node.args, axis, rank, nbytes))
    return tuple(traffic_of(collectives, {axis: group.size for axis, group in groups.items()}))


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[fx.GraphModule], tuple[str, ...]]:
    """Return the graphs into which `torch.compile` splits a function, and why; it runs the function once."""
    explanation = torch_compile.explain_graph_breaks(function)(*args, **kwargs)
    return list(explanation.graphs), tuple(_reason(each) for each in explanation.break_reasons)


def _reason(graph_break: Any) -> str:
    why = str(graph_break.reason).strip().splitlines()[0]
    frame = graph_break.user_stack[-1] if graph_break.user_stack else None
    return f"{why} ({frame.filename}:{frame.lineno}: {frame.line})" if frame else why
