"""Skip steps whose loss or gradient is not finite, and stop when that goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain import tree
from ftrain.checks import require_positive
from ftrain.errors import NonFiniteError
from ftrain.types import PyTree
from ftrain.wrapper import Wrapper, wrapper

NAME = "skip_nonfinite"


@wrapper
def skip_nonfinite(limit: int = 10) -> Wrapper:
    """Leave the state as it was when the loss or a gradient is infinite or NaN.

    A bad step changes only the step count and this wrapper's counters `skipped` and `in_a_row`, wherever
    among the wrappers this one stands; float16 overflows count as well. The metric `skipped` says which
    steps were bad.

    Args:
        limit: as many bad steps in a row are an error, which `fit` raises when it next reads metrics; in
            a loop of your own, `step.check(state)` raises it.

    Raises:
        OptionError: when `limit` is not a positive whole number.
        NonFiniteError: from `Step.check`, after `limit` bad steps in a row.
    """
    require_positive("skip_nonfinite", "limit", limit)

    def slot(params: PyTree) -> PyTree:
        zero = torch.zeros((), dtype=torch.int64, device=tree.device_of(params))
        return {"skipped": zero, "in_a_row": zero.clone()}

    def account(counters: PyTree, finite: Tensor) -> PyTree:
        bad = (~finite).to(torch.int64)
        return {"skipped": counters["skipped"] + bad, "in_a_row": (counters["in_a_row"] + 1) * bad}

    def check(counters: PyTree, seen: int) -> None:
        in_a_row = max(int(counters["in_a_row"]), seen)
        if in_a_row >= limit:
            raise NonFiniteError(
                f"skip_nonfinite: the loss or a gradient was not finite in {in_a_row} steps in a row (limit {limit}, "
                f"{int(counters['skipped'])} in all); the parameters are those of the last good step. Lower the "
                "learning rate, clip the gradient, or look at the batch"
            )

    return Wrapper(NAME, f"skip_nonfinite({limit})", "update", slot=slot, account=account, check=check)
