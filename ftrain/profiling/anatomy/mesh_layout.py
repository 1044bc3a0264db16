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

    @property
    def sizes(self) -> dict[str, int]:
        """How many ranks communicate along each axis."""
        return {REPLICATE: self.replicate, SHARD: self.shard, ALL: self.ranks}
