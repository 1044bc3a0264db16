"""The private names of torch that describe operations."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ftrain._torch import OpOverload, private_names

with private_names():
    from torch._C import DispatchKey

    _ = torch.ops.aten.mm.default._schema
    _has_kernel = torch._C._dispatch_has_kernel
    _has_kernel_for = torch._C._dispatch_has_kernel_for_dispatch_key


def schema_of(operation: OpOverload) -> Any:
    """Return the schema of an operation: the names, defaults and mutability of its arguments."""
    return operation._schema


def aten_operations(*names: str) -> frozenset[OpOverload]:
    """Return the default overloads of those ATen operations that this version of torch has."""
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(packet.default for packet in packets if packet is not None)


@functools.cache
def is_composite(operation: Any) -> bool:
    """Whether an operation consists of others, which its `decompose` calls."""
    if not isinstance(operation, OpOverload):
        return False
    name = operation.name()  # type: ignore[no-untyped-call]
    # Operators of TorchScript (prim::device) reach a mode too, and are unknown to the dispatcher.
    # An operation with a kernel for the CPU as well (silu_backward) is not decomposed: the bits would differ.
    has_parts = _has_kernel(name) and _has_kernel_for(name, DispatchKey.CompositeImplicitAutograd)
    return has_parts and not _has_kernel_for(name, DispatchKey.CPU)
