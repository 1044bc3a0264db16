"""How many ranks make a step together, when they combine their gradients, and how they share an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from ftrain import tree
from ftrain._torch import dtensor
from ftrain.backends.transfers import copier_of
from ftrain.errors import BatchError, RankError
from ftrain.step.all_ranks import require_all_ranks
from ftrain.step.microbatch import split_batch
from ftrain.step.wrapper import OnGrad, Wrapper
from ftrain.types import Loss, LossRanks, Mean, PyTree, TrainState, replace

DIFFERENT_BATCHES = (
    "the ranks have different batches; each takes its rows of one batch that all have, so read the same data on every "
    "rank, without a sampler that divides it (DistributedSampler)"
)


def order(parts: Sequence[OnGrad]) -> list[OnGrad]:
    """Put what combines the gradients of ranks behind the leading parts that take a batch in pieces."""
    within = [part for part in parts if not part.across_ranks]
    count = next((index for index, part in enumerate(within) if part.microbatches is None), len(within))
    return [*within[:count], *(part for part in parts if part.across_ranks), *within[count:]]


def ranks_of(wrappers: Sequence[Wrapper]) -> int:
    """Return how many ranks make a step with these wrappers together."""
    return max((wrapper.step.ranks for wrapper in wrappers if wrapper.step), default=1)


def combines_ranks(wrappers: Sequence[Wrapper]) -> bool:
    """Return whether a step with these wrappers computes on the rows of a rank."""
    return any(wrapper.grad is not None and wrapper.grad.across_ranks for wrapper in wrappers)


def whole_model(state: TrainState, function: str) -> TrainState:
    """Return a state whose parameters and buffers are whole, gathered where they are divided over ranks.

    Then every rank must call `function`, which is named in the error where one does not.

    Raises:
        RankError: when another rank does not come.
    """
    parts = state.params, state.frozen, state.buffers
    if not any(dtensor.is_dtensor(leaf) for leaf in tree.leaves(parts)):
        return state
    require_to_gather(function, parts)
    params, frozen, buffers = tree.map(dtensor.whole, parts)
    return replace(state, params=params, frozen=frozen, buffers=buffers)


def place_model(
    loss: Loss, state: TrainState, function: str, *, by_block: bool = True
) -> tuple[TrainState, AbstractContextManager[None] | None]:
    """Return the state that a loss takes in an evaluation, and the context in which it gathers what it needs of it.

    Args:
        loss: to evaluate.
        state: divided over ranks, or not; then every rank must call `function`.
        function: named in the error where a rank does not.
        by_block: let the loss gather the parameters block by block, if it can. Then all ranks must evaluate together:
            each as many batches as the others.

    Returns:
        a whole model and None; or the parts of this rank, and a context.

    Raises:
        RankError: when another rank does not come.
    """
    ranks = loss.ranks
    if not by_block or ranks is None or ranks.by_block is None:
        return whole_model(state, function), None
    if not any(map(dtensor.is_dtensor, tree.leaves(state.params))):
        return whole_model(state, function), None
    require_to_gather(function, state.params)
    return ranks.by_block(state)


def require_to_gather(function: str, tensors: PyTree) -> None:
    """Wait until all ranks have called a function, if it gathers tensors that are divided over them.

    Raises:
        RankError: when another rank does not come.
    """
    if any(map(dtensor.is_divided, tree.leaves(tensors))):
        require_all_ranks(function)


def start_count(ranks: LossRanks, flags: Sequence[bool], device: torch.device) -> Callable[[], list[int]]:
    """Start to count for each flag on how many ranks it is set; return a function that waits for the counts.

    It does not wait for what the device is given to do after this call.
    """
    counts = ranks.sum(torch.tensor(flags, dtype=torch.int64, device=device))
    copier, on_host = copier_of(device), torch.empty_like(counts, device=tree.HOST, pin_memory=device != tree.HOST)
    copier.out(counts, on_host)

    def read() -> list[int]:
        copier.wait()
        return [int(each) for each in on_host]

    return read


class Share(NamedTuple):
    """The examples of a batch that one rank evaluates, and whether they count."""

    batch: PyTree
    counts: bool


def share_of(batch: PyTree, ranks: LossRanks) -> Share:
    """Return what one rank evaluates of a batch: examples that do not count, where there are fewer than ranks.

    A batch that cannot be cut counts on the first rank.
    """
    pieces = split_batch(batch, ranks.size)
    return Share(pieces[ranks.rank], True) if ranks.rank < len(pieces) else Share(pieces[0], False)


def sum_means(means: dict[str, Mean], ranks: LossRanks) -> dict[str, Mean]:
    """Return the sums over ranks of averages that each rank has of its examples; all of them travel together."""
    if not means:
        return means
    tensors = [tensor for mean in means.values() for tensor in (mean.total, mean.weight)]
    flat = ranks.sum(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = zip(flat.split_with_sizes([tensor.numel() for tensor in tensors]), tensors, strict=True)
    sums = iter([part.view(tensor.shape) for part, tensor in parts])
    return {name: Mean(next(sums), next(sums)) for name in means}


def require_same_outcome(ranks: LossRanks, error: Exception | None, digest: int, device: torch.device) -> None:
    """Check that no rank has failed in an evaluation, and that all have read the same first batch; waits for them.

    Args:
        ranks: that evaluate together.
        error: that of this rank.
        digest: of the first batch.
        device: on which the ranks communicate.

    Raises:
        Exception: the error of this rank.
        RankError: when another one has failed.
        BatchError: on every rank, when their first batches differ.
    """
    outcomes = torch.zeros(ranks.size, 2, dtype=torch.int64, device=device)
    outcomes[ranks.rank, 0] = error is not None
    outcomes[ranks.rank, 1] = digest
    outcomes = ranks.sum(outcomes).to(tree.HOST)
    if error is not None:
        raise error
    for rank, (failed, _) in enumerate(outcomes):
        if failed:
            raise RankError(f"evaluate: rank {rank} failed, and so all ranks stop; it says why")
    if (outcomes[:, 1] != outcomes[0, 1]).any():
        raise BatchError(f"evaluate: {DIFFERENT_BATCHES}")
