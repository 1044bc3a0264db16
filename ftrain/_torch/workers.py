"""Worker processes of torch's `DataLoader`, whose death is noticed within seconds."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from ftrain._torch import private_names

with private_names():
    from torch.utils.data import _utils as settings
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    _stop_workers = _MultiProcessingDataLoaderIter._shutdown_workers
    _try_get_data: Any = _MultiProcessingDataLoaderIter._try_get_data
    _ = settings.MP_STATUS_CHECK_INTERVAL, DataLoader._get_iterator


class _Watching(_MultiProcessingDataLoaderIter):
    """Looks every few seconds whether the workers live, as torch does for a loader without a timeout.

    With one, torch looks when that has passed. A signal may say so before, but reaches the main thread alone, and no
    process whose workers a server has forked (``forkserver``, Python's default on Linux from 3.14 on).
    """

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
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        _stop_workers(iterator)
