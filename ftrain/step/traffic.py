"""The bytes that each rank sends in a step, by kind of collective and axis of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from ftrain import _torch

SENT_PER_BYTE: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
    "all_to_all_single": lambda ranks: 1,
    "broadcast": lambda ranks: (ranks - 1) / ranks,
}
"""Name of torch's operation -> ``ranks -> factor``: the bytes that each rank sends in a ring, on average, for each byte
of `Collective.nbytes` (the bus traffic of NCCL's tests)."""

KINDS = {
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}
"""Name of torch's operation -> kind of collective, for `print`."""


class Collective(NamedTuple):
    """A collective that a rank calls: the name of torch's operation, the axis of the mesh, and the bytes of its input.

    The bytes of an all-to-all are those for other ranks.
    """

    operation: str
    axis: str
    nbytes: int


class Traffic(NamedTuple):
    """How often a rank calls the collectives of one kind along one axis in a step, and the bytes it sends on average.

    `kind` is ``"all-gather"``, for example, and `axis` is one of the mesh, or ``"all"``. The bytes are those of a ring.
    """

    kind: str
    axis: str
    calls: int
    sent: int


def collective_of(operation: str, args: Sequence[Any], axis: str, rank: int, nbytes: int) -> Collective:
    """Return the record of a collective, from the arguments of torch's operation and the bytes of the rank's input."""
    if operation == "all_to_all_single" and nbytes:
        rows_for_ranks = args[2]
        nbytes -= nbytes * rows_for_ranks[rank] // sum(rows_for_ranks)
    return Collective(operation, axis, nbytes)


def traffic_of(collectives: Iterable[Collective], sizes: Mapping[str, int]) -> list[Traffic]:
    """Return the traffic of one rank's collectives, most bytes first; `sizes` are the lengths of the axes."""
    inputs: dict[tuple[str, str], list[int]] = {}
    for collective in collectives:
        inputs.setdefault((collective.operation, collective.axis), []).append(collective.nbytes)
    rows = [
        Traffic(KINDS[operation], axis, len(nbytes), round(sum(nbytes) * SENT_PER_BYTE[operation](sizes[axis])))
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
    # A compiler may choose the in-place variant.
    return target.overloadpacket.__name__.removesuffix("_") in KINDS
