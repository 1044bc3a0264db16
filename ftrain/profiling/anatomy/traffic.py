"""What the ranks of a step send to each other, by kind of collective and axis of the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ftrain.parallel.mesh import ALL, REPLICATE, SHARD

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


class MeshLayout(NamedTuple):
    """How a step is divided over ranks.

    Args:
        replicate: copies of the state.
        shard: ranks over which each copy is divided.
        level: of `sharded`.
    """

    replicate: int
    shard: int
    level: int

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.replicate * self.shard

    def size(self, axis: str) -> int:
        """Return how many ranks communicate along an axis."""
        return {REPLICATE: self.replicate, SHARD: self.shard, ALL: self.ranks}[axis]


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


def traffic_of(collectives: Iterable[Collective], layout: MeshLayout) -> list[Traffic]:
    """Return what a rank sends, most first."""
    calls: dict[tuple[str, str], list[int]] = {}
    for each in collectives:
        calls.setdefault((each.operation, each.axis), []).append(each.nbytes)
    rows = [
        Traffic(NAMES[operation], axis, len(sizes), round(sum(sizes) * SENT_PER_BYTE[operation](layout.size(axis))))
        for (operation, axis), sizes in calls.items()
    ]
    return sorted(rows, key=lambda row: -row.sent)
