"""Evaluation: the loss without its gradient, averaged exactly over a whole data set."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import (
    BatchError,
    ComposeError,
    DataError,
    DeviceError,
    OptionError,
    require_choice,
    require_order,
    warn,
)
from ftrain.step.across_ranks import (
    DIFFERENT_BATCHES,
    Share,
    evaluation_state,
    require_all_ranks,
    require_same_outcome,
    start_count,
    sum_each,
)
from ftrain.step.autocast import DTYPES, auto_dtype, name_of, require_dtype
from ftrain.step.eval_step import EvalStep
from ftrain.step.microbatch import ON_OOM, RAISE, example_lists, most_pieces, split_batch, with_example_lists
from ftrain.step.state_checks import require_state
from ftrain.types import LossRanks, Mean, PyTree, TrainState, replace


def evaluate(
    step: EvalStep,
    state: TrainState,
    data: Iterable[PyTree],
    *,
    dtype: Literal["auto", "bf16", "bfloat16", "fp16", "float16"] | torch.dtype | None = None,
    on_oom: Literal["raise", "split"] = "raise",
) -> dict[str, float]:
    """Return the mean of the loss and of every metric over all of `data`.

    The mean is exact for batches of different lengths: totals and weights are summed on the device in float64, or in
    pairs of float32 if the device has no float64, and read once at the end.

    On many ranks (`ftrain.sharded`) every rank must call this. All ranks evaluate the loss of the step,
    ``eval_step(step.loss)``, together: each takes its rows of every batch, and a plain number is weighted by their
    number. With ``sharded(batches="rows")`` each rank evaluates all batches that it reads, one or more; the
    result is the mean over the batches of all ranks. Another loss is evaluated by each rank alone. A divided state
    is gathered: block by block for the loss of a step at level 3, freeing each block after its use; else, and with
    ``on_oom="split"``, the whole model on each rank.

    Args:
        step: from `eval_step`.
        state: the state to evaluate; `ftrain.averaged(state)` for the parameters of `ema`.
        data: any iterable of batches.
        dtype: ``"bf16"`` or ``"fp16"`` casts a copy of the parameters and buffers, and runs the loss under autocast.
            ``"auto"`` is ``"bf16"`` if the device computes in it natively (`Backend.native_dtypes`), else None. Default
            None: the dtypes of the state. The batch is never cast; if a norm reads float32 data directly, cast the data
            in the loss. Values above 65,504 (such as a variance of BatchNorm) are infinite in ``"fp16"``.
        on_oom: ``"split"`` splits a batch that does not fit in memory, and those after it, into twice as many pieces;
            the means stay exact.

    Raises:
        DataError: when `data` has no batch, on any rank, or is a single batch (a dict or a tensor).
        StructureError: when `state` is not a state.
        OptionError: when `dtype` or `on_oom` is not one of the choices.
        DeviceError: when the device cannot compute in the dtype, or, with ``"split"``, a single example does not fit.
        BatchError: on every rank, when ranks that evaluate together have different first batches, different numbers of
            batches, or later batches of other shapes or dtypes.
        RankError: when another of these ranks failed, or does not call this.
        ComposeError: when `step` is not an `EvalStep`, or `with_amp` makes its loss compute in another dtype.
        LossError: when a metric is not a number, but a vector, for example.
    """
    require_order("evaluate", step, state, "evaluate(step, state, data)")
    if not isinstance(step, EvalStep):
        raise ComposeError(f"evaluate: the step is a {type(step).__name__}; needs one of ft.eval_step(loss_fn)")
    require_choice("evaluate", "on_oom", on_oom, ON_OOM)
    require_state("evaluate", state)
    if isinstance(data, Mapping | Tensor) or not isinstance(data, Iterable):
        raise DataError(f"evaluate: data is a {type(data).__name__}; needs an iterable of batches, such as [batch]")
    if step.warns and (num_dropped := getattr(data, "num_dropped", 0)):
        warn(
            f"evaluate: the loader leaves out {num_dropped} samples, which do not fill a batch; pass "
            "ft.data.loader(..., shuffle=False, drop_last=False)"
        )
    if step.loss.ranks is not None:
        require_all_ranks("evaluate")
    device = tree.device_of(state.params)
    state, gathering = evaluation_state(step.loss, state, "evaluate", by_block=on_oom == RAISE)
    if dtype == "auto" and auto_dtype(backends.of(device)) == "float32":
        dtype = None
    if dtype is not None:
        step, state = _narrowed(step, state, "bf16" if dtype == "auto" else dtype)
    sums = _Sums()
    if step.loss.ranks is None:
        _add_batches(sums, step, state, data, on_oom)
    else:
        error = None
        if gathering is not None:
            with gathering:
                error = _add_batches_together(sums, step, step.loss.ranks, state, data)
        else:
            try:
                _add_batches(sums, step, state, data, on_oom)
            except Exception as raised:
                error = raised
        require_same_outcome(step.loss.ranks, error, sums.digest, device)
    return sums.read(step)


def _shares(sums: _Sums, step: EvalStep, data: Iterable[PyTree], device: torch.device) -> Iterator[Share]:
    """Yield the share of this rank in each batch."""
    ranks = step.loss.ranks
    is_first = True
    for batch in data:
        if ranks is not None and ranks.whole_batches:
            # Of later batches no values, which may be on the device.
            sums.digest = ranks.digest(batch if is_first else [sums.digest, repr(tree.signature(batch))])
        is_first = False
        share = step.share(tree.as_tree(batch))
        yield share._replace(batch=tree.to(share.batch, device))
    if is_first:
        where = "" if ranks is None else " on every rank"
        raise DataError(f"evaluate: the data has no batch; needs an iterable of at least one{where}")


def _add_batches_together(
    sums: _Sums, step: EvalStep, ranks: LossRanks, state: TrainState, data: Iterable[PyTree]
) -> Exception | None:
    """Add this rank's shares of all batches to the sums, with a loss that all ranks must call equally often.

    While the device computes a batch, the ranks exchange whether they have a next one. A rank without a next batch
    evaluates its last one again, which does not count. If the loss fails on a rank, the other ranks know only after one
    more batch. Returns the error of this rank, or None. Raises a BatchError on every rank if they must have the same
    number of batches and do not.
    """
    device = tree.device_of(state.params)
    shares = _shares(sums, step, data, device)
    share: Share | None = None
    following: Share | None = None
    error: Exception | None = None

    def start_next() -> Callable[[], list[int]]:
        nonlocal following, error
        following = None
        try:
            following = None if error else next(shares, None)
        except Exception as raised:
            error = raised
        return start_count(ranks, [following is not None, error is not None], device)

    counts = start_next()
    while True:
        ranks_with_next, ranks_with_error = counts()
        if ranks_with_error or not ranks_with_next:
            return error
        if ranks.whole_batches and ranks_with_next < ranks.size:
            raise BatchError(
                f"evaluate: {ranks_with_next} of {ranks.size} ranks have one more batch: {DIFFERENT_BATCHES}"
            )
        # If nothing follows, `share` is the last one: data without any batch is an error.
        share = following or cast(Share, share)._replace(counts=False)
        counts = start_next()
        try:
            sums.add(step.of_rank(state, share))
        except Exception as raised:
            error = error or raised


def _add_batches(sums: _Sums, step: EvalStep, state: TrainState, data: Iterable[PyTree], on_oom: str) -> None:
    """Add this rank's shares of all batches to the sums, without waiting for other ranks."""
    device = tree.device_of(state.params)
    pieces = 1
    for share in _shares(sums, step, data, device):
        means: list[dict[str, Mean]] = []
        while not means:
            try:
                means = [step.of_rank(state, part) for part in _pieces(share, pieces)]
            except Exception as error:
                if on_oom == RAISE or not is_out_of_memory(error):
                    raise
                if pieces >= most_pieces(share.batch):
                    raise DeviceError(
                        f"evaluate: memory ran out with a single example of {step.loss.text}; use shorter examples or "
                        "evaluate(..., dtype='bf16'), or free other tensors on the device, such as a training state"
                    ) from error
                release(error, device)
                pieces *= 2
        for each in means:
            sums.add(each)


