"""Worker processes: those of torch's `DataLoader`, which live from pass to pass."""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ftrain import _torch
from ftrain.data.epoch_plan import Request
from ftrain.data.fetch import Batches, Fetched, named
from ftrain.errors import DataError


def _as_it_is(fetched: Any) -> Any:
    return fetched


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches every process of a terminal, and it is for the main one to say what it ends, and when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Workers:
    """Turns requests into batches, in their order, some ahead of what is asked for.

    Args:
        batches: what the workers work with.
        num_workers: how many; 0 to work in this process, when a batch is asked for.
        timeout: how long to wait for a batch, in seconds.
        ahead: how many batches each worker prepares.
        context: how processes are started ("fork", "spawn", "forkserver"); as Python does, unless told.
    """

    def __init__(self, batches: Batches, num_workers: int, timeout: float, ahead: int, context: str | None) -> None:
        self._batches, self._num_workers, self._timeout = batches, num_workers, timeout
        self._ahead, self._context = ahead, context
        self._asked = _Asked()
        self._loader: DataLoader[Fetched] | None = None

    def __call__(self, requests: Iterable[Request]) -> Iterator[Fetched]:
        """Yield a batch for each request.

        Raises:
            DataError: when a worker died, or did not answer in time.
        """
        if not self._num_workers:
            yield from map(self._batches.__getitem__, requests)
            return
        self._asked.start(requests)
        if self._loader is None:
            self._loader = self._started()
        answers = answered(self._loader, self._timeout, self._asked.awaited)
        try:
            for fetched in answers:
                self._asked.answered()
                if fetched.failure is not None:
                    self._loader = None
                yield fetched
        except DataError:
            # Whatever is left of these workers, the next pass begins with new ones.
            self._loader = None
            raise

    def _started(self) -> DataLoader[Fetched]:
        return DataLoader(
            self._batches,
            batch_size=None,
            sampler=self._asked,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            timeout=self._timeout,
            # Of its own, for it draws a number in each pass, which must not be one of the user's.
            generator=torch.Generator(),
            multiprocessing_context=self._context,
            worker_init_fn=_ignore_interrupts,
            prefetch_factor=self._ahead,
            persistent_workers=True,
        )


def in_one_worker(
    stream: IterableDataset[Fetched], seed: int, timeout: float, ahead: int, context: str | None
) -> Iterator[Fetched]:
    """Read a stream of batches in a process of its own.

    Raises:
        DataError: when it died, or did not answer in time.
    """
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=1,
        collate_fn=_as_it_is,
        timeout=timeout,
        generator=torch.Generator().manual_seed(seed),
        multiprocessing_context=context,
        worker_init_fn=_ignore_interrupts,
        prefetch_factor=ahead,
    )
    return answered(loader, timeout, lambda: "the next batch of the stream")


def answered(loader: DataLoader[Fetched], timeout: float, awaited: Callable[[], str]) -> Iterator[Fetched]:
    """Pass on what workers send; where that is an error, they are stopped.

    Raises:
        DataError: when one died, or did not answer in time; says what was awaited; or when it cannot be started.
    """
    answers: Iterator[Fetched] | None = None
    while True:
        try:
            # Beginning a pass may have to wait for workers, too: for what they do for one that was left.
            answers = iter(loader) if answers is None else answers
            fetched = next(answers)
        except StopIteration:
            return
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            if answers is not None:
                raise
            raise DataError(
                f"loader: the dataset or collate= cannot be sent to a worker process: {error}. Give it functions and "
                'classes that a module defines at its top level, no lambdas; or pass num_workers=0, or context="fork" '
                "where that is safe"
            ) from error
        except (RuntimeError, EOFError, OSError) as error:
            _stop(answers)
            # What the data raised comes as a value; this is of the processes, or of what they left half sent.
            raise DataError(
                f"loader: a worker died, or hung for longer than timeout={timeout:g} seconds, while {awaited()} was "
                f"awaited: {str(error) or type(error).__name__}. Run with num_workers=0 to see what it does, or allow "
                "more time"
            ) from error
        if fetched.failure is not None:
            _stop(answers)
        yield fetched


def _stop(answers: Any) -> None:
    # Left to the garbage collector, which comes by when the error is forgotten, it
    # takes five seconds a worker: the collector closes the queues before it lets the loader say that it is over.
    with suppress(RuntimeError):  # Of another worker, whose death torch signals meanwhile.
        _torch.stop_workers(answers)


class _Asked:
    """The requests that were handed out and not answered yet, and those to come."""

    def __init__(self) -> None:
        self._requests: Iterator[Request] = iter(())
        self._open: deque[Request] = deque()

    def start(self, requests: Iterable[Request]) -> None:
        self._requests = iter(requests)
        self._open.clear()

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            self._open.append(request)
            yield request

    def answered(self) -> None:
        self._open.popleft()

    def awaited(self) -> str:
        return named(self._open[0]) if self._open else "the next batch"
