"""Steps and evaluations that ranks compute together: order of wrappers, gathering, shares of a batch, and sums."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ftrain import random, tree
from ftrain._torch import dtensor, store
from ftrain.backends.transfers import copier_of
from ftrain.checkpoint.heartbeats import wait_for_ranks
from ftrain.errors import BatchError, RankError
from ftrain.step.microbatch import ExampleLists, example_lists, split_batch
from ftrain.step.wrapper import OnGrad, Wrapper
from ftrain.types import Loss, LossRanks, Mean, PyTree, TrainState, replace

Name = TypeVar("Name", str, tuple[int, str])

DIFFERENT_BATCHES = (
    "the ranks have different batches; each takes its rows of one batch that all have, so read the same data on every "
    "rank, without a sampler that divides it (DistributedSampler)"
)
"""The reason and the remedy in an error."""

NAME_UNIT = 1 << 24
"""`why_not_together` adds up, in one integer, the ranks that have arrived and the hashes of the names that they passed.

The hashes count in this unit. The remainder is the number of ranks, which must be smaller.
"""


def order(parts: Sequence[OnGrad]) -> list[OnGrad]:
    """Move the wrapper that combines the gradients of ranks after the leading wrappers that split the batch."""
    within = [part for part in parts if not part.across_ranks]
    count = next((index for index, part in enumerate(within) if part.microbatches is None), len(within))
    return [*within[:count], *(part for part in parts if part.across_ranks), *within[count:]]


def ranks_of(wrappers: Sequence[Wrapper]) -> int:
    """Return the number of ranks that compute a step with these wrappers together."""
    return max((wrapper.step.ranks for wrapper in wrappers if wrapper.step), default=1)


def combines_ranks(wrappers: Sequence[Wrapper]) -> bool:
    """Return whether a step with these wrappers combines the gradients of ranks."""
    return any(wrapper.grad is not None and wrapper.grad.across_ranks for wrapper in wrappers)


def evaluation_state(
    loss: Loss, state: TrainState, function: str, *, by_block: bool = True
) -> tuple[TrainState, AbstractContextManager[None] | None]:
    """Return the state that a loss takes in an evaluation, and the context in which it gathers its parameters.

    By default it returns the gathered state and None. With `by_block`, if the loss can gather its parameters block by
    block, it returns the local state of this rank and a context; all ranks must then evaluate the same number of
    batches together. Raises a RankError if another rank does not call `function`.
    """
    parts = state.params, state.frozen, state.buffers
    if not any(map(dtensor.is_dtensor, tree.leaves(parts))):
        return state, None
    require_to_gather(function, parts)
    gather_blocks = loss.ranks.by_block if loss.ranks is not None and by_block else None
    if gather_blocks is not None and any(map(dtensor.is_dtensor, tree.leaves(state.params))):
        return gather_blocks(state)
    params, frozen, buffers = tree.map(dtensor.whole, parts)
    return replace(state, params=params, frozen=frozen, buffers=buffers), None


def require_to_gather(function: str, tensors: PyTree) -> None:
    """Call `require_all_ranks` for a function that gathers `tensors`, if one of them is divided over the ranks."""
    if any(map(dtensor.is_divided, tree.leaves(tensors))):
        require_all_ranks(function)


def start_count(ranks: LossRanks, flags: Sequence[bool], device: torch.device) -> Callable[[], list[int]]:
    """Start to count for each flag on how many ranks it is set; return a function that waits for the counts.

    The function does not wait for work that the device gets after this call.
    """
    # Made on the host and moved, because torch.tensor(..., device=device) waits for the device.
    counts = ranks.sum(random.to_device(torch.tensor(flags, dtype=torch.int64, device=tree.HOST), device))
    on_host = torch.empty_like(counts, device=tree.HOST, pin_memory=device != tree.HOST)
    copier = copier_of(device)
    copier.out(counts, on_host)

    def read() -> list[int]:
        copier.wait()
        return [int(count) for count in on_host]

    return read


class Share(NamedTuple):
    """The examples of a batch that one rank evaluates, and whether to count them."""

    batch: PyTree
    counts: bool
    lists: ExampleLists | None = None
    """Where its lists with a value for each example are, as the whole batch shows; None if it is a whole batch."""


def share_of(batch: PyTree, ranks: LossRanks) -> Share:
    """Return the share of one rank. With fewer examples than ranks, the last ranks get examples that do not count."""
    pieces = split_batch(batch, ranks.size)
    lists = example_lists(batch)
    return Share(pieces[ranks.rank], True, lists) if ranks.rank < len(pieces) else Share(pieces[0], False, lists)


def sum_means(means: dict[Name, Mean], ranks: LossRanks) -> dict[Name, Mean]:
    """Return the averages over the examples of all ranks, with one all-reduce. All ranks have the same names."""
    # A loss may return its metrics in another order on another rank.
    names = sorted(means)
    sums = ranks.sum(torch.stack([tensor for name in names for tensor in (means[name].total, means[name].weight)]))
    by_name = {name: Mean(*each.unbind()) for name, each in zip(names, sums.view(-1, 2), strict=True)}
    return {name: by_name[name] for name in means}


def sum_each(parts: Sequence[dict[str, Mean]], ranks: LossRanks) -> list[dict[str, Mean]]:
    """Return `sum_means` of each dict. A rank may lack names that others have. Waits for all ranks."""
    # One dict for all, so that there is one all-reduce.
    means = {(number, name): mean for number, part in enumerate(parts) for name, mean in part.items()}
    # For each rank, its names with the dtypes of total and weight.
    dtypes_of_ranks: list[Any] = [None] * ranks.size
    dtypes_of_rank = {name: (mean.total.dtype, mean.weight.dtype) for name, mean in means.items()}
    dist.all_gather_object(dtypes_of_ranks, dtypes_of_rank)
    names: dict[tuple[int, str], None] = {}
    dtypes: list[torch.dtype] = []
    for of_rank in dtypes_of_ranks:
        names |= dict.fromkeys(of_rank)
        dtypes += itertools.chain.from_iterable(of_rank.values())
    dtype = functools.reduce(torch.promote_types, dtypes)
    zero = torch.zeros_like(next(iter(means.values())).total)
    all_means = {name: tree.map(lambda leaf: leaf.to(dtype), means.get(name, Mean(zero, zero))) for name in names}
    sums: list[dict[str, Mean]] = [{} for _ in parts]
    for (number, name), mean in sum_means(all_means, ranks).items():
        sums[number][name] = mean
    return sums


def require_same_outcome(ranks: LossRanks, error: Exception | None, digest: int, device: torch.device) -> None:
    """Check that no rank failed in an evaluation, and that all have the digest of its batches. Waits for all ranks.

    Raises the error of this rank, a RankError if another one failed, or on every rank a BatchError.
    """
    outcomes = torch.zeros(ranks.size, 2, dtype=torch.int64, device=device)
    outcomes[ranks.rank, 0] = error is not None
    outcomes[ranks.rank, 1] = digest
    outcomes = ranks.sum(outcomes).to(tree.HOST)
    if error is not None:
        raise error
    for rank, (failed, _) in enumerate(outcomes):
        if failed:
            raise RankError(f"evaluate: rank {rank} failed, so all ranks stop; its own error says why")
    if (outcomes[:, 1] != outcomes[0, 1]).any():
        raise BatchError(f"evaluate: {DIFFERENT_BATCHES}")


def require_all_ranks(name: str) -> None:
    """Wait until all ranks have called the function `name`, which exchanges tensors.

    If one rank called it alone, its collectives would meet those of another function on the other ranks: it would
    hang, or get wrong tensors. Raises a RankError if another rank continued without it, called another such function
    in its place, failed, ended, or did not call it before the timeout of the process group.
    """
    if why := why_not_together(name):
        raise RankError(
            f"{name}: rank {store.rank_and_size()[0]} has called it, and {why}. The ranks exchange tensors in it, so "
            "every rank must call it; then one alone may write or print what it returns"
        )


def why_not_together(
    name: str, *, unlike: str = "another rank has called another function in its place, which its own error names"
) -> str:
    """Wait until all ranks have called this function with the same name; return "", or why another rank has not.

    `unlike` is returned if another rank has called it with another name. The ranks exchange a few numbers by torch's
    store. Ranks that are threads of one process do not wait.
    """
    rank, size = store.rank_and_size()
    if size == 1 or not store.are_processes():
        return ""
    table = store.store()
    number = table.add(_calls(rank), 1)
    meeting = f"ftrain/meeting/{number}"
    arrival = 1 + (zlib.crc32(name.encode()) & 0xFFFF) * NAME_UNIT
    table.add(meeting, arrival)

    def absent() -> list[int]:
        return [other for other in range(size) if table.add(_calls(other), 0) < number]

    def have_come() -> bool:
        return bool(table.add(meeting, 0) % NAME_UNIT >= size)

    gave_up = wait_for_ranks(table, (rank, size), have_come, absent, in_order=True)
    if gave_up:
        return gave_up.why or f"rank {absent()[0]} did not within {gave_up.waited:.0f} seconds"
    if table.add(meeting, 0) != size * arrival:
        return unlike
    if rank == 0:  # All ranks have left the previous meeting.
        table.delete_key(f"ftrain/meeting/{number - 1}")
    return ""


def _calls(rank: int) -> str:
    return f"ftrain/meetings/{rank}"
