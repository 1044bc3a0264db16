"""Check that the loss does the same on all ranks: the blocks that it runs, the parameters that it uses, its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ftrain import _torch, tree
from ftrain.errors import LossError
from ftrain.parallel.mesh import Group
from ftrain.parallel.rank_watch import Watch
from ftrain.parallel.same_step import first_difference
from ftrain.step.across_ranks import why_not_together
from ftrain.step.blocks import is_unrecorded
from ftrain.step.rank_backward import UnusedOnRank, recording_unused, unused_on_rank
from ftrain.step.value_and_grad import refuse_unused
from ftrain.types import Mean, Metrics, PyTree, TrainState

REMEDY = (
    "return the same metrics in the same form whatever the examples are, such as a Mean with a weight of 0 where there "
    "is nothing to count"
)


class SameProgram:
    """Compares the blocks and parameters that ranks use, in the first step only, because it takes time."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._first_step: int | None = None

    @contextmanager
    def required(self, state: TrainState) -> Iterator[None]:
        """Context in which this rank computes a gradient; in the first step it waits for the device at its end.

        Each gradient of the first step is checked, not only the first: a rank that runs out of memory in a later one
        computes all again, with the same collectives. A gradient that is captured as a graph is the same on all ranks,
        and is checked without them. Raises a LossError on every rank for parameters that no rank uses, unless that is
        allowed.
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
            _require_used(unused, params, [sorted(indices) for indices in unused.calls])
        elif is_first:
            _require_used(unused, params, _unused_by_all(self._ranks, unused, leaf.device))
            self._first_step = number


def _unused_by_all(ranks: Group, unused: UnusedOnRank, device: torch.device) -> list[list[int]]:
    """Return for each backward pass the indices of the parameters that no rank has used; waits for all ranks."""
    flags = torch.zeros(len(unused.calls), len(unused.names), dtype=torch.int32, device=device)
    for flag, indices in zip(flags, unused.calls, strict=True):
        flag[sorted(indices)] = 1
    counts: list[list[int]] = ranks.sum(flags).tolist()
    return [[index for index, count in enumerate(row) if count == ranks.size] for row in counts]


def _require_used(unused: UnusedOnRank, params: PyTree, calls: list[list[int]]) -> None:
    if unused.is_allowed:
        return
    for indices in calls:
        if indices:
            refuse_unused(unused.loss, params, indices)


def require_same_block(ranks: Group, blocks: Sequence[str], number: int, device: torch.device) -> None:
    """Check, in the first step, that ranks run the same block next: the block `number`. It waits for all ranks.

    After the last block, `number` is the number of blocks. Raises a LossError on every rank if they differ.
    """
    unused = unused_on_rank()
    # A run on tensors without values, which measures blocks, is the same on all ranks.
    if unused is None or not unused.is_first or is_unrecorded():
        return
    last, minus_first = ranks.max(torch.tensor([number, -number], device=device)).tolist()
    if last != -minus_first:
        names = [*blocks, "none"]
        raise LossError(
            f"sharded: the next block that ranks run is {names[-minus_first]} on some and {names[last]} on others. "
            "Level 3 gathers a block on all ranks at once, so all must run the same blocks in one order, whatever "
            "their examples are: run a block everywhere, with a factor of 0 where it is not wanted, or use level=2"
        )


class SameResults:
    """Checks that a loss returns the same names and forms on all ranks.

    In the first step the ranks compare them. In later steps each rank compares them with its last ones, without the
    other ranks; ranks wait for each other only if something has changed.
    """

    def __init__(self, ranks: Group, watch: Watch) -> None:
        self._ranks, self._watch = ranks, watch
        self._forms: dict[str, str] | None = None

    def require(self, loss: Mean, metrics: Metrics) -> None:
        """Check that names and forms, and in the first step dtypes, are the same on all ranks.

        If one rank lacked a metric, its other metrics would be added to the wrong ones, or the program of a rank would
        end. Raises a LossError: in the first step on every rank; later on each rank whose results have changed, unless
        those of all ranks have.
        """
        if _torch.is_capturing() or _torch.is_fake(loss.total):
            return
        forms = {name: _form(metric) for name, metric in metrics.items()}
        forms[""] = _form(loss)
        unused = unused_on_rank()
        if unused is not None and unused.is_first:
            self._require_same(loss, metrics)
        elif self._forms is not None and forms != self._forms:
            self._require_same_change(forms, _change(self._forms, forms))
        self._forms = forms
        self._watch.note_results()

    def _require_same(self, loss: Mean, metrics: Metrics) -> None:
        results = {"the loss": loss, **{f"the metric {name}": metrics[name] for name in sorted(metrics)}}
        lines = [f"{name}: {_form_and_dtype(result)}" for name, result in results.items()]
        difference = first_difference(self._ranks, lines, loss.total.device)
        if difference is not None:
            raise LossError(f"sharded: the loss returns other results on other ranks: {difference}; {REMEDY}")

    def _require_same_change(self, forms: dict[str, str], change: str) -> None:
        """Check that the results of all ranks have changed to these; waits for them, or until one has gone on."""
        self._watch.note_place(f"where its loss returns {change}", at_once=True)
        why = why_not_together(
            f"the results {sorted(forms.items())}", unlike="another rank returns yet others, which its own error names"
        )
        if why:
            raise LossError(f"sharded: the loss returns {change}, and not on every rank: {why}; {REMEDY}")
        self._watch.note_place("")


def _form(result: object) -> str:
    if isinstance(result, Mean):
        return "a plain number" if result.plain else "a Mean"
    return "a tensor" if isinstance(result, Tensor) else "a number"


def _form_and_dtype(result: object) -> str:
    form = _form(result)
    if isinstance(result, Mean):
        dtypes = f"{tree.dtype_name(result.total.dtype)} with a weight of {tree.dtype_name(result.weight.dtype)}"
        return f"{form}, {dtypes}"
    return f"{form}, {tree.dtype_name(result.dtype)}" if isinstance(result, Tensor) else form


def _change(old: dict[str, str], new: dict[str, str]) -> str:
    """Return a text of the first difference between the forms of the results of two steps, which differ."""
    name = next(name for name in {**new, **old} if new.get(name) != old.get(name))
    result = f"the metric {name}" if name else "the loss"
    if name not in old:
        return f"{result}, which it did not in the last step"
    if name not in new:
        return f"no longer {result} of the last step"
    return f"{result} as {new[name]}, which was {old[name]} in the last step"