def _pieces(share: Share, number: int) -> list[Share]:
    """Split the batch of a share."""
    if number == 1:
        return [share]
    lists = example_lists(share.batch) if share.lists is None else share.lists
    with with_example_lists(lists):
        return [share._replace(batch=part) for part in split_batch(share.batch, number)]


class _Sums:
    """Sums of means, on the device. Without float64, each number is kept as the sum of two float32 numbers.

    Dekker, "A floating-point technique for extending the available precision", 1971, https://doi.org/10.1007/BF01397083.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Mean] = {}
        self.digest = 0
        """The digest of the first batch, and of the shapes and dtypes of those after it."""
        self._rest: dict[str, Mean] = {}

    def add(self, means: dict[str, Mean]) -> None:
        for name, mean in means.items():
            if name not in self.totals:
                self.totals[name] = mean
                if mean.total.dtype != torch.float64:
                    self._rest[name] = tree.map(torch.zeros_like, mean)
            elif mean.total.dtype == torch.float64:
                self.totals[name] = self.totals[name].pooled(mean)
            else:
                old, rest = self.totals[name], self._rest[name]
                total = _exact_sum(old.total, rest.total, mean.total)
                weight = _exact_sum(old.weight, rest.weight, mean.weight)
                self.totals[name], self._rest[name] = Mean(total[0], weight[0]), Mean(total[1], weight[1])

    def read(self, step: EvalStep) -> dict[str, float]:
        """Return the means over all ranks; waits for the device."""
        if step.loss.ranks is not None:
            self.totals, self._rest = sum_each([self.totals, self._rest], step.loss.ranks)
        parts = [*self.totals.items(), *self._rest.items()]
        numbers = _read([number for _, mean in parts for number in (mean.total, mean.weight)])
        sums = dict.fromkeys(self.totals, (0.0, 0.0))
        for name, _ in parts:
            total, weight = sums[name]
            sums[name] = total + next(numbers), weight + next(numbers)
        empty = [name for name, (_, weight) in sums.items() if weight == 0]
        if empty and step.warns:
            why = "the weights of all batches are 0: they have no examples, or no labels that count"
            warn(f"evaluate: the mean of {', '.join(empty)} is NaN, for {why}")
        return {name: math.nan if weight == 0 else total / weight for name, (total, weight) in sums.items()}


def _read(tensors: Sequence[Tensor]) -> Iterator[float]:
    """Yield the values of 0-d tensors; waits once for each device and dtype, of which there is mostly one."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    values = {key: iter(torch.stack(group).tolist()) for key, group in groups.items()}
    return (next(values[tensor.device, tensor.dtype]) for tensor in tensors)


