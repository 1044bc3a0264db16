"""Evaluation: the loss without its gradient, averaged exactly over a whole data set."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor

from ftrain import backends, tree
from ftrain.backends.format_bytes import format_bytes
from ftrain.backends.oom import is_out_of_memory, release
from ftrain.errors import BatchError, ComposeError, DataError, DeviceError, LossError, OptionError, require_order
from ftrain.step import purity
from ftrain.step.across_ranks import (
    DIFFERENT_BATCHES,
    Share,
    place_model,
    require_same_outcome,
    share_of,
    start_count,
    sum_means,
)
from ftrain.step.all_ranks import require_all_ranks
from ftrain.step.autocast import DTYPES, auto_dtype, autocast, name_of, require_dtype
from ftrain.step.loss_forms import adapt
from ftrain.step.microbatch import RAISE, most_pieces, require_on_oom, split_batch
from ftrain.step.purity import as_tree
from ftrain.step.state_argument import require_state
from ftrain.step.value_and_grad import detach
from ftrain.step.wrapper import Wrapper
from ftrain.types import Loss, LossRanks, Mean, PyTree, TrainState, replace, zero_if_empty


@dataclass(frozen=True)
class EvalStep:
    """A function ``(state, batch) -> {name: Mean}``; made by `eval_step`."""

    loss: Loss

    def __call__(self, state: TrainState, batch: PyTree) -> dict[str, Mean]:
        """Return the loss and its metrics on one batch, as averages that add up over batches.

        Modules run in evaluation mode, a loss that takes a key gets None, and neither the state nor
        torch's random generators change. A plain number counts once for each example of the batch, and so not at all
        for an empty one; a warning says where the first axes of its tensors differ.

        The loss of a step on many ranks (`ftrain.sharded`) is evaluated by all of them together, each on its examples
        of the batch, or on its own batch (``batches="rows"``), and any loss of a state that is divided by every rank,
        on parameters gathered for this call: at level 3 block by block.
        """
        share = self.share(as_tree(batch))
        placed, gathering = place_model(self.loss, state, "eval_step")
        with gathering or nullcontext():
            return self.total(self.of_rank(placed, share))

    def total(self, means: dict[str, Mean]) -> dict[str, Mean]:
        """Return the averages over all ranks, of those that this rank has."""
        return means if self.loss.ranks is None else sum_means(means, self.loss.ranks)

    def share(self, batch: PyTree) -> Share:
        """Return what this rank evaluates: its examples of a batch that all have, or all of a batch of its own."""
        ranks = self.loss.ranks
        return Share(batch, True) if ranks is None or not ranks.whole_batches else share_of(batch, ranks)

    def of_rank(self, state: TrainState, share: Share) -> dict[str, Mean]:
        """Return the averages over the examples of this rank.

        Nothing here waits for other ranks, but for a loss that gathers its parameters block by block.

        Args:
            state: as `place_model` returns it.
            share: of a batch.
        """
        means = self._means(state, share.batch)
        return means if share.counts else tree.map(torch.zeros_like, means)

    def _means(self, state: TrainState, batch: PyTree) -> dict[str, Mean]:
        # Seeded: a model that draws in evaluation draws the same each time, and leaves the global generators alone.
        seeded = backends.of(tree.device_of(state.params)).seeded(0)
        with torch.no_grad(), seeded, self.loss.scope(False):
            leaves, spec = tree.flatten((state.params, state.frozen, batch, state.buffers))
            loss, metrics, _ = purity.call(self.loss.fn, leaves, spec, rng=None, name=self.loss.text)
            values = detach({"loss": loss, **metrics})
            plain = [name for name, value in values.items() if not isinstance(value, Mean) or value.plain]
            length = _length(batch, self.loss.text, plain) if plain else 1
            return {
                name: _mean(value, length, f"{self.loss.text}: the metric {name!r}") for name, value in values.items()
            }

    def wrapped(self, wrapper: Wrapper) -> NoReturn:
        """Refuse a wrapper.

        Raises:
            ComposeError: always; wrappers are for training steps.
        """
        raise ComposeError(f"{wrapper.text}: acts on a training step; evaluate(..., dtype=) computes in a narrow dtype")

    def __repr__(self) -> str:
        return f"eval    {self.loss.text}"


def eval_step(loss_fn: Callable[..., Any] | Loss) -> EvalStep:
    """Return the step that evaluates a loss, in any of the forms that `train_step` takes.

    Raises:
        LossError: when `loss_fn` cannot be called as a loss, or is a step.
    """
    if isinstance(getattr(loss_fn, "loss", None), Loss):
        raise LossError(f"eval_step: the loss is a {type(loss_fn).__name__}; pass its loss: eval_step(step.loss)")
    return EvalStep(adapt(loss_fn, "eval_step"))


def evaluate(
    step: EvalStep,
    state: TrainState,
    data: Iterable[PyTree],
    *,
    dtype: Literal["auto", "bf16", "bfloat16", "fp16", "float16"] | torch.dtype | None = None,
    on_oom: Literal["raise", "split"] = "raise",
) -> dict[str, float]:
    """Return the mean of the loss and of every metric over all of `data`.

    Exact for uneven batches: totals and weights are summed on the device in float64, or as exactly in pairs of float32
    where it has no float64, and read once, at the end.

    On many ranks (`ftrain.sharded`) every rank must call this. The loss of the step, ``eval_step(step.loss)``, is
    evaluated by all together, each rank on its examples of every batch; a plain number is weighted by them. With
    ``sharded(batches="rows")`` each rank evaluates all that it reads, and any number of batches: the result is the mean
    over what all have read. Another loss is evaluated by every rank alone, on all that it reads. A divided state is
    gathered: for the loss of a step at level 3 block by block, each freed after its use; for other losses, other
    levels and ``on_oom="split"`` whole on each rank.

    Args:
        step: from `eval_step`.
        state: whose parameters are evaluated; `ftrain.averaged(state)` for those of `ema`.
        data: any iterable of batches.
        dtype: evaluate in ``"bf16"`` or ``"fp16"``: parameters and buffers are cast once, into a copy, and the loss
            runs under autocast. Without it both stay as they are; ``"auto"`` is ``"bf16"`` where the device multiplies
            in it natively (`Backend.native_dtypes`), and else None. The batch does so always, and with it labels and
            weights; where a norm reads float32 data directly, cast these in the loss. What is beyond 65,504, a variance
            of BatchNorm say, is infinite in ``"fp16"``.
        on_oom: ``"split"`` evaluates a batch for which there is no memory in twice as many pieces, and those after
            it too; the means stay exact.

    Raises:
        DataError: when there is no batch, or data that is one batch.
        StructureError: for a `state` that is none.
        OptionError: for another dtype, or another `on_oom`.
        DeviceError: for a dtype that the device cannot compute in, or when with ``"split"`` not even a single example
            fits.
        BatchError: on every rank, when ranks that evaluate together have different first batches, or at level 3 other
            numbers of batches.
        RankError: when another of these ranks has failed, or does not call this.
        ComposeError: when `step` is no evaluation step, or its loss computes in another narrow dtype by `with_amp`.
        LossError: for a metric that is no number, such as a vector.
    """
    require_order("evaluate", step, state, "evaluate(step, state, data)")
    if not isinstance(step, EvalStep):
        raise ComposeError(f"evaluate: the step is a {type(step).__name__}; needs one of ft.eval_step(loss_fn)")
    require_on_oom("evaluate", on_oom)
    require_state("evaluate", state)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(f"evaluate: data is a {type(data).__name__}; needs an iterable of batches, such as [batch]")
    if step.loss.ranks is not None:
        require_all_ranks("evaluate")
    device = tree.device_of(state.params)
    state, gathering = place_model(step.loss, state, "evaluate", by_block=on_oom == RAISE)
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


def _next_share(sums: _Sums, step: EvalStep, batches: Iterator[PyTree], device: torch.device) -> Share | None:
    """Return what this rank evaluates of the next batch; None after the last one."""
    for drawn in batches:
        if step.loss.ranks is not None and step.loss.ranks.whole_batches and not sums.has_batch:
            sums.digest = step.loss.ranks.digest(drawn)
        sums.has_batch = True
        share = step.share(as_tree(drawn))
        return share._replace(batch=tree.to(share.batch, device))
    if not sums.has_batch:
        raise DataError("evaluate: the data has no batch; needs an iterable of at least one")
    return None


def _add_batches_together(
    sums: _Sums, step: EvalStep, ranks: LossRanks, state: TrainState, data: Iterable[PyTree]
) -> Exception | None:
    """Add what this rank evaluates of all batches, by a loss that all ranks must call equally often.

    Before each batch they tell each other whether they have the next one, so that the device computes while the host
    waits for the answer. A rank that has none evaluates its last one again, which does not count. A rank whose loss has
    failed takes part in one more batch, before the others know.

    Returns:
        the error of this rank; None if there is none, or if only others have one.

    Raises:
        BatchError: on every rank, when not all of them have as many batches, and they should.
    """
    batches, device = iter(data), tree.device_of(state.params)
    share: Share | None = None
    following: Share | None = None
    error: Exception | None = None

    def start_next() -> Callable[[], list[int]]:
        nonlocal following, error
        following = None
        try:
            following = None if error else _next_share(sums, step, batches, device)
        except Exception as raised:
            error = raised
        return start_count(ranks, [following is not None, error is not None], device)

    counts = start_next()
    while True:
        having, failing = counts()
        if failing or not having:
            return error
        if ranks.whole_batches and having < ranks.size:
            raise BatchError(f"evaluate: {having} of {ranks.size} ranks have one more batch: {DIFFERENT_BATCHES}")
        # A rank has had a batch before it has none.
        share = following or cast(Share, share)._replace(counts=False)
        counts = start_next()
        try:
            sums.add(step.of_rank(state, share))
        except Exception as raised:
            error = error or raised


def _add_batches(sums: _Sums, step: EvalStep, state: TrainState, data: Iterable[PyTree], on_oom: str) -> None:
    """Add what this rank evaluates of all batches; it does not wait for other ranks."""
    device, pieces, batches = tree.device_of(state.params), 1, iter(data)
    while (share := _next_share(sums, step, batches, device)) is not None:
        means = list[dict[str, Mean]]()
        while not means:
            try:
                means = [step.of_rank(state, share._replace(batch=p)) for p in split_batch(share.batch, pieces)]
            except Exception as error:
                if on_oom == RAISE or not is_out_of_memory(error):
                    raise
                if pieces >= most_pieces(share.batch):
                    raise _too_large(step, state, share.batch) from error
                release(error, device)
                pieces *= 2
        for each in means:
            sums.add(each)


def _too_large(step: EvalStep, state: TrainState, batch: PyTree) -> DeviceError:
    (example, *_), sizes = split_batch(batch, most_pieces(batch)), []
    for name, part in {
        "parameters": (state.params, state.frozen),
        "buffers": state.buffers,
        "the example": example,
    }.items():
        size = sum(leaf.nbytes for leaf in tree.leaves(part) if tree.is_tensor(leaf))
        sizes.append(f"{name} {format_bytes(size)}")
    return DeviceError(
        f"evaluate: memory ran out with a single example of {step.loss.text}: {', '.join(sizes)}; the rest is what the "
        "model makes of it. Shorter examples, evaluate(..., dtype='bf16'), or a model with nothing else beside it on "
        "the device, such as the state of a training, need less"
    )


class _Sums:
    """Sums of means, on the device. Where it has no float64, each number is the sum of two of float32.

    Dekker, "A floating-point technique for extending the available precision", 1971, https://doi.org/10.1007/BF01397083.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Mean] = {}
        self.digest = 0
        """Tells the first batches of ranks apart."""
        self.has_batch = False
        self._rest: dict[str, Mean] = {}

    def add(self, means: dict[str, Mean]) -> None:
        for name, mean in means.items():
            if name not in self.totals:
                self.totals[name] = mean
                if mean.total.dtype != torch.float64:
                    self._rest[name] = tree.map(torch.zeros_like, mean)
            elif mean.total.dtype == torch.float64:
                self.totals[name] = self.totals[name] + mean
            else:
                old, rest = self.totals[name], self._rest[name]
                total = _exact_sum(old.total, rest.total, mean.total)
                weight = _exact_sum(old.weight, rest.weight, mean.weight)
                self.totals[name], self._rest[name] = Mean(total[0], weight[0]), Mean(total[1], weight[1])

    def read(self, step: EvalStep) -> dict[str, float]:
        """Return the means over all ranks, by waiting for the device."""
        self.totals, self._rest = step.total(self.totals), step.total(self._rest)
        return {name: float(self._joined(name, mean)) for name, mean in self.totals.items()}

    def _joined(self, name: str, mean: Mean) -> Mean:
        if name not in self._rest:
            return mean
        rest = self._rest[name]
        parts = [float(part) for part in (mean.total, rest.total, mean.weight, rest.weight)]
        total, weight = torch.tensor(parts, dtype=torch.float64).view(2, 2).sum(1)
        return Mean(total, weight)


