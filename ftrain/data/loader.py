"""The loader: from a dataset and options to passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import get_all_start_methods
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ftrain.data.arrays import arrays
from ftrain.data.batch_samplers import ByLength, ByRoom, ByTokens, Cut, InOrder
from ftrain.data.epoch_plan import Plan
from ftrain.data.fetch import Batches, Collate
from ftrain.data.iterable_source import Stream, Streamed
from ftrain.data.lengths import lookup
from ftrain.data.map_source import Planned
from ftrain.data.pack import packed
from ftrain.data.passes import Loader
from ftrain.data.workers import Workers
from ftrain.errors import DataError, OptionError, require_positive, require_range

WINDOW = 4096
"""Samples in a window, where batches depend on lengths: enough to find neighbours, and soon looked through."""

BATCHES = 64
"""Batches in a window, at least."""


def loader(
    dataset: Any,
    batch_size: int | None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    num_workers: int = 0,
    collate: Collate | None = None,
    drop_last: bool = True,
    rank: int = 0,
    num_ranks: int = 1,
    lengths: Sequence[int] | Callable[[int], int] | None = None,
    max_tokens: int | None = None,
    pack: int | None = None,
    window: int | None = None,
    timeout: float = 300.0,
    on_error: Literal["raise", "skip"] = "raise",
    prefetch_factor: int = 2,
    context: str | None = None,
) -> Loader:
    """Return passes over a dataset in batches, in an order that is a pure function of seed, epoch and index.

    Each ``iter()`` is a pass; `Loader.state_dict` says where it stands after the batches it has yielded, whatever
    workers have prepared beyond, and resuming costs the same anywhere. A dataset with ``__getitems__`` is read by the
    batch.

    The global generators of torch, Python and numpy are seeded from ``(seed, epoch, index)`` for each sample, so that
    augmentation too is the same with any number of workers and after resuming. Since this takes longer than to read a
    small sample, it is only done once a sample has drawn: its batch is then read again (or it alone, if it is the first
    of all). An attribute of the dataset saves that: ``draws = False``, or ``draws = True``, without which it goes
    unnoticed if a sample draws and then sets the state of the generator back (``torch.random.fork_rng``), or seeds a
    generator of its own from ``torch.initial_seed()``.

    With `lengths`, batches are made within windows of the shuffled order: of `batch_size` samples of about the same
    length; or, with `max_tokens`, of as many as fit; or, with `pack`, of `batch_size` rows of that length, filled with
    whole documents (see `ftrain.data.pack`).

    An iterable dataset keeps its own order (``shuffle=False``), is read by at most one worker, and is sharded before
    it gets here. If it, or its iterator, has ``state_dict`` and ``load_state_dict`` (or ``get_state`` and
    ``set_state``) these keep its position, else resuming reads again what was read. ``set_epoch(epoch)`` is called
    before each pass if there is one.

    Args:
        dataset: of samples: ``__getitem__`` and ``__len__``, or iterable.
        batch_size: samples in a batch of one rank; with `max_tokens`, at most so many, or None for no limit.
        seed: of the order, and of what samples draw.
        shuffle: whether each pass has an order of its own; else it is that of the dataset.
        num_workers: processes that read samples; they live as long as the loader.
        collate: puts a list of samples together; torch's ``default_collate`` unless told, or `packed` with `pack`.
        drop_last: leave out the samples that make no whole batch on all ranks; else they make a smaller one, for which
            the first samples of the pass are repeated only if some rank would have none. With `pack`, none is left out.
        rank: of this process.
        num_ranks: how many processes share each pass; every one gets as many batches.
        lengths: of all samples, or a function of the index.
        max_tokens: rows times longest row of a batch, at most; for padding to a multiple, let `lengths` be multiples.
        pack: the length of a row.
        window: samples that are looked at together; 4096, or those of 64 batches if these are more, unless told.
        timeout: how long to wait for a worker, in seconds.
        on_error: what to do with a sample that raises: "raise", or "skip" it and count it in ``loader.skipped``. The
            good samples of the batch are repeated in its place, so that the batch keeps its shape (with `pack`, its
            place stays empty); a batch without a good one is left out, which is an error with several ranks.
        prefetch_factor: batches that each worker prepares ahead.
        context: how workers are started ("fork", "spawn" or "forkserver"); as Python does unless told.

    Raises:
        OptionError: for options out of range, or that do not go together.
        DataError: when the dataset is none, or has too few samples for one batch.

    >>> data = loader([{"x": float(i)} for i in range(10)], 4, shuffle=False)
    >>> [batch["x"].tolist() for batch in data]
    [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    """
    _require(
        batch_size,
        timeout,
        on_error,
        context,
        rank,
        num_ranks,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
    )
    collate = collate or (default_collate if pack is None else packed(pack, rows=batch_size))
    if type(dataset) is TensorDataset:
        # The same samples, which can be taken by the batch.
        dataset = arrays(dataset.tensors)
    if not _is_map(dataset):
        planned = any(option is not None for option in (lengths, max_tokens, pack, window)) or batch_size is None
        _require_plain_stream(dataset, shuffle, num_workers, num_ranks, planned, on_error)
        stream = Stream(dataset, batch_size or 1, collate, seed, drop_last)
        return Loader(Streamed(stream, num_workers, timeout, prefetch_factor, context))
    size = len(dataset)
    cut = _cut(size, batch_size, rank, num_ranks, lengths=lengths, max_tokens=max_tokens, pack=pack, window=window)
    plan = Plan(size, cut, seed, shuffle, drop_last)
    _require_batches(plan)
    refill = pack is None
    batches = Batches(dataset, collate, seed=seed, skip=on_error == "skip", refill=refill)
    workers = Workers(batches, num_workers, timeout, prefetch_factor, context)
    chosen = {"batch_size": batch_size, "max_tokens": max_tokens, "pack": pack}
    facts = {
        "seed": seed,
        "samples": size,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "num_ranks": num_ranks,
        **{name: value for name, value in chosen.items() if value is not None},
        **({} if lengths is None else {"window_size": cut.width}),
    }
    return Loader(Planned(plan, workers, facts), num_ranks)


def _cut(
    size: int,
    batch_size: int | None,
    rank: int,
    num_ranks: int,
    *,
    lengths: Sequence[int] | Callable[[int], int] | None,
    max_tokens: int | None,
    pack: int | None,
    window: int | None,
) -> Cut:
    for name, value in (("max_tokens", max_tokens), ("pack", pack), ("window", window)):
        if value is not None:
            require_positive("loader", name, value)
            if lengths is None:
                raise OptionError(f"loader: {name}={value} needs lengths=, those of all samples or a function")
    if max_tokens is not None and pack is not None:
        raise OptionError(f"loader: max_tokens={max_tokens} and pack={pack} are two ways to make batches; choose one")
    if batch_size is None and max_tokens is None:
        raise OptionError("loader: batch_size is None, which only max_tokens= makes sense of")
    width = window or max(WINDOW, BATCHES * (batch_size or 1) * num_ranks)
    if lengths is None:
        return InOrder(batch_size or 1, rank, num_ranks)
    found = lookup(lengths, size)
    if max_tokens is not None:
        return ByTokens(max_tokens, batch_size, rank, num_ranks, found, width)
    if pack is not None:
        return ByRoom(batch_size or 1, pack, rank, num_ranks, found, width)
    return ByLength(batch_size or 1, rank, num_ranks, found, width)


def _is_map(dataset: Any) -> bool:
    if isinstance(dataset, Iterator | Mapping):
        raise DataError(
            f"loader: the dataset is a {type(dataset).__name__}; needs one that can be gone through again and again: "
            "a Dataset, a list of samples, or ft.data.arrays(tree of tensors)"
        )
    if isinstance(dataset, DataLoader):
        raise DataError("loader: the dataset is a DataLoader, which gives batches; pass its dataset, of samples")
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return True
    if isinstance(dataset, Iterable):
        return False
    raise DataError(
        f"loader: the dataset is a {type(dataset).__name__}; needs __getitem__ and __len__, or __iter__, as torch's "
        "Dataset and IterableDataset have"
    )


def _require(
    batch_size: int | None,
    timeout: float,
    on_error: str,
    context: str | None,
    rank: int,
    num_ranks: int,
    *,
    num_workers: int,
    prefetch_factor: int,
) -> None:
    for name, value in (("num_ranks", num_ranks), ("prefetch_factor", prefetch_factor)):
        require_positive("loader", name, value)
    if batch_size is not None:
        require_positive("loader", "batch_size", batch_size)
    for name, number, end in (("rank", rank, num_ranks), ("num_workers", num_workers, float("inf"))):
        require_range("loader", name, number, 0, end)
        if not isinstance(number, int):
            raise OptionError(f"loader: {name} is {number!r}, needs a whole number")
    if not timeout > 0:
        raise OptionError(f"loader: timeout is {timeout!r}, needs a number of seconds above 0")
    if context is not None and context not in get_all_start_methods():
        raise OptionError(f"loader: context is {context!r}; choices are {', '.join(get_all_start_methods())}")
    if on_error not in ("raise", "skip"):
        raise OptionError(f"loader: on_error is {on_error!r}; choices are raise, skip")


def _require_plain_stream(
    dataset: Any, shuffle: bool, num_workers: int, num_ranks: int, planned: bool, on_error: str
) -> None:
    refused = [
        (shuffle, "shuffle=False: it comes in its own order; shuffle in the dataset"),
        (num_workers > 1, f"num_workers=1 instead of {num_workers}: several would each read all of it"),
        (num_ranks > 1, "num_ranks=1: give each rank a dataset of its own part"),
        (
            planned,
            "a batch_size=, and no lengths=, max_tokens=, pack= or window=: lengths are not known before it is read",
        ),
        (on_error == "skip", 'on_error="raise": a stream that raised has ended; catch errors in the dataset'),
    ]
    for wrong, needed in refused:
        if wrong:
            raise OptionError(f"loader: {type(dataset).__name__} is an iterable dataset, and needs {needed}")


def _require_batches(plan: Plan) -> None:
    if plan.size == 0:
        raise DataError("loader: the dataset has no sample")
    if plan.num_windows == 0:
        raise DataError(
            f"loader: the dataset has {plan.size} samples, fewer than the {plan.cut.quantum} of one batch on all "
            "ranks, and drop_last=True leaves them out; pass drop_last=False or a smaller batch_size"
        )
