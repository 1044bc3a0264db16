"""How many ranks make a step together, and when they combine their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from ftrain.step.wrapper import OnGrad, Wrapper


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
