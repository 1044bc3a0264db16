"""`Loader`, an iterable of batches with a position; and `loader`, which makes one from a dataset and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import get_all_start_methods
from operator import index
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from ftrain.data.array_dataset import arrays
from ftrain.data.batch_dataset import BatchDataset, Collate
from ftrain.data.batch_samplers import BatchSampler, by_length, by_packing, by_tokens, in_order, lengths_function
from ftrain.data.epoch_plan import EpochPlan
from ftrain.data.iterable_source import IterableBatchDataset, IterableSource
from ftrain.data.map_source import MapSource, options_of_lengths
from ftrain.data.packing import packed
from ftrain.data.position_differences import Source, differences_of
from ftrain.data.worker_pool import WorkerOptions, WorkerPool
from ftrain.errors import (
    ComposeError,
    DataError,
    OptionError,
    require_choice,
    require_positive,
    require_positive_number,
    require_range,
    require_switches,
    warn,
    whole_number,
)
from ftrain.random.host_keys import halves
from ftrain.types import PyTree

MIN_WINDOW, MIN_WINDOW_BATCHES = 4096, 64
"""The smallest number of samples and of batches in a window if batches depend on lengths."""


class Loader:
    """An iterable of batches; each ``iter()`` is an epoch, and the next one follows when it is finished.

    After an unfinished epoch, ``iter()`` starts the same epoch again, at the position where it was started.

    Attributes:
        skipped: the number of samples that were left out because they could not be read.
    """

    def __init__(self, source: Source, num_ranks: int = 1) -> None:
        self.skipped = 0
        self._source, self._num_ranks = source, num_ranks
        self._epoch, self._start, self._position = 0, source.start, source.start
        self._skipped_at_start, self._warned = 0, False
        # The number of calls of `iter()`, by which an iterator learns that it is no longer the latest.
        self._num_iterators = 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch; raises a ComposeError if it depends on lengths, or on a stream."""
        num_batches = self._source.num_batches
        if num_batches is None:
            raise ComposeError(
                "len(loader): the number of batches in an epoch depends on the lengths of all samples, or on what a "
                "stream holds; count in steps instead"
            )
        return num_batches

    @property
    def num_dropped(self) -> int:
        """The number of samples that an epoch leaves out because of ``drop_last``; 0 if it is not known."""
        return self._source.num_dropped

    def __iter__(self) -> Iterator[PyTree]:
        self._num_iterators += 1
        self._position, self.skipped = self._start, self._skipped_at_start
        return self._batches(self._num_iterators)

    def _batches(self, iterator: int) -> Iterator[PyTree]:
        """Yield the batches from `_start` to the end of the epoch; raises the error of a batch that has one."""
        self._require_latest(iterator)
        for batch in self._source.batches(self._epoch, self._start):
            if batch.error is not None:
                raise batch.error
            self._position = batch.position
            if batch.skipped:
                self._count_skipped(batch.skipped)
            if batch.empty:
                if self._num_ranks > 1:
                    raise DataError(
                        f"{batch.skipped[0]}, as are all others of its batch, and with several ranks no batch can be "
                        "left out; repair one of them"
                    ) from batch.skipped[0]
                continue
            # A variable of this generator would keep the batch in memory after the caller has dropped it.
            yielded = [batch.batch]
            del batch
            yield yielded.pop()
            self._require_latest(iterator)
        self._epoch += 1
        self._start = self._position = self._source.next_start(self._position)
        self._skipped_at_start = self.skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batches that were yielded, and the options on which it depends.

        It is the same on every rank, except for `skipped`.
        """
        return {"epoch": self._epoch, **self._position, "skipped": self.skipped, **self._source.fingerprint}

    def start_dict(self) -> dict[str, Any]:
        """Return the position at which the next ``iter()`` starts; `state_dict` differs from it in an epoch."""
        return {"epoch": self._epoch, **self._start, "skipped": self._skipped_at_start, **self._source.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned: the next ``iter()`` yields the remaining batches.

        The number of ranks may differ, if a batch of all ranks has as many samples as before.

        Raises:
            DataError: if it is not such a state, or is from a loader of other data or options; lists the differences.
        """
        if not isinstance(state, Mapping):
            raise DataError(f"Loader.load_state_dict: the position is {state!r:.60}; needs what state_dict() returned")
        source = self._source.for_state(state)
        differences = differences_of(source, state)
        if differences:
            raise DataError(
                "Loader.load_state_dict: the position does not fit this loader:\n  "
                + "\n  ".join(differences)
                + "\nMake the loader as it was when the position was saved. To continue with another one from its "
                "beginning, load the state alone, ft.checkpoint.load(ft.Checkpoints(...).latest().path, "
                "like={'state': state}, partial=True)['state'], and save the run in another directory"
            )
        keys = [*source.start, *(key for key in source.optional_keys if key in state)]
        self._source = source
        self._num_iterators += 1
        self._epoch = state["epoch"]
        self.skipped = self._skipped_at_start = state["skipped"]
        self._start = self._position = {key: state[key] for key in keys}

    def _require_latest(self, iterator: int) -> None:
        """Raise a DataError if an iterator is not the latest one, by its number."""
        if iterator != self._num_iterators:
            raise DataError(
                "loader: an earlier iterator is used after iter() was called again, or a position was loaded; a loader "
                "has one iterator at a time: make one loader for each iterator"
            )

    def _count_skipped(self, errors: Sequence[DataError]) -> None:
        """Count the samples that were left out; warn of the first one."""
        if not self._warned:
            self._warned = True
            warn(f"{errors[0]}. loader.skipped counts such samples; there is no further warning")
        self.skipped += len(errors)


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
    """Return an iterable of batches of a dataset, in an order that is a pure function of seed, epoch and index.

    Each ``iter()`` is an epoch. `Loader.state_dict` is the position after the batches that were yielded, even if
    workers have read further; resuming takes the same time anywhere in an epoch. A dataset with ``__getitems__`` is
    read one batch at a time.

    The global generators of torch, Python and numpy are seeded from ``(seed, epoch, index)`` for each sample: random
    augmentation does not depend on workers or resuming. Seeding is slow, so it starts only when a sample has drawn a
    random number; the batch of this sample is then read again. A sample that draws and then restores the state of the
    generator (``torch.random.fork_rng``), or seeds one from ``torch.initial_seed()``, is not detected: give the dataset
    an attribute ``draws = True``. With ``draws = False`` nothing is seeded.

    With `lengths`, batches are formed within windows of the shuffled order, of samples of similar lengths: `batch_size`
    samples, or with `max_tokens` as many as fit. With `pack`, a batch has `batch_size` rows of this length, filled with
    whole documents (see `ftrain.data.pack`).

    An iterable dataset keeps its own order (``shuffle=False``), is read by at most one worker, and must already be
    sharded over ranks. Its position is saved if it or its iterator has ``state_dict`` and ``load_state_dict``, or
    ``get_state`` and ``set_state``; else resuming reads the earlier samples again. Its ``set_epoch(epoch)`` is called.

    Args:
        dataset: the dataset of samples: with ``__getitem__`` and ``__len__``, which is read once, or iterable.
        batch_size: number of samples per batch and rank. With `max_tokens` the largest number; None for no limit.
        seed: seed of the order, and of the random numbers that samples draw.
        shuffle: shuffle each epoch; else keep the order of the dataset.
        num_workers: number of processes that read samples; they run as long as the loader exists.
        collate: makes a batch of a list of samples. Default: torch's ``default_collate``, or `packed` with `pack`.
        drop_last: leave out the last samples if they do not fill a batch on all ranks (not with `pack`); else they
            form a smaller batch, for which the first samples of the epoch are repeated if a rank would have none.
        rank: the number of this process.
        num_ranks: number of processes that share each epoch; all get the same number of batches.
        lengths: the length of each sample, or a function of the index.
        max_tokens: limit of rows times longest row in a batch; for padding to a multiple, round `lengths` up to it.
        pack: the length of a row.
        window: number of samples whose lengths are compared. Default: 4096, or 64 batches if that is more.
        timeout: seconds to wait for a worker.
        on_error: "raise" the error of a sample; or "skip" the sample, count it in ``loader.skipped``, and repeat good
            samples of the batch in its place (not with `pack`). A batch without a good sample is left out; with several
            ranks it is an error.
        prefetch_factor: number of batches that each worker reads ahead.
        context: start method of workers: "fork", "spawn" or "forkserver". Default: Python's.

    Raises:
        OptionError: if an option is out of range, or two exclude each other.
        ComposeError: if `seed` is not an integer.
        DataError: if `dataset` is not a dataset, or has too few samples for one batch.

    >>> data = loader([{"x": float(i)} for i in range(10)], 4, shuffle=False)
    >>> [batch["x"].tolist() for batch in data]
    [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    """
    worker_options = WorkerOptions(num_workers, timeout, prefetch_factor, context)
    _require_options(batch_size, rank, num_ranks, on_error, worker_options)
    require_switches("loader", shuffle=shuffle, drop_last=drop_last)
    halves("loader", "seed", seed)
    if collate is not None and not callable(collate):
        raise OptionError(
            f"loader: collate is {collate!r}; needs a function of a list of samples, such as ft.data.pad()"
        )
    collate = collate or (default_collate if pack is None else packed(pack, rows=batch_size))
    if type(dataset) is TensorDataset:
        # The same samples, which `arrays` reads one batch at a time.
        dataset = arrays(dataset.tensors)
    if not _is_map_style(dataset):
        uses_lengths = any(option is not None for option in (lengths, max_tokens, pack, window)) or batch_size is None
        _require_iterable_options(dataset, shuffle, num_workers, num_ranks, uses_lengths, on_error)
        stream = IterableBatchDataset(dataset, batch_size or 1, collate, seed, drop_last)
        return Loader(IterableSource(stream, worker_options))
    num_samples = len(dataset)
    batch_sampler = _batch_sampler(
        num_samples, batch_size, rank, num_ranks, lengths=lengths, max_tokens=max_tokens, pack=pack, window=window
    )
    plan = EpochPlan(num_samples, batch_sampler, seed, shuffle, drop_last)
    _require_batches(plan)
    batches = BatchDataset(dataset, collate, seed=seed, skip_errors=on_error == "skip", refill=pack is None)
    sizes = {"batch_size": batch_size, "max_tokens": max_tokens, "pack": pack}
    # As Python's numbers, because checkpoints save them; numpy's integers are allowed as arguments.
    fingerprint = {
        "seed": index(seed),
        "samples": num_samples,
        "shuffle": bool(shuffle),
        "drop_last": bool(drop_last),
        "num_ranks": index(num_ranks),
        **{name: index(size) for name, size in sizes.items() if size is not None},
        **options_of_lengths(lengths, batch_sampler.window_size),
    }
    return Loader(MapSource(plan, WorkerPool(batches, worker_options), fingerprint), num_ranks)


