"""The process groups of a DeviceMesh."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh


def release_groups(mesh: Callable[[], DeviceMesh | None]) -> None:
    """Make a mesh forget its groups, if it still exists, so that nothing keeps those that are destroyed.

    Their threads end with them. A thread of gloo that still holds a tensor when Python has ended aborts the process.

    Args:
        mesh: function that returns the mesh, or None.
    """
    # In some versions of torch a mesh has only the names of its groups.
    getattr(mesh(), "_pg_registry", {}).clear()
