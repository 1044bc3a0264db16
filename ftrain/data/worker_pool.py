"""Worker processes: those of torch's `DataLoader`, kept from epoch to epoch."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ftrain import tree
from ftrain._torch.workers import WatchedLoader, how_workers_ended, stop_workers
from ftrain.data.batch_dataset import BatchDataset, describe
from ftrain.data.epoch_plan import BatchRequest
from ftrain.data.fetched_batch import FetchedBatch
from ftrain.data.worker_messages import to_message
from ftrain.errors import DataError


class WorkerOptions(NamedTuple):
    """Options of worker processes, those of `ftrain.data.loader`; with 0 workers this process reads the batches."""

    num_workers: int
    timeout: float
    prefetch_factor: int
    context: str | None


def _data_loader(
    dataset: Dataset[FetchedBatch], options: WorkerOptions, generator: torch.Generator, **arguments: Any
) -> DataLoader[FetchedBatch]:
    """Return a `DataLoader` of a dataset of whole batches, whose workers send the messages of `to_message`."""
    return WatchedLoader(
        dataset,
        batch_size=None,
        num_workers=options.num_workers,
        # `batch_size=None` passes each item of the dataset, a batch, to this function.
        collate_fn=to_message,  # type: ignore[arg-type]
        timeout=options.timeout,
        # torch draws a number from this generator in each epoch; the default is the global one, which is the user's.
        generator=generator,
        multiprocessing_context=options.context,
        worker_init_fn=partial(_prepare_worker, torch.get_default_dtype()),
        prefetch_factor=options.prefetch_factor,
        **arguments,
    )


def _prepare_worker(dtype: torch.dtype, worker: int) -> None:
    """Prepare a worker process when it starts."""
    # A worker that is not forked does not have the default dtype of the main process.
    torch.set_default_dtype(dtype)
    # Ctrl-C reaches every process of a terminal; the main process decides which processes it ends, and when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class WorkerPool:
    """Reads requested batches in worker processes, ahead of their use, and yields them in order."""

    def __init__(self, dataset: BatchDataset, options: WorkerOptions) -> None:
        self._dataset, self._options = dataset, options
        self._requests = _PendingRequests()
        self._loader: DataLoader[FetchedBatch] | None = None

    def __call__(self, requests: Iterable[BatchRequest]) -> Iterator[FetchedBatch]:
        """Return an iterator over the batches of some requests; raises the errors of `read_from_workers`."""
        if self._options.num_workers:
            return self._from_workers(requests)
        return map(self._dataset.__getitem__, requests)

    def _from_workers(self, requests: Iterable[BatchRequest]) -> Iterator[FetchedBatch]:
        """Yield the batches of some requests, read by workers that are kept for the next epoch."""
        self._requests.start(requests)
        if self._loader is None:
            self._loader = _data_loader(
                self._dataset, self._options, torch.Generator(), sampler=self._requests, persistent_workers=True
            )
        try:
            for batch in read_from_workers(self._loader, self._options.timeout, self._requests.describe_next):
                self._requests.pop()
                if batch.error is not None:
                    self._loader = None
                yield batch
        except DataError:
            # The next epoch starts new workers.
            self._loader = None
            raise
        if self._requests.error is not None:
            yield FetchedBatch({}, error=self._requests.error)


def read_in_one_worker(
    stream: IterableDataset[FetchedBatch], seed: int, options: WorkerOptions
) -> Iterator[FetchedBatch]:
    """Return an iterator over the batches of an iterable dataset, which one worker process with this seed reads."""
    loader = _data_loader(stream, options, torch.Generator().manual_seed(seed))
    return read_from_workers(loader, options.timeout, lambda: "the next batch of the stream")


def read_from_workers(
    loader: DataLoader[Any], timeout: float, describe_next: Callable[[], str]
) -> Iterator[FetchedBatch]:
    """Yield the batches that workers send, and stop the workers after one that has an error.

    Raises a DataError when a worker cannot be started, dies, or sends no batch within `timeout` seconds; the message
    has the text of `describe_next`, which names the next batch.
    """
    batches: Iterator[bytes] | None = None
    while True:
        try:
            # Starting an epoch may also wait for workers that are still reading for an unfinished epoch.
            with _on_host():
                batches = iter(loader) if batches is None else batches
                batch: FetchedBatch = pickle.loads(next(batches))
        except StopIteration:
            return
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            if batches is not None:
                raise
            raise DataError(
                f"loader: the dataset or collate= cannot be sent to a worker process: {error}. Use functions and "
                'classes that a module defines at its top level, no lambdas; or pass num_workers=0, or context="fork" '
                "where that is safe"
            ) from error
        except (RuntimeError, EOFError, OSError) as error:
            reason = f"{str(error) or type(error).__name__}{how_workers_ended(batches)}"
            stop_workers(batches)
            # Errors of the data arrive as values, so this one comes from the processes or from a truncated message.
            raise DataError(
                f"loader: a worker died, or hung for longer than timeout={timeout:g} seconds, while {describe_next()} "
                f"was awaited: {reason}. Run with num_workers=0 to see what it does, or "
                f"raise timeout={_advice_for_start(loader)}"
            ) from error
        if batch.error is not None:
            stop_workers(batches)
        yield batch


def _on_host() -> AbstractContextManager[Any]:
    """Return a context in which torch's workers start, read and send on the host, whatever the default device."""
    # Only if needed: each call of torch takes longer in a context of a default device, which forked workers inherit.
    return nullcontext() if torch.get_default_device() == tree.HOST else tree.HOST


def _advice_for_start(loader: DataLoader[FetchedBatch]) -> str:
    """Return a text for messages: what the program needs if workers are not forked, as on macOS; "" if they are."""
    method = (getattr(loader, "multiprocessing_context", None) or multiprocessing).get_start_method()
    if method == "fork":
        return ""
    return (
        f". A worker that is started by {method!r} imports the program first: start the training under "
        'if __name__ == "__main__":, and define the dataset in a file, not in a notebook or with python -c'
    )


class _PendingRequests:
    """The sampler of the workers: yields requests, and keeps those whose batches have not arrived yet."""

    def __init__(self) -> None:
        self._requests: Iterator[BatchRequest] = iter(())
        self._pending: deque[BatchRequest] = deque()
        self.error: DataError | None = None
        """The error that ended the requests. Batches that were requested before it are good, and may still arrive."""

    def start(self, requests: Iterable[BatchRequest]) -> None:
        self._requests, self.error = iter(requests), None
        self._pending.clear()

    def __iter__(self) -> Iterator[BatchRequest]:
        try:
            for request in self._requests:
                self._pending.append(request)
                yield request
        except DataError as error:
            self.error = error

    def pop(self) -> BatchRequest:
        return self._pending.popleft()

    def describe_next(self) -> str:
        return describe(self._pending[0]) if self._pending else "the next batch"
