"""How a step is divided over ranks."""

from __future__ import annotations

from typing import NamedTuple

from ftrain.parallel.mesh import ALL, REPLICATE, SHARD


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

    def __str__(self) -> str:
        return f"{self.replicate} x {self.shard}, level {self.level}"

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks communicate along each axis."""
        return {REPLICATE: self.replicate, SHARD: self.shard, ALL: self.ranks}

    def between_nodes(self, devices: int) -> dict[str, float]:
        """Return for each axis the share of what a rank sends that goes to another node.

        Of the ranks of a group that are in one node, each passes on an equal share, as several rings do at once.

        Args:
            devices: ranks of a node, which are neighbours.
        """
        neighbours = {REPLICATE: max(devices // self.shard, 1), SHARD: devices, ALL: devices}
        return {axis: 1 / neighbours[axis] if size > neighbours[axis] else 0.0 for axis, size in self.sizes.items()}