def _batch_sampler(
    num_samples: int,
    batch_size: int | None,
    rank: int,
    num_ranks: int,
    *,
    lengths: Sequence[int] | Callable[[int], int] | None,
    max_tokens: int | None,
    pack: int | None,
    window: int | None,
) -> BatchSampler:
    """Return the sampler for the options of `loader`. Raises an OptionError if they exclude each other."""
    for name, value in (("max_tokens", max_tokens), ("pack", pack), ("window", window)):
        if value is not None:
            require_positive("loader", name, value)
            if lengths is None:
                raise OptionError(f"loader: {name}={value} needs lengths=, those of all samples or a function")
    if max_tokens is not None and pack is not None:
        raise OptionError(f"loader: max_tokens={max_tokens} and pack={pack} exclude each other; pass one of them")
    if batch_size is None and max_tokens is None:
        raise OptionError("loader: batch_size is None, which needs max_tokens=")
    size = batch_size or 1
    if lengths is None:
        return in_order(size, rank, num_ranks)
    lengths_of = lengths_function(lengths, num_samples)
    window_size = window or max(MIN_WINDOW, MIN_WINDOW_BATCHES * size * num_ranks)
    if max_tokens is not None:
        return by_tokens(max_tokens, batch_size, rank, num_ranks, lengths=lengths_of, window_size=window_size)
    if pack is not None:
        return by_packing(size, pack, rank, num_ranks, lengths=lengths_of, window_size=window_size)
    return by_length(size, rank, num_ranks, lengths=lengths_of, window_size=window_size)


