"""Frozen parameters in the checkpoints of a run: written once, in a file that later checkpoints share by a hard link.

No step changes them. Without this, every checkpoint of a fine-tuned model would hold the bytes of its base again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ftrain._torch import version_of
from ftrain.checkpoint import files
from ftrain.checkpoint.layout import is_dense
from ftrain.checkpoint.manifest import Manifest
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.saving import LocalTree, Written

WORD = 8
"""Bytes that are added up at a time."""


class FrozenFiles:
    """The files of frozen parameters in the newest checkpoint of a run, and what these parameters were in memory."""

    def __init__(self) -> None:
        self._written: Written | None = None
        self._fingerprints: list[Any] = []
        self._new_fingerprints: list[Any] = []

    def without_written(self, tree: LocalTree, ranks: Ranks) -> LocalTree:
        """Return the tree without what these files have; all of it if a frozen parameter has changed on any rank."""
        if not tree.frozen:
            return tree
        self._new_fingerprints = _fingerprints(tree)

        def can_share() -> bool:
            is_unchanged = self._new_fingerprints == self._fingerprints
            return is_unchanged and (not ranks.is_first or self._are_there())

        if not all(ranks.together(can_share)):
            return tree
        local = {number: tensor for number, tensor in tree.locals.items() if number not in tree.frozen}
        return dataclasses.replace(tree, locals=local, written=self._written or Written(Path(), (), {}))

    def _are_there(self) -> bool:
        written = self._written
        return written is not None and all(files.can_link(written.directory / file) for file in written.files)

    def remember(self, tree: LocalTree, path: Path, manifest: Manifest | None) -> None:
        """Record that a tree was written as the checkpoint `path`; only the first rank has its manifest."""
        self._fingerprints = self._new_fingerprints
        if manifest is not None:
            frozen = {number: manifest.tensors[number] for number in tree.frozen}
            digests = {number: entry.sha256 for number, entry in frozen.items()}
            self._written = Written(path, {entry.file for entry in frozen.values()}, digests)


def _fingerprints(tree: LocalTree) -> list[Any]:
    """Return what tells whether the frozen parameters of this rank are those of an earlier call; waits for the device.

    The sums find what the counts of writes do not have: those through ``.data`` or NumPy.
    """
    numbers = sorted(tree.frozen & tree.locals.keys())
    leaves, tensors = [tree.flat.leaves[number] for number in numbers], [tree.locals[number] for number in numbers]
    return [
        (leaf.path, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr(), _writes(tensor), _sum(tensor))
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]


def _writes(tensor: Tensor) -> int | None:
    """Return how often a tensor was written in place; None for an inference tensor, which has no count."""
    return None if tensor.is_inference() else version_of(tensor)


def _sum(tensor: Tensor) -> int:
    """Return the sum of the memory of a tensor, taken for 64-bit integers, wrapped around; waits for the device."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dense = tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()
    octets = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    if octets.storage_offset() % WORD:
        octets = octets.clone()
    whole = octets.numel() // WORD * WORD
    return int(octets[:whole].view(torch.int64).sum() + octets[whole:].sum())
