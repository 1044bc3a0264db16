"""Worker processes of torch's `DataLoader`, whose death is noticed within seconds, where their batches are awaited."""

from __future__ import annotations

import signal
from typing import Any

from torch.utils.data import DataLoader

from ftrain._torch import private_names

with private_names():
    from torch._C import _remove_worker_pids
    from torch.utils.data import _utils as settings
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    _stop_workers = _MultiProcessingDataLoaderIter._shutdown_workers
    _try_get_data: Any = _MultiProcessingDataLoaderIter._try_get_data
    _ = settings.MP_STATUS_CHECK_INTERVAL, DataLoader._get_iterator


class _Watching(_MultiProcessingDataLoaderIter):
    """Looks every few seconds whether the workers live, as torch does for a loader without a timeout.

    With one, torch looks when that has passed.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        # Torch's handler of SIGCHLD would raise wherever the main thread is when a worker dies, such as within a step,
        # which may have overwritten a part of its state, and for which other ranks wait.
        _remove_worker_pids(id(self))
        self._worker_pids_set = False

    def _try_get_data(self, timeout: float = settings.MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        received: tuple[bool, Any] = (False, None)
        while timeout > 0 and not received[0]:
            seconds = min(timeout, settings.MP_STATUS_CHECK_INTERVAL)
            received, timeout = _try_get_data(self, seconds), timeout - seconds
        return received


class WatchedLoader(DataLoader[Any]):
    """A `DataLoader` with workers that notices within seconds when one has died, in any thread."""

    def _get_iterator(self) -> Any:
        self.check_worker_number_rationality()
        return _Watching(self)


def stop_workers(iterator: Any) -> None:
    """Stop the worker processes of an iterator of a `DataLoader`, if it has any."""
    # The garbage collector would take five seconds per worker: it closes the queues before the loader can tell
    # the workers to end.
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        _stop_workers(iterator)


def how_workers_ended(iterator: Any) -> str:
    """Return the signals and exit codes of workers of an iterator of a `DataLoader` that have ended; "" if all live."""
    workers = iterator._workers if isinstance(iterator, _MultiProcessingDataLoaderIter) else []
    codes = {worker.exitcode for worker in workers if worker.exitcode is not None}
    texts = [signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in codes]
    out_of_memory = ", as when the system runs out of memory" if -signal.SIGKILL in codes else ""
    return f": {', '.join(texts)}{out_of_memory}" if texts else ""