def _is_map_style(dataset: Any) -> bool:
    """Whether a dataset is map-style, else iterable. Raises a DataError if it is neither."""
    if isinstance(dataset, DataLoader):
        raise DataError("loader: the dataset is a DataLoader, which gives batches; pass its .dataset, of samples")
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    is_map_style = has_index and not isinstance(dataset, IterableDataset)
    # A tuple of arrays is most likely inputs and labels, and not two samples.
    is_tuple_of_arrays = isinstance(dataset, tuple) and all(isinstance(item, Tensor | np.ndarray) for item in dataset)
    is_no_dataset = is_tuple_of_arrays or isinstance(dataset, Iterator | Mapping | str | bytes | type)
    if is_no_dataset or not (is_map_style or isinstance(dataset, Iterable)):
        raise DataError(
            f"loader: the dataset is a {type(dataset).__name__}; needs one that can be read many times: a Dataset "
            "with __len__, an IterableDataset, a list of samples, or ft.data.arrays(tree of tensors)"
        )
    return is_map_style


def _require_options(
    batch_size: int | None, rank: int, num_ranks: int, on_error: str, worker_options: WorkerOptions
) -> None:
    """Raise an OptionError if an option of `loader` is out of range."""
    num_workers, timeout, prefetch_factor, context = worker_options
    require_positive("loader", "num_ranks", num_ranks)
    require_positive("loader", "prefetch_factor", prefetch_factor)
    if batch_size is not None:
        require_positive("loader", "batch_size", batch_size)
    for name, number, end in (("rank", rank, num_ranks), ("num_workers", num_workers, float("inf"))):
        require_range("loader", name, whole_number("loader", name, number), 0, end)
    require_positive_number("loader", "timeout", timeout)
    if context is not None:
        require_choice("loader", "context", context, get_all_start_methods())
    require_choice("loader", "on_error", on_error, ("raise", "skip"))


