"""Check that all ranks make the same step: of one model, on one batch."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import BatchError, StructureError
from ftrain.parallel.mesh import Group
from ftrain.step.across_ranks import DIFFERENT_BATCHES
from ftrain.types import PyTree, TrainState

UNEVEN = "with batches='rows' the batches of all ranks and steps need the same number of examples"


class SameInputs:
    """Compares the inputs of the first step on all ranks; later ones are not compared, which takes time."""

    def __init__(self, ranks: Group, *, whole_batches: bool) -> None:
        self._ranks, self._whole_batches = ranks, whole_batches
        self._length: int | None = None
        self._is_checked = ranks.size == 1

    def require(self, state: TrainState, batch: PyTree) -> None:
        """Check the inputs of a step, if it is the first; waits for the device then.

        Args:
            state: with DTensors or whole tensors as leaves; names and shapes are compared.
            batch: of which every value is compared; of the rows of a rank only how many they are.

        Raises:
            StructureError: on every rank, when the states have different structures.
            BatchError: on every rank, when the batches differ. With the rows of each rank, also when their number is
                not that of the first step: on this rank alone, if other ranks have as many as before.
        """
        if not self._whole_batches:
            self._require_length(tree.batch_length(batch))
        if self._is_checked or any(_torch.is_fake(leaf) for leaf in tree.leaves(batch)):
            return
        device = tree.device_of(state.params)
        structure = repr(tree.signature((state.params, state.opt_state, state.slots)))
        if not _agree(self._ranks, _digest(structure.encode()), device):
            raise StructureError(
                "sharded: the ranks have states of different structures; every rank must build the same model, "
                "optimizer and wrappers"
            )
        if self._whole_batches and not _agree(self._ranks, digest(batch), device):
            raise BatchError(f"sharded: {DIFFERENT_BATCHES}, or pass sharded(batches='rows')")
        count = tree.batch_length(batch)
        if not self._whole_batches and not _agree(self._ranks, _digest(repr(count).encode()), device):
            raise BatchError(f"sharded: {UNEVEN}; this one has {count} examples, and another has more or fewer")
        self._is_checked = True

    def _require_length(self, count: int | None) -> None:
        self._length = self._length or count
        if self._length != count:
            raise BatchError(
                f"sharded: {UNEVEN}; the first batch had {self._length} examples, and this one has {count}: leave out "
                "the last, smaller batch of a pass (drop_last=True)"
            )


def digest(batch: PyTree) -> int:
    """Return a number that tells batches apart by their structures and values, for which this waits."""
    return _digest(repr(tree.signature(batch)).encode() + b"".join(map(_bytes, tree.leaves(batch))))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


def _agree(ranks: Group, number: int, device: torch.device) -> bool:
    """Return whether all ranks have the same number; waits for them."""
    largest = ranks.max(torch.tensor([number, -number], device=device)).tolist()
    return bool(largest[0] == -largest[1])


def _bytes(leaf: object) -> bytes:
    """Return the memory of a tensor, for which this waits; of another leaf its `repr`."""
    if not isinstance(leaf, Tensor):
        # Of other objects the text may hold an address.
        return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float) else b""
    flat = leaf.detach().to(tree.HOST).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
