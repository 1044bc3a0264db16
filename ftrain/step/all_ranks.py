"""Wait until every rank has called a function that exchanges tensors, before any of them does.

A rank that calls it alone would exchange with a step of the others: it would hang, or get the tensors of that step.
"""

from __future__ import annotations

from ftrain._torch import store
from ftrain.checkpoint.heartbeats import wait_for_ranks
from ftrain.errors import RankError


def require_all_ranks(name: str) -> None:
    """Wait until all ranks have called the function `name`; nothing travels but a few numbers in torch's store.

    Ranks that are threads of one process, as in tests, do not wait.

    Args:
        name: of the function, as users write it.

    Raises:
        RankError: when a rank has gone on without it, has failed or ended, or does not come before the timeout of the
            process group.
    """
    rank, size = store.rank_and_size()
    if size == 1 or not store.are_processes():
        return
    table = store.store()
    number = table.add(_calls(rank), 1)
    meeting = f"ftrain/meeting/{number}"
    table.add(meeting, 1)

    def absent() -> list[int]:
        return [other for other in range(size) if table.add(_calls(other), 0) < number]

    gave_up = wait_for_ranks(table, (rank, size), lambda: bool(table.add(meeting, 0) >= size), absent, in_order=True)
    if gave_up:
        why = gave_up.why or f"rank {absent()[0]} did not within {gave_up.waited:.0f} seconds"
        raise RankError(
            f"{name}: rank {rank} has called it, and {why}. The ranks exchange tensors in it, so every rank must call "
            "it; then one alone may write or print what it returns"
        )
    if rank == 0:  # All have seen the end of the meeting before.
        table.delete_key(f"ftrain/meeting/{number - 1}")


def _calls(rank: int) -> str:
    return f"ftrain/meetings/{rank}"