def _require_iterable_options(
    dataset: Any, shuffle: bool, num_workers: int, num_ranks: int, uses_lengths: bool, on_error: str
) -> None:
    """Raise an OptionError for an option that an iterable dataset does not support."""
    requirements = [
        (not shuffle, "shuffle=False: it has its own order; shuffle in the dataset"),
        (num_workers <= 1, f"num_workers=1 instead of {num_workers}: each worker would read all of it"),
        (num_ranks == 1, "num_ranks=1: give each rank a dataset of its own part"),
        (
            not uses_lengths,
            "a batch_size=, and no lengths=, max_tokens=, pack= or window=: lengths are unknown before it is read",
        ),
        (on_error == "raise", 'on_error="raise": a stream that raised has ended; catch errors in the dataset'),
    ]
    for is_met, requirement in requirements:
        if not is_met:
            raise OptionError(f"loader: {type(dataset).__name__} is an iterable dataset, and needs {requirement}")


def _require_batches(plan: EpochPlan) -> None:
    """Raise a DataError if an epoch has no batch."""
    if plan.num_samples == 0:
        raise DataError("loader: the dataset has no sample")
    if plan.num_windows == 0:
        raise DataError(
            f"loader: the dataset has {plan.num_samples} samples, fewer than the {plan.batch_sampler.granularity} of "
            "one batch on all ranks, and drop_last=True leaves them out; pass drop_last=False or a smaller batch_size"
        )
