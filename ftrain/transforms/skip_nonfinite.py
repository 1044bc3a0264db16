"""Skip steps whose loss or gradient is not finite; too many in a row are an error."""

from __future__ import annotations

import torch
from torch import Tensor

from ftrain import tree
from ftrain.errors import NonFiniteError, require_positive
from ftrain.step.wrapper import SlotSpec, Wrapper, wrapper
from ftrain.types import PyTree

NAME = "skip_nonfinite"
COUNTERS = "skipped", "in_a_row", "steps", "reached"


@wrapper
def skip_nonfinite(limit: int = 10) -> Wrapper:
    """Leave the state unchanged when the loss or a gradient is infinite or NaN.

    A bad step changes only the step count and this wrapper's counters, which are on the device: `skipped` (all bad
    steps), `in_a_row` (bad steps since the last good one), `steps`, and `reached` (the step at which `in_a_row` last
    equalled the limit). Its position among the wrappers makes no difference; float16 overflows count as bad steps. The
    metric `skipped` says which steps were bad.

    Args:
        limit: the number of bad steps in a row that is an error, even if good steps have followed. `fit` raises it when
            it next reads metrics; in your own loop call `step.check(state)`.

    Raises:
        OptionError: when `limit` is not a positive whole number.
        NonFiniteError: from `Step.check`, after `limit` bad steps in a row; it names the first of them.
    """
    require_positive(NAME, "limit", limit)

    def init(params: PyTree) -> PyTree:
        device = tree.device_of(params)
        return {name: torch.zeros((), dtype=torch.int64, device=device) for name in COUNTERS}

    def on_finite_check(counters: PyTree, finite: Tensor) -> PyTree:
        bad = (~finite).to(torch.int64)
        in_a_row = (counters["in_a_row"] + 1) * bad
        steps = counters["steps"] + 1
        reached = torch.where(in_a_row == limit, steps, counters["reached"])
        return {"skipped": counters["skipped"] + bad, "in_a_row": in_a_row, "steps": steps, "reached": reached}

    def check(counters: PyTree, step: int, since: int) -> None:
        values = {name: int(counter) for name, counter in counters.items()}
        if values["reached"] == 0:
            return
        # The state may have made steps before this wrapper was added, which `steps` does not count.
        reached_at = values["reached"] + step - values["steps"]
        if reached_at > since:
            raise NonFiniteError(
                f"skip_nonfinite: the loss or a gradient was not finite in {max(limit, values['in_a_row'])} steps in a "
                f"row, of which step {reached_at - limit + 1} was the first (limit {limit}, {values['skipped']} in "
                "all); the parameters are those of the last good step. Lower the learning rate, clip the gradient, or "
                "look at the batch"
            )

    return Wrapper(NAME, f"skip_nonfinite({limit})", slot=SlotSpec(init, on_finite_check, check))
