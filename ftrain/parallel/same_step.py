"""Check that all ranks make the same step: of one model, on one batch."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftrain import _torch, random, tree
from ftrain._torch.dtensor import is_dtensor
from ftrain.checkpoint.layout import as_bytes
from ftrain.errors import BatchError, StructureError, warn
from ftrain.parallel.mesh import Group
from ftrain.step.across_ranks import DIFFERENT_BATCHES
from ftrain.types import PyTree, TrainState

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The part of the text of a function that differs between processes."""

UNEVEN = "with batches='rows' the batches of all ranks and steps need the same number of examples"


class SameInputs:
    """Compares the step and its inputs on all ranks in the first step only, because it takes time."""

    def __init__(self, ranks: Group, *, whole_batches: bool) -> None:
        self._ranks, self._whole_batches = ranks, whole_batches
        self._length: int | None = None
        self._is_checked = ranks.size == 1

    def require(self, step: Any, state: TrainState, batch: PyTree) -> None:
        """Check the first step and its inputs, for which it waits for the device. Later steps are not checked.

        Steps are compared as they print, with options that are numbers or strings, and the version of torch. States
        are compared by names, shapes and the number of the step, and batches by every value. With ``batches="rows"``
        only the length of the batch is compared, in every step, and a warning says which ranks have the same rows.

        Raises:
            StructureError: on every rank, when steps or the structures of states differ.
            BatchError: on every rank, when the batches differ; on this rank, for another length than in the first step.
        """
        if not self._whole_batches:
            self._require_length(tree.batch_length(batch))
        if self._is_checked or any(_torch.is_fake(leaf) for leaf in tree.leaves(batch)):
            return
        device = tree.device_of(state.params)
        difference = first_difference(self._ranks, [*_description(step), *_structure(state)], device)
        if difference is not None:
            raise StructureError(
                f"sharded: the ranks make different steps: {difference}; every rank must build the same model, "
                "optimizer and wrappers, and make its state with the same seed"
            )
        text = f"digest {digest(batch)}" if self._whole_batches else f"{self._length} examples"
        difference = first_difference(self._ranks, [f"a batch of {text}"], device)
        if difference is not None:
            problem = f"{DIFFERENT_BATCHES}, or pass sharded(batches='rows')" if self._whole_batches else UNEVEN
            raise BatchError(f"sharded: {problem}: {difference}")
        if self._length:
            _warn_of_same_rows(self._ranks, digest(batch), device)
        self._is_checked = True

    def _require_length(self, count: int | None) -> None:
        self._length = self._length or count
        if self._length != count:
            raise BatchError(
                f"sharded: {UNEVEN}; the first batch had {self._length} examples, and this one has {count}: leave out "
                "the last, smaller batch of a pass (drop_last=True); where batches have as many examples as fit "
                "(max_tokens=), let every rank read whole ones, with batches='whole' and a loader without rank="
            )


def require_same_tensors(ranks: Group, parts: Mapping[str, PyTree], device: torch.device) -> None:
    """Check that ranks begin with the same names, shapes and dtypes; waits for them. Raises a StructureError if not."""
    lines = [
        f"{tree.path(name, leaf_name)}: {tree.describe(leaf)}{', a DTensor' if is_dtensor(leaf) else ''}"
        for name, part in parts.items()
        for leaf_name, leaf in zip(tree.leaf_names(part), tree.leaves(part), strict=True)
        if tree.is_tensor(leaf)
    ]
    difference = first_difference(ranks, lines, device)
    if difference is not None:
        raise StructureError(
            f"sharded: the ranks begin with different tensors: {difference}; every rank must build the same model, in "
            "the same dtype"
        )


def digest(batch: PyTree) -> int:
    """Return a hash of the structure and the values of a batch; waits for the values."""
    structure = repr(tree.signature(batch)).encode()
    return _digest(structure + b"".join(_bytes(leaf) for leaf in tree.leaves(batch)))


def _digest(content: bytes) -> int:
    """Return a hash of 7 bytes: an int64 holds it and its negative."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


def _description(step: Any) -> list[str]:
    """Return the texts that must be equal on all ranks: a step as it prints, and options; no addresses, directories."""
    text = without_places(repr(step), step.wrappers)
    return [*text.splitlines(), *option_texts(step, step.wrappers), f"torch {torch.__version__}"]


def without_places(text: str, wrappers: Iterable[Any]) -> str:
    """Return the text of a step, or of a part of it, without addresses and the directories of wrappers."""
    for wrapper in wrappers:
        directory = (wrapper.options or {}).get("directory")
        text = text if directory is None else text.replace(str(directory), "a directory")
    return ADDRESS.sub("", text)


def option_texts(step: Any, wrappers: Iterable[Any]) -> list[str]:
    """Return a text for each option of the optimizer and of wrappers, also of those that do not print.

    Directories, and options that are not numbers or strings, are left out.
    """
    options = {step.optimizer.name or "the optimizer": step.optimizer.options}
    options.update((wrapper.name, wrapper.options or {}) for wrapper in wrappers)
    return [
        f"{name} with {option}={ADDRESS.sub('', repr(value))}"
        for name, of_name in options.items()
        for option, value in of_name.items()
        if option != "directory" and isinstance(value, int | float | str | tuple)
    ]


def _warn_of_same_rows(ranks: Group, number: int, device: torch.device) -> None:
    """Warn on rank 0 if ranks that should read different rows have read the same; waits for the device."""
    numbers = torch.zeros(ranks.size, dtype=torch.int64, device=device)
    numbers[ranks.rank] = number
    digests = ranks.sum(numbers).tolist()
    rank = next((rank for rank, other in enumerate(digests) if other in digests[:rank]), None)
    if rank is not None and ranks.rank == 0:
        warn(
            f"sharded: ranks {digests.index(digests[rank])} and {rank} have read the same first batch; with "
            "batches='rows' each must read its own part, or examples count several times: "
            "ft.data.loader(..., rank=mesh.get_rank(), num_ranks=mesh.size()), or a DistributedSampler"
        )


def _structure(state: TrainState) -> list[str]:
    signature = tree.signature((state.params, state.opt_state, state.slots))
    return [
        f"a state of step {int(state.step)}",
        f"the random key {random.key_data(state.rng)} in its state",
        *(f"a leaf of the state, {name}: {text}" for name, text in signature.items()),
    ]


def first_difference(ranks: Group, lines: list[str], device: torch.device) -> str | None:
    """Return a text of the first line that differs between rank 0 and another rank; None if all lines are equal.

    It waits for all ranks.
    """
    number = _digest("\n".join(lines).encode())
    largest, minus_smallest = ranks.max(torch.tensor([number, -number], device=device)).tolist()
    if largest == -minus_smallest:
        return None
    lines_of_ranks: list[Any] = [None] * ranks.size
    dist.all_gather_object(lines_of_ranks, lines)
    expected = lines_of_ranks[0]
    rank = next(rank for rank in range(ranks.size) if lines_of_ranks[rank] != expected)
    pairs = itertools.zip_longest(expected, lines_of_ranks[rank], fillvalue="nothing")
    first, second = next((first, second) for first, second in pairs if first != second)
    return f"rank 0 has {first}, and rank {rank} has {second}"


def _bytes(leaf: object) -> bytes:
    """Return the bytes of a tensor, for which this waits; the `repr` of another leaf."""
    if not isinstance(leaf, Tensor):
        # The text of other objects may hold an address.
        return repr(leaf).encode() if isinstance(leaf, str | bytes | int | float) else b""
    return as_bytes(leaf.detach().to(tree.HOST).contiguous()).tobytes()
