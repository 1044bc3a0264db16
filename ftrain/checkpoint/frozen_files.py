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
"""Number of bytes of the integers whose sum is part of a fingerprint."""


class FrozenFiles:
    """The files of frozen parameters in the newest checkpoint of a run, and fingerprints of these parameters."""

    def __init__(self) -> None:
        self._written: Written | None = None
        self._fingerprints: list[Any] = []
        self._new_fingerprints: list[Any] = []

    def without_written(self, tree: LocalTree, ranks: Ranks) -> LocalTree:
        """Return the tree without the tensors that these files hold; the whole tree if one has changed on any rank."""
        if not tree.frozen:
            return tree
        self._new_fingerprints = _fingerprints(tree)

        def can_share() -> bool:
            is_unchanged = self._new_fingerprints == self._fingerprints
            return is_unchanged and (not ranks.is_first or self._can_link())

        if not all(ranks.gather(can_share)):
            return tree
        to_write = {number: tensor for number, tensor in tree.locals.items() if number not in tree.frozen}
        # Only the first rank links the files. On the others an empty `Written` says that they exist.
        return dataclasses.replace(tree, locals=to_write, written=self._written or Written(Path(), (), {}))

    def _can_link(self) -> bool:
        written = self._written
        return written is not None and all(files.can_link(written.directory / file) for file in written.files)

    def record(self, tree: LocalTree, path: Path, manifest: Manifest | None) -> None:
        """Record that a tree was written as the checkpoint `path`; `manifest` is None except on the first rank."""
        self._fingerprints = self._new_fingerprints
        if manifest is not None:
            frozen = {number: manifest.tensors[number] for number in tree.frozen}
            digests = {number: entry.sha256 for number, entry in frozen.items()}
            self._written = Written(path, {entry.file for entry in frozen.values()}, digests)


def _fingerprints(tree: LocalTree) -> list[Any]:
    """Return fingerprints of the frozen parameters of this rank, equal if these did not change; waits for the device.

    The sum of the bytes detects writes that torch does not count, through ``.data`` or NumPy.
    """
    fingerprints = []
    for number in sorted(tree.frozen & tree.locals.keys()):
        path, tensor = tree.flat.leaves[number].path, tree.locals[number]
        layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()
        fingerprints.append((path, layout, _version(tensor), _sum(tensor)))
    return fingerprints


def _version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written in place; None for an inference tensor, which has no count."""
    return None if tensor.is_inference() else version_of(tensor)


def _sum(tensor: Tensor) -> int:
    """Return the sum of the bytes of a tensor as 64-bit integers, modulo 2**64; waits for the device."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    dense = tensor if is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()
    data = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    if data.storage_offset() % WORD:
        # `view(torch.int64)` needs an aligned start.
        data = data.clone()
    end = data.numel() // WORD * WORD
    return int(data[:end].view(torch.int64).sum() + data[end:].sum())
