"""Record the operations of a step, and its allocations with their size, kind and lifetime."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ftrain import tree
from ftrain._torch import TorchDispatchMode, forget_value, in_backward, storage_id
from ftrain.profiling.module_path import RunningModule
from ftrain.step.flops import flops, group_of, is_view
from ftrain.step.traffic import SENT_PER_BYTE, Collective, collective_of

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""The phases of a step."""

COPYING = "clone", "cat", "split_with_sizes_copy"
"""Operations that copy their first tensor."""


@dataclass
class Allocation:
    """The memory of one tensor and its views, in bytes."""

    size: int
    start: int
    """Index of the operation that allocated it."""
    module: str
    """Dotted name of the module that was running."""
    phase: str = ""
    """The phase of the step in which it was allocated; ``""`` if it was there before the step."""
    kind: str = ""
    """One of `kinds.KINDS`; ``""`` until it is known."""
    cast_of: Allocation | None = None
    """The allocation that this one is a copy of, in another dtype."""
    is_gathered: bool = False
    end: int | None = None
    """Index of the first operation after it was freed; None while it is alive."""


@dataclass(frozen=True)
class Operation:
    """An operation of torch that ran in a step."""

    group: str
    phase: str
    flops: int


@dataclass
class Timeline:
    """The allocations, the operations and the collectives of one step, in order.

    `losses` has, for each call of the loss, the number of operations and the number of collectives before it.
    """

    allocations: list[Allocation] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    losses: list[tuple[int, int]] = field(default_factory=list)

    def end(self, allocation: Allocation) -> int:
        """Return the index of the first operation after an allocation was freed; the number of operations if never."""
        return len(self.operations) if allocation.end is None else allocation.end

    def curve(self, *kinds: str) -> list[int]:
        """Return the allocated bytes of these kinds at each operation. Default: of all kinds."""
        changes = [0] * (len(self.operations) + 1)
        for allocation in self.allocations:
            if not kinds or allocation.kind in kinds:
                changes[allocation.start] += allocation.size
                changes[self.end(allocation)] -= allocation.size
        return list(itertools.accumulate(changes))[: len(self.operations)]


class AllocationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records in `timeline` the allocations and operations that run in this context.

    The tensors exist before the step. Submodules of `module` name the allocations.
    """

    def __init__(self, tensors_by_kind: Mapping[str, Sequence[Tensor]], module: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline, self.update_start, self.running = Timeline(), 0, RunningModule(module)
        self._live: dict[int, Allocation] = {}
        for kind, tensors in tensors_by_kind.items():
            for tensor in tensors:
                self._add(tensor, kind=kind)

    def _add(self, tensor: Tensor, **fields: Any) -> None:
        """Record the memory of a tensor, with these fields of `Allocation`, unless it is recorded already."""
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        if key in self._live:
            return
        start = len(self.timeline.operations)
        self._live[key] = Allocation(storage.nbytes(), start, self.running.name, **fields)
        self.timeline.allocations.append(self._live[key])
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._live.pop(key).end = len(self.timeline.operations)

    def set_size(self, tensor: Tensor, size: int) -> None:
        """Set the bytes of a tensor whose storage says another number than it takes on the device."""
        self._live[storage_id(tensor)].size = size

    def mark(self, tensors: Sequence[Tensor], kind: str) -> None:
        """Set the kind of the memory of tensors, unless it is known already."""
        for tensor in tensors:
            allocation = self._live.get(storage_id(tensor))
            if allocation is not None and not allocation.kind:
                allocation.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device  # Half of all calls, so this saves time.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A quantised weight: its class runs operations on the tensors in it, and these are recorded.
            return NotImplemented
        kwargs = kwargs or {}
        name, phase = func.overloadpacket.__name__, self._phase()
        is_collective = func.namespace == "_c10d_functional"
        if is_collective and name == "wait_tensor":
            return args[0]  # Like the real operation. The fake one would return a new tensor.
        if is_collective:
            forget_value(args[0])  # Torch would send a known value, to a group that does not exist.
        # Fused optimizer kernels write in place and return nothing. For those without a fake kernel, torch would
        # allocate real tensors and run the real one.
        is_fused_update = name.startswith("_fused_") and name.endswith("_")
        returned = None if is_fused_update else func(*args, **kwargs)
        # A view allocates nothing; if it is of a constant of the loss, recording it would count the constant.
        if is_view(func):
            return returned
        operation = name.removesuffix("_")  # Some collectives write in place.
        if is_collective and operation in SENT_PER_BYTE:
            # The ranks of a planned mesh are seen from the first one.
            self.timeline.collectives.append(collective_of(operation, args, str(args[-1]), 0, args[0].nbytes))
        source = self._source(args) if name in ("_to_copy", *COPYING) else None
        cast_of = source if name == "_to_copy" else None
        is_copied = name in COPYING and source is not None and source.is_gathered
        for leaf in tree.leaves(returned):
            if isinstance(leaf, Tensor):
                is_gathered = is_copied or (is_collective and name == "all_gather_into_tensor")
                self._add(leaf, phase=phase, cast_of=cast_of, is_gathered=is_gathered)
        count = flops(func, name, args, kwargs, returned)
        self.timeline.operations.append(Operation(group_of(name), phase, count))
        return returned

    def _phase(self) -> str:
        # True in rematerialisation too.
        if in_backward():
            return BACKWARD
        # A loss may compute something without gradients, such as the output of a teacher.
        return FORWARD if torch.is_grad_enabled() or self.running.is_tracking else UPDATE

    def _source(self, args: Any) -> Allocation | None:
        first = args[0] if isinstance(args[0], Tensor) else args[0][0]
        return self._live.get(storage_id(first))
