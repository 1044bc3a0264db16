"""Check that all ranks run the same blocks, and that one of them uses each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ftrain import _torch, tree
from ftrain.errors import LossError
from ftrain.parallel.mesh import Group
from ftrain.step.rank_backward import UnusedOnRank, recording_unused, unused_on_rank
from ftrain.step.value_and_grad import refuse_unused
from ftrain.types import PyTree, TrainState


class SameProgram:
    """Compares what the ranks run in the first step only, because it takes time."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._first_step: int | None = None

    @contextmanager
    def required(self, state: TrainState) -> Iterator[None]:
        """Context of a gradient of this rank; in the first step it waits for the device at its end.

        Each gradient of that step is checked: a rank that computes them again, for want of memory in the second one,
        needs the same collectives. What is captured as a graph is the same on all ranks, and is checked without them.
        Raises a LossError on every rank for parameters that no rank uses, unless that is allowed.
        """
        if self._ranks.size == 1:
            yield
            return
        params, leaf = state.params, tree.leaves(state.params)[0]
        is_captured = _torch.is_capturing() or _torch.is_fake(leaf)
        # A step that is captured has no number, or one without a value.
        number = -1 if is_captured or state.step is None else int(state.step)
        is_first = not is_captured and self._first_step in (None, number)
        with recording_unused(tree.leaf_names(params), is_first) as unused:
            yield
        if is_captured:
            _require_used(unused, params, [sorted(each) for each in unused.calls])
        elif is_first:
            _require_used(unused, params, _unused_by_all(self._ranks, unused, leaf.device))
            self._first_step = number


def _unused_by_all(ranks: Group, unused: UnusedOnRank, device: torch.device) -> list[list[int]]:
    """Return for each backward pass the numbers of the parameters that no rank has used; waits for all ranks."""
    flags = torch.zeros(len(unused.calls), len(unused.names), dtype=torch.int32, device=device)
    for flag, indices in zip(flags, unused.calls, strict=True):
        flag[sorted(indices)] = 1
    counts: list[list[int]] = ranks.sum(flags).tolist()
    return [[index for index, count in enumerate(row) if count == ranks.size] for row in counts]


def _require_used(unused: UnusedOnRank, params: PyTree, calls: list[list[int]]) -> None:
    indices = next(filter(None, calls), None)
    if indices and not unused.is_allowed:
        refuse_unused(unused.loss, params, indices)


def require_same_block(ranks: Group, blocks: Sequence[str], number: int, device: torch.device) -> None:
    """Check that ranks run the same block next, if they compare what they run; waits for the device then.

    After the last block, `number` is the number of blocks. Raises a LossError on every rank if they differ.
    """
    unused = unused_on_rank()
    if unused is None or not unused.is_first:
        return
    last, minus_first = ranks.max(torch.tensor([number, -number], device=device)).tolist()
    if last != -minus_first:
        names = [*blocks, "none"]
        raise LossError(
            f"sharded: the next block that ranks run is {names[-minus_first]} on some and {names[last]} on others. "
            "Level 3 gathers a block on all ranks at once, so all must run the same blocks in one order, whatever "
            "their examples are: run a block everywhere, with a factor of 0 where it is not wanted, or use level=2"
        )
