"""What a compiled step consists of: graphs, operations, memory, and where a graph breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ftrain import tree

MOST_SHOWN = 5


@dataclass(frozen=True)
class Lowered:
    """What `ftrain.Step.lower` found out; `print` shows it.

    Args:
        lowering: ``"whole"`` or ``"split"``.
        graphs: how many graphs a step runs.
        nodes: how often each operation is called in them, most frequent first.
        peak_bytes: bytes of intermediate results alive at once, at most, if every operation ran by itself in
            the order it was captured in; what a compiler fuses is never stored, so it is an estimate from
            above. None where the graphs are not known as a whole.
        breaks: why and where the loss falls apart into several graphs, one text each.
    """

    lowering: str
    graphs: int
    nodes: Mapping[str, int]
    peak_bytes: int | None
    breaks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        total, shown = sum(self.nodes.values()), list(self.nodes.items())[:MOST_SHOWN]
        often = ", ".join(f"{count} {name}" for name, count in shown)
        peak = "unknown" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:,.1f} MiB"
        lines = [
            f"lowering  {self.lowering}, {self.graphs} graph{'s' * (self.graphs != 1)}",
            f"nodes     {total:,} ({often}{', ...' * (len(self.nodes) > len(shown))})",
            f"peak      {peak} of intermediate results",
            *(f"break     {text}" for text in self.breaks),
        ]
        return "\n".join(lines)


def count_nodes(*graphs: fx.GraphModule) -> dict[str, int]:
    """Count the calls of each operation in graphs, most frequent first."""
    calls = (node for each in graphs for node in each.graph.nodes if node.op.startswith("call_"))
    return dict(Counter(_operation(node.target) for node in calls).most_common())


def _operation(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket).removeprefix("aten.")
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))


def peak_bytes(captured: fx.GraphModule) -> int:
    """Return how many bytes of intermediate results a captured graph holds at once, at most.

    A result lives from the operation that makes it to the last one that reads it or a view of it. Inputs
    do not count.
    """
    nodes = list(captured.graph.nodes)
    last = {node: index for index, node in enumerate(nodes)}
    for index, node in enumerate(nodes):
        for used in node.all_input_nodes:
            last[used] = max(last[used], index)
    inputs = {key for node in nodes if node.op == "placeholder" for key, _ in storages(node)}
    ends: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for node in nodes:
        for key, size in storages(node):
            if key not in inputs:
                ends[key], sizes[key] = max(ends.get(key, 0), last[node]), size
    return _highest(_events(nodes, ends, sizes))


def _events(nodes: list[fx.Node], ends: Mapping[int, int], sizes: Mapping[int, int]) -> Iterator[int]:
    """Bytes as they are taken (positive) and given back (negative), in order."""
    freed: dict[int, list[int]] = {}
    for key, index in ends.items():
        freed.setdefault(index, []).append(key)
    born: set[int] = set()
    for index, node in enumerate(nodes):
        for key, _ in storages(node):
            if key in sizes and key not in born:
                born.add(key)
                yield sizes[key]
        yield from (-sizes[key] for key in freed.get(index, ()))


def _highest(changes: Iterator[int]) -> int:
    held = highest = 0
    for change in changes:
        held += change
        highest = max(highest, held)
    return highest


def storages(node: fx.Node) -> list[tuple[int, int]]:
    """Return the storages of what a node of a captured graph returns: of each an identity and its bytes."""
    values = [leaf for leaf in tree.leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return [(value.untyped_storage()._cdata, value.untyped_storage().nbytes()) for value in values]


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[fx.GraphModule], tuple[str, ...]]:
    """Return the graphs into which `torch.compile` cuts a function, and why; runs it once."""
    found = torch._dynamo.explain(function)(*args, **kwargs)
    return list(found.graphs), tuple(_reason(each) for each in found.break_reasons)


def _reason(found: Any) -> str:
    why = str(found.reason).strip().splitlines()[0]
    place = found.user_stack[-1] if found.user_stack else None
    return f"{why} ({place.filename}:{place.lineno}: {place.line})" if place else why