def _exact_sum(high: Tensor, low: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """``high + low + more`` as a number of the dtype and its rounding error, which is 0 where the sum is not finite."""
    total = high + more
    rest = total - high
    low = low + (high - (total - rest)) + (more - rest)
    high = total + low
    return high, torch.where(high.isfinite(), low - (high - total), 0.0)


def _narrowed(step: EvalStep, state: TrainState, dtype: str | torch.dtype) -> tuple[EvalStep, TrainState]:
    """The step and the state that compute in a narrow dtype."""
    name = name_of(dtype)
    if name not in DTYPES:
        raise OptionError(f"evaluate: dtype is {dtype!r}; choices are auto, {', '.join(DTYPES)} and None")
    require_dtype("evaluate", name, backends.of(tree.device_of(state.params)))
    loss, wanted = step.loss, DTYPES[name]
    if loss.narrow not in ("", name) and (loss.narrow, name) != ("auto", "bf16"):
        raise ComposeError(
            f"evaluate: dtype is {dtype!r}, and the loss computes in {loss.narrow}: {loss.text}; leave dtype out, or "
            "evaluate the loss without with_amp"
        )
    parts = {part: tree.cast(getattr(state, part), wanted) for part in ("params", "frozen", "buffers")}
    return EvalStep(dataclasses.replace(loss, fn=autocast(loss.fn, wanted))), replace(state, **parts)


def _length(batch: PyTree, text: str, plain: list[str]) -> int:
    """Return how many examples a batch has, by which plain numbers are weighted; warn where its tensors disagree."""
    lengths = [leaf.shape[0] if tree.is_tensor(leaf) and leaf.ndim else None for leaf in tree.leaves(batch)]
    counted = [index for index, length in enumerate(lengths) if length is not None]
    if not counted:
        return 1
    first = counted[0]
    if other := next((index for index in counted if lengths[index] != lengths[first]), None):
        names = tree.leaf_names(batch)
        warnings.warn(
            f"{text}: {tree.path('batch', names[first])} has {lengths[first]} rows and "
            f"{tree.path('batch', names[other])} {lengths[other]}; an evaluation weights a batch by the first of them "
            f"for what is no Mean ({', '.join(plain)}): return ft.Mean(total, weight)",
            stacklevel=2,
        )
    return lengths[first] or 0


def _mean(metric: Any, length: int, what: str) -> Mean:
    if isinstance(metric, Mean) and not metric.plain:
        return zero_if_empty(Mean(_widened(metric.total), _widened(metric.weight)))
    value = metric.value if isinstance(metric, Mean) else metric
    if not isinstance(value, Tensor | float | int) or (isinstance(value, Tensor) and value.numel() != 1):
        raise LossError(
            f"{what} is {tree.describe(value)}; an evaluation takes the mean of numbers: 0-d tensors or Means"
        )
    value = _widened(torch.as_tensor(value))
    # The mean of no examples is NaN, and they count for nothing.
    return Mean(value * length if length else torch.zeros_like(value), torch.full_like(value, length))


def _widened(value: Tensor) -> Tensor:
    return value.to(backends.widest(value.device))
