"""Torch's DTensor: a tensor that is sharded over the ranks of a mesh, with the shard of this rank.

It is imported at first use, which takes about a second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Size, Tensor

from ftrain._torch import is_fake, private_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@functools.cache
def _names() -> Any:
    with private_names():
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return SimpleNamespace(
        DTensor=DTensor, Replicate=Replicate, Shard=Shard, DTensorSpec=DTensorSpec, TensorMeta=TensorMeta
    )


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a `DTensor`."""
    return "torch.distributed.tensor" in sys.modules and isinstance(value, _names().DTensor)


def is_divided(value: Any) -> bool:
    """Whether a tensor is sharded over several ranks, which must gather it."""
    if not is_dtensor(value) or is_fake(value._local_tensor):
        return False
    sizes = value.device_mesh.shape
    return any(axis is not None and size > 1 for axis, size in zip(axes_of(value), sizes, strict=True))


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor; every rank must call this. Other tensors are returned as they are."""
    if not is_dtensor(tensor):
        return tensor
    local, device = tensor._local_tensor, tensor.device_mesh.device_type
    if is_fake(local):  # It has no values to gather, and the ranks of a planned mesh do not exist.
        return local.new_empty(tensor.shape)
    if local.device.type == device:
        return tensor.full_tensor()
    # An offloaded shard: the ranks of a mesh of GPUs cannot send tensors on the host.
    return with_local_part(tensor, local.to(device)).full_tensor().to(local.device)


def from_local(local: Tensor, mesh: DeviceMesh, axes: Sequence[int | None], shape: Sequence[int]) -> DTensor:
    """Return the contiguous DTensor of a whole shape whose shard on this rank is `local`.

    `axes` are the axes of the tensor that the axes of the mesh shard, as `torch.chunk` does; None where replicated.
    """
    names = _names()
    placements = [names.Replicate() if axis is None else names.Shard(axis) for axis in axes]
    strides = torch.empty(shape, device="meta").stride()
    tensor: DTensor = names.DTensor.from_local(
        local, mesh, placements, run_check=False, shape=Size(shape), stride=strides
    )
    return tensor


def axes_of(tensor: DTensor) -> list[int | None]:
    """Return for each axis of the mesh the axis of the tensor that it shards; None if it is replicated."""
    return [each.dim if isinstance(each, _names().Shard) else None for each in tensor.placements]


def local_part(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor on this rank, without a graph; another tensor as it is."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def with_local_part(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor like another one, with another shard on this rank, which may have another dtype."""
    names, spec = _names(), tensor._spec
    if local.dtype != tensor.dtype:
        meta = names.TensorMeta(tensor.shape, tensor.stride(), local.dtype)
        spec = names.DTensorSpec(tensor.device_mesh, tensor.placements, meta)
    other: DTensor = names.DTensor(local, spec, requires_grad=False)
    return other


def specs(leaves: Sequence[Any]) -> list[Any]:
    """Return the spec of each DTensor, which tensors made by `with_local_parts` share; None for other leaves."""
    if "torch.distributed.tensor" not in sys.modules:
        return [None] * len(leaves)
    kind = _names().DTensor
    return [leaf._spec if isinstance(leaf, kind) else None for leaf in leaves]


def local_parts(leaves: Sequence[Any]) -> list[Any]:
    """Return `local_part` of each DTensor, and other leaves as they are."""
    kind = _names().DTensor
    return [leaf._local_tensor if isinstance(leaf, kind) else leaf for leaf in leaves]


def with_local_parts(likes: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves, as DTensors with the leaf as local shard where `likes` has a DTensor.

    If the leaf is the local shard of that DTensor, the DTensor itself is returned.
    """
    dtensor = _names().DTensor
    results = []
    for like, leaf in zip(likes, leaves, strict=True):
        if not isinstance(like, dtensor):
            results.append(leaf)
        elif like._local_tensor is leaf:
            results.append(like)
        else:
            results.append(with_local_part(like, leaf))
    return results
