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
    """One collective operation of a rank.

    Args:
        operation: the name of torch's operation.
        axis: the axis of the mesh; ``"all"`` for all ranks.
        nbytes: bytes of this rank's input; of an all-to-all without those that it keeps.
    """

    operation: str
    axis: str
    nbytes: int


class Traffic(NamedTuple):
    """The bytes that one rank sends in a step with the collectives of one kind along one axis.

    Args:
        kind: the kind of collective, such as ``"all-gather"``.
        axis: the axis of the mesh; ``"all"`` for all ranks.
        calls: the number of collectives.
        sent: bytes that each rank sends in a ring, on average.
    """

    kind: str
    axis: str
    calls: int
    sent: int


def collective_of(operation: str, args: Sequence[Any], axis: str, rank: int, nbytes: int) -> Collective:
    """Return the record of a collective from the arguments of torch's operation.

    Args:
        operation: the name of torch's operation.
        args: its arguments.
        axis: the axis of the mesh.
        rank: the rank on that axis.
        nbytes: bytes of this rank's input.
    """
    if operation == "all_to_all_single" and nbytes:
        rows_for_ranks = args[2]
        nbytes -= nbytes * rows_for_ranks[rank] // sum(rows_for_ranks)
    return Collective(operation, axis, nbytes)


def traffic_of(collectives: Iterable[Collective], sizes: Mapping[str, int]) -> list[Traffic]:
    """Return the traffic of one rank's collectives, most bytes first; `sizes` are the lengths of the axes."""
    inputs: dict[tuple[str, str], list[int]] = {}
    for each in collectives:
        inputs.setdefault((each.operation, each.axis), []).append(each.nbytes)
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
