"""A `DataLoader` that notices the death of a worker process within seconds, when it waits for the next batch."""

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
    """Checks every few seconds that the workers live, as torch does for a loader without a timeout.

    For a loader with a timeout, torch checks only after the timeout.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        # When a worker dies, torch's handler of SIGCHLD raises an error at any place in the main thread. In a step that
        # would leave a state that is partly overwritten, and other ranks that wait.
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
    """Return the signals and exit codes of ended workers of a `DataLoader` iterator, as a text; "" if all live."""
    workers = iterator._workers if isinstance(iterator, _MultiProcessingDataLoaderIter) else []
    codes = {worker.exitcode for worker in workers if worker.exitcode is not None}
    texts = [signal.Signals(-code).name if code < 0 else f"exit code {code}" for code in codes]
    out_of_memory = ", as when the system runs out of memory" if -signal.SIGKILL in codes else ""
    return f": {', '.join(texts)}{out_of_memory}" if texts else ""
