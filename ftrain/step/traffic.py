"""What the ranks of a step send to each other, by kind of collective and axis of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import fx

from ftrain import _torch

SENT_PER_BYTE = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
    "all_to_all_single": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: (ranks - 1) / ranks,
}
"""Bytes that each rank sends in a ring, on average, for each byte of its input: the bus traffic of NCCL's tests."""

NAMES = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}
"""How collectives print, by the name of torch's operation."""


class Collective(NamedTuple):
    """One collective operation of a rank.

    Args:
        operation: the name of torch's operation.
        axis: of the mesh, along which it communicates; ``"all"`` for all ranks.
        nbytes: bytes of this rank's input.
    """

    operation: str
    axis: str
    nbytes: int


class Traffic(NamedTuple):
    """What one rank sends in a step with the collectives of one kind along one axis.

    Args:
        kind: of the collectives: ``"all-gather"``, say.
        axis: of the mesh, along which they communicate; ``"all"`` for all ranks.
        calls: how many there are.
        sent: bytes that each rank sends in a ring, on average.
    """

    kind: str
    axis: str
    calls: int
    sent: int


def traffic_of(collectives: Iterable[Collective], sizes: Mapping[str, int]) -> list[Traffic]:
    """Return what a rank sends, most first.

    Args:
        collectives: of one rank.
        sizes: how many ranks communicate along each axis.
    """
    inputs: dict[tuple[str, str], list[int]] = {}
    for each in collectives:
        inputs.setdefault((each.operation, each.axis), []).append(each.nbytes)
    rows = [
        Traffic(NAMES[operation], axis, len(nbytes), round(sum(nbytes) * SENT_PER_BYTE[operation](sizes[axis])))
        for (operation, axis), nbytes in inputs.items()
    ]
    return sorted(rows, key=lambda row: -row.sent)


def collectives_of(captured: fx.GraphModule) -> list[fx.Node]:
    """Return the collectives of a captured graph, in the order in which ranks start them."""
    return [node for node in captured.graph.nodes if is_collective(node.target)]


def is_collective(target: Any) -> bool:
    """Whether an operation is a collective of torch."""
    if not isinstance(target, _torch.OpOverload) or target.namespace != "_c10d_functional":
        return False
    # A compiler may choose the one that overwrites its input.
    return target.overloadpacket.__name__.removesuffix("_") in NAMES
