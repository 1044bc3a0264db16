"""Torch's DeviceMesh: a mesh without process groups, and a function that releases the groups of a mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from ftrain._torch import private_names


class PlannedMesh(DeviceMesh):
    """A mesh of any size, seen from its first rank, without communication: for tensors without values."""

    def __init__(self, device_type: str, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
        ranks = torch.arange(torch.Size(shape).numel()).view(shape)
        with private_names():
            super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)

    # Torch caches results of DTensors by mesh, and equal meshes share them. A mesh without groups must not equal a real
    # one, or ranks would get it from the cache.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlannedMesh) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((PlannedMesh, self.shape))

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return the index of the first rank along any axis."""
        return 0


def release_groups(mesh: Callable[[], DeviceMesh | None]) -> None:
    """Make a mesh forget its groups, if it still exists, so that nothing keeps those that are destroyed.

    Their threads end with them. A thread of gloo that still holds a tensor when Python has ended aborts the process.
    """
    # In some versions of torch a mesh has only the names of its groups.
    getattr(mesh(), "_pg_registry", {}).clear()
