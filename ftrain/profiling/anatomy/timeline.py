"""Every piece of memory that a step takes: how large, for what, and from when to when."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ftrain import tree
from ftrain.step.flops import flops, group_of, is_view
from ftrain.step.module_path import Running
from ftrain.transforms.compile.plan import BACKWARD, FORWARD, UPDATE

Scratch: TypeAlias = Callable[[str, Sequence[Any]], int]
"""``(name, args) -> bytes`` that the kernel of an operation takes for itself while it runs."""


@dataclass
class Piece:
    """One piece of memory.

    Args:
        size: bytes.
        born: number of the operation that took it.
        died: number of the first operation after it was given back; None while it is there.
        phase: ``"forward"``, ``"backward"`` or ``"update"``, when it was taken.
        module: dotted name of the module that was running.
        kind: what it is for, where that is known.
        source: of which piece it is a copy in another dtype.
    """

    size: int
    born: int
    phase: str
    module: str
    kind: str = ""
    source: Piece | None = None
    died: int | None = None


@dataclass(frozen=True)
class Operation:
    """One operation: its group, the phase, and its floating-point operations."""

    group: str
    phase: str
    flops: int


@dataclass
class Timeline:
    """The pieces and operations of one step, in order; of the pieces, `born` is the operation that took them."""

    pieces: list[Piece] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def end(self, piece: Piece) -> int:
        """Return the number of the operation before which a piece is given back; after the last, if it stays."""
        return len(self.operations) if piece.died is None else piece.died

    def curve(self, *kinds: str) -> list[int]:
        """Return the bytes after each operation; of some kinds, or of all."""
        changes = [0] * (len(self.operations) + 1)
        for piece in self.pieces:
            if not kinds or piece.kind in kinds:
                changes[piece.born] += piece.size
                changes[self.end(piece)] -= piece.size
        return list(itertools.accumulate(changes))[: len(self.operations)]

    def brief(self, size: int, phase: str, module: str = "", kind: str = "") -> None:
        """Write down what the next operation takes for itself."""
        if size:
            born = len(self.operations)
            self.pieces.append(Piece(size, born, phase, module, kind, died=born + 1))


class Ledger:
    """Writes down in a `Timeline` which memory is taken, and sees by itself when it is given back."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._live: dict[int, Piece] = {}

    def take(self, tensor: Tensor, kind: str = "", phase: str = "", module: str = "", of: Tensor | None = None) -> None:
        """Write down the memory of a tensor, unless it is known; `of` is what it copies in another dtype."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live:
            self._begin(storage, Piece(0, 0, phase, module, kind, None if of is None else self.piece_of(of)))
            weakref.finalize(storage, self._give_back, storage._cdata)

    def renew(self, tensor: Tensor, kind: str, phase: str, module: str) -> None:
        """Write down that from now on memory is used for something else."""
        self._live[tensor.untyped_storage()._cdata].died = len(self.timeline.operations)
        self._begin(tensor.untyped_storage(), Piece(0, 0, phase, module, kind))

    def piece_of(self, tensor: Tensor) -> Piece | None:
        """Return the piece that is a tensor's memory now."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Say what was there before and is no memory of the device."""
        for tensor in tensors:
            self._live[tensor.untyped_storage()._cdata].size = 0

    def mark(self, tensors: Sequence[Tensor], kind: str) -> None:
        """Say what memory is for that was taken before."""
        for tensor in tensors:
            piece = self.piece_of(tensor)
            if piece is not None and not piece.kind:
                piece.kind = kind

    def _begin(self, storage: UntypedStorage, piece: Piece) -> None:
        piece.size, piece.born = storage.nbytes(), len(self.timeline.operations)
        self._live[storage._cdata] = piece
        self.timeline.pieces.append(piece)

    def _give_back(self, key: int) -> None:
        piece = self._live.pop(key, None)
        if piece is not None:
            piece.died = len(self.timeline.operations)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes a `Ledger` of what runs inside of it.

    Args:
        known: kind -> tensors that are there before.
        module: whose parts are named.
        scratch: ``(name, args) -> bytes`` that a kernel takes for itself.
    """

    def __init__(
        self, known: Mapping[str, Sequence[Tensor]], module: nn.Module | None, scratch: Scratch = lambda name, args: 0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger, self.running, self._scratch = Ledger(), Running(module), scratch
        for kind, tensors in known.items():
            for tensor in tensors:
                self.ledger.take(tensor, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and write down what it takes."""
        kwargs = kwargs or {}
        name, phase = func.overloadpacket.__name__, phase_now()
        # They write in place and return nothing; those that torch has no fake of, it would run on memory of their size.
        returned = None if name.startswith("_fused_") and name.endswith("_") else func(*args, **kwargs)
        for leaf in tree.leaves(returned):
            if isinstance(leaf, Tensor):
                of = args[0] if name == "_to_copy" else None
                self.ledger.take(leaf, phase=phase, module=self.running.name, of=of)
        if not is_view(func):
            self.ledger.timeline.brief(self._scratch(name, args), phase, self.running.name)
            count = flops(func, name, args, kwargs, returned)
            self.ledger.timeline.operations.append(Operation(group_of(name), phase, count))
        return returned


def phase_now() -> str:
    """Return the phase of the step in which the calling thread is."""
    # The engine has a task while it computes gradients, what is rematerialised for them included.
    if torch._C._current_graph_task_id() >= 0:
        return BACKWARD
    return FORWARD if torch.is_grad_enabled() else UPDATE