def _exact_sum(high: Tensor, low: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``high + low + more`` and its rounding error, which is 0 if the sum is not finite."""
    total = high + more
    rest = total - high
    low = low + (high - (total - rest)) + (more - rest)
    high = total + low
    return high, torch.where(high.isfinite(), low - (high - total), 0.0)


def _narrowed(step: EvalStep, state: TrainState, dtype: str | torch.dtype) -> tuple[EvalStep, TrainState]:
    """Return an evaluation that runs under autocast in a 16-bit dtype, and the state in that dtype."""
    name = name_of(dtype)
    if name not in DTYPES:
        raise OptionError(f"evaluate: dtype is {dtype!r}; choices are auto, {', '.join(DTYPES)} and None")
    require_dtype("evaluate", name, backends.of(tree.device_of(state.params)))
    loss, narrow = step.loss, DTYPES[name]
    is_compatible = loss.narrow in ("", name) or (loss.narrow, name) == ("auto", "bf16")
    if not is_compatible:
        raise ComposeError(
            f"evaluate: dtype is {dtype!r}, but the loss computes in {loss.narrow}: {loss.text}; remove dtype, or "
            "evaluate the loss without with_amp"
        )
    fields = {field: tree.cast(getattr(state, field), narrow) for field in ("params", "frozen", "buffers")}

    def means(tensors: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> dict[str, Mean]:
        with torch.autocast(tree.device_of(tensors[0]).type, dtype=narrow):
            return step.compute(tensors, batch)

    return dataclasses.replace(step, means=means), replace(state, **fields)
