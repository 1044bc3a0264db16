"""The mesh: how the ranks of a run are arranged, which groups of them communicate, and their collectives."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ftrain import _torch, backends, tree
from ftrain._torch import collectives, store
from ftrain._torch.mesh import PlannedMesh, release_groups
from ftrain.errors import DeviceError, OptionError, require_positive_number, warn, whole_number
from ftrain.parallel.process_group import at_exit, join
from ftrain.parallel.rank_watch import watch
from ftrain.tree.wrapped_tensors import plain_tensors
from ftrain.types import PyTree

REPLICATE, SHARD = "replicate", "shard"
"""The names of the axes of a mesh, in their order."""

ALL = "all"
"""The name of the group of all ranks, beside the names of the axes."""

DEFAULT_TIMEOUT = 600.0
"""Seconds for which ranks wait for each other, if the program gives no number."""


def mesh(*, replicate: int | None = None, shard: int | None = None, timeout: float = DEFAULT_TIMEOUT) -> DeviceMesh:
    """Return the mesh of all ranks, an array of shape (replicate, shard). Join the ranks if that is not done yet.

    The state is sharded over the ranks of one row, and each row has a copy of it. Neighbouring ranks are in one row:
    with as many columns as a node has devices, parameters are gathered within nodes, and between nodes one gradient
    shard of each rank is all-reduced.

    Under torchrun the ranks join by its environment variables, with the communication library of the device's
    `Backend`. Without torchrun, this process is the only rank. A process group that `mesh` has made is destroyed at the
    end of the program, unless the program ends with an error.

    Args:
        replicate: number of rows. Default: number of ranks divided by `shard`; 1 if neither is given.
        shard: number of columns. Default: number of ranks divided by `replicate`.
        timeout: seconds for which ranks wait for each other; then a step raises a RankError that names the rank that
            did not come. It must be longer than the longest work of one rank while the others wait. It replaces the
            timeout of a process group that the program has made before; a warning says if that was longer.

    Raises:
        OptionError: when the product of the sizes is not the number of ranks, the timeout is not positive, or a node
            has fewer devices than ranks.
        DeviceError: when torch was built without torch.distributed.
    """
    require_distributed("mesh")
    timeout = require_positive_number("mesh", "timeout", timeout)
    join(timeout)
    world = dist.get_world_size()
    requested = {name: size for name, size in (("replicate", replicate), ("shard", shard)) if size is not None}
    sizes = [whole_number("mesh", name, size, least=1) for name, size in requested.items()]
    if world % math.prod(sizes) or (len(sizes) == 2 and math.prod(sizes) != world):
        raise OptionError(
            f"mesh: the sizes are replicate={replicate!r} and shard={shard!r}; there are {world} ranks, those that "
            "torchrun has started (--nproc-per-node=...), or 1 without it: give one size that divides them"
        )
    shard = int(shard or world // (replicate or 1))
    replicate = world // shard
    device = backends.default().device.type
    result = init_device_mesh(device, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))
    at_exit(release_groups, weakref.ref(result))
    if store.are_processes():
        if timeout == DEFAULT_TIMEOUT:  # Another number is the user's choice.
            _warn_if_shorter(timeout, backends.default().device)
        # Torch makes the groups of the axes without the timeout.
        store.set_timeout([dist.group.WORLD, *result.get_all_groups()], timeout)
    watch()
    return result


def _warn_if_shorter(timeout: float, device: torch.device) -> None:
    """Warn, on the first rank, if the process group has a longer timeout than `timeout`, which replaces it."""
    old_timeout = store.chosen_timeout(dist.group.WORLD, device)
    if old_timeout is not None and old_timeout > timeout and dist.get_rank() == 0:
        warn(
            f"mesh: the ranks waited for each other for {old_timeout:g} seconds, the timeout of their process group, "
            f"and wait for {timeout:g} from now on; mesh(timeout={old_timeout:g}) keeps it"
        )


# As Any, because torch annotates that it returns None.
_split_copy: Any = torch.split_with_sizes_copy

Result: TypeAlias = Callable[[], Tensor]
"""Waits for a collective and returns its result. On a GPU its stream waits, not the host."""


@dataclass(frozen=True)
class Group:
    """Ranks along one axis of a mesh, and the collectives between them.

    A collective whose name ends with an underscore may overwrite its argument. The methods `start_...` need more than
    one rank. `rank` is the rank of this process in the group. `has_reduce_scatter` is as in `Backend`: without one,
    ranks both scatter and gather by an all-to-all.
    """

    name: str
    size: int
    rank: int
    has_reduce_scatter: bool = True

    @property
    def gather_kind(self) -> str:
        """The kind of collective that gathers."""
        return "all-gather" if self.has_reduce_scatter else "all-to-all"

    @property
    def scatter_kind(self) -> str:
        """The kind of collective that sums, and gives each rank its part."""
        return "reduce-scatter" if self.has_reduce_scatter else "all-to-all"

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        return self.start_sum_(tensor.clone())() if self.size > 1 else tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Return the largest values of a tensor over the ranks."""
        return collectives.wait(collectives.all_reduce_(tensor.clone(), "max", self.name)) if self.size > 1 else tensor

    def start_sum_(self, tensor: Tensor) -> Result:
        """Start to sum a tensor over the ranks."""
        return partial(_wait, collectives.all_reduce_(tensor, "sum", self.name), tensor)

    def start_gather(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to gather vectors, which have the same lengths on all ranks.

        Return a function that may be called once: it waits, and returns for each vector a new matrix of (ranks, length)
        with the vector of each rank as a row.
        """
        lengths = [tensor.shape[0] for tensor in tensors]
        if self.has_reduce_scatter:
            flat = torch.cat([*tensors])
            started = [partial(_wait, collectives.all_gather(flat, self.size, self.name), flat)]
            # Popped, so that the buffer that was sent is freed before the result is copied.
            return lambda: [*_split_copy(started.pop()().view(self.size, -1), lengths, 1)]
        # By an exchange, because an all-gather of gloo takes the memory of two more copies.
        exchanged = [self._start_exchange_with_others(torch.cat([*tensors] * (self.size - 1)))]

        def joined() -> list[Tensor]:
            others = exchanged.pop()()
            lower = others[: self.rank].split_with_sizes(lengths, 1)
            higher = others[self.rank :].split_with_sizes(lengths, 1)
            of_this_rank = [tensor[None] for tensor in tensors]
            return [torch.cat([*rows]) for rows in zip(lower, of_this_rank, higher, strict=True)]

        return joined

    def start_scatter(self, matrices: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to sum matrices of (ranks, length), which have the same lengths on all ranks.

        Return a function that may be called once: it waits, and returns this rank's row of each sum.
        """
        lengths = [matrix.shape[1] for matrix in matrices]
        if self.has_reduce_scatter:
            flat = torch.cat([*matrices], 1).view(-1)
            started = partial(_wait, collectives.reduce_scatter(flat, self.size, self.name), flat)
            return lambda: [*started().split_with_sizes(lengths)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        rows_of_others = torch.cat([matrix[rank] for rank in others for matrix in matrices])
        exchanged = self._start_exchange_with_others(rows_of_others)
        total = torch.cat([matrix[self.rank] for matrix in matrices])

        def summed() -> list[Tensor]:
            for row in exchanged():
                total.add_(row)
            return [*total.split_with_sizes(lengths)]

        return summed

    def _start_exchange_with_others(self, flat: Tensor) -> Result:
        """Start to send a vector to each other rank, and to receive one of the same length from each.

        `flat` are the vectors to send, one after the other. The result has a row for each other rank.
        """
        length = flat.shape[0] // (self.size - 1)
        # A rank sends nothing to itself: libraries would copy it.
        counts = [0 if rank == self.rank else length for rank in range(self.size)]
        exchanged = self.start_exchange(flat, counts, counts)
        return lambda: exchanged().view(self.size - 1, length)

    def start_exchange(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Result:
        """Start to send `sent[rank]` rows to each rank, and to receive `received[rank]`, which the result joins."""
        return partial(_wait, collectives.all_to_all(tensor, received, sent, self.name), tensor)

    def start_broadcast_(self, tensor: Tensor) -> Result:
        """Start to broadcast the tensor of the first rank."""
        return partial(_wait, collectives.broadcast_(tensor, 0, self.name), tensor)


def _wait(started: Tensor, source: Tensor) -> Tensor:
    # `source` keeps the buffer that is sent in memory until then; collectives of fake tensors do not keep it.
    return collectives.wait(started)


def planned_mesh(replicate: int, shard: int) -> DeviceMesh:
    """Return a mesh of ranks that do not exist, as the first of them would see it, for fake tensors."""
    require_distributed("mesh")
    return PlannedMesh(tree.HOST.type, (REPLICATE, SHARD), (replicate, shard))


def require_distributed(function: str) -> None:
    """Check that torch has torch.distributed; some builds do not (NVIDIA Jetson). Raises a DeviceError if not."""
    if not dist.is_available():
        raise DeviceError(
            f"{function}: torch {torch.__version__} was built without torch.distributed, which a mesh of ranks needs; "
            "leave out ft.sharded to train on one device, or install a torch that has it (USE_DISTRIBUTED=1)"
        )


def require_all_ranks_of(mesh: DeviceMesh) -> None:
    """Check that a mesh has all ranks, because losses are weighted over all. Raises an OptionError if not."""
    if not isinstance(mesh, PlannedMesh) and mesh.size() != dist.get_world_size():
        raise OptionError(
            f"sharded: the mesh has {mesh.size()} of {dist.get_world_size()} ranks; needs one of all ranks, such as "
            "ft.parallel.mesh()"
        )


def require_ranks(mesh: DeviceMesh, tensors: PyTree) -> None:
    """Check that ranks exist where tensors have values. Raises an OptionError if the mesh is planned."""
    if not isinstance(mesh, PlannedMesh):
        return
    leaves = [leaf for leaf in tree.leaves(tensors) if isinstance(leaf, Tensor)]
    if not all(_torch.is_fake(plain) for leaf in leaves for plain in plain_tensors(leaf)):
        sizes = f"replicate={mesh.size(0)}, shard={mesh.size(1)}"
        raise OptionError(
            f"sharded: the {mesh.size():,} ranks of this step are planned, and do not exist; start as many with "
            f"torchrun, and make the step with ft.sharded(ft.parallel.mesh({sizes}), level=...)"
        )


def groups(mesh: DeviceMesh) -> dict[str, Group]:
    """Return the groups of this rank by axis; ``"all"`` is the group of all ranks of the run."""
    if isinstance(mesh, PlannedMesh):
        sizes = {ALL: mesh.size(), REPLICATE: mesh.size(0), SHARD: mesh.size(1)}
        return {name: Group(name, size, 0) for name, size in sizes.items()}
    ranks = {ALL: dist.group.WORLD, REPLICATE: mesh.get_group(REPLICATE), SHARD: mesh.get_group(SHARD)}
    return {name: _group(process_group, mesh) for name, process_group in ranks.items()}


def _group(process_group: Any, mesh: DeviceMesh) -> Group:
    backend = backends.of(mesh.device_type)
    # The record speaks of one library; any other that the program has chosen is taken to have a reduce-scatter.
    has_reduce_scatter = backend.reduce_scatter or dist.get_backend(process_group) != backend.distributed
    return Group(process_group.group_name, process_group.size(), dist.get_rank(process_group), has_reduce_scatter)
