"""Workers that raise an error, die or hang; bad samples; and workers of epochs that were not finished."""

import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter

import pytest
import torch
import torch.utils.data._utils as torch_workers

from ftrain import data
from ftrain.data.worker_pool import WorkerOptions, _data_loader, read_from_workers
from ftrain.errors import DataError


class Faulty:
    """A dataset in which reading some indices fails: the name of a fault -> the indices."""

    draws = False
    may_be_killed = None

    def __init__(self, size, **faults):
        self.size, self.faults = size, {index: fault for fault, indices in faults.items() for index in indices}

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        fault = self.faults.get(index)
        if fault == "raises":
            raise KeyError(f"no picture {index}")
        if fault == "dies":
            os._exit(3)
        if fault == "killed":
            if self.may_be_killed is not None:
                self.may_be_killed.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        if fault == "hangs":
            time.sleep(60)
        return {"x": index, "tokens": [index] * 3}


def make_loader(dataset, batch_size=2, **options):
    return data.loader(dataset, batch_size, **{"shuffle": False, "collate": data.pad(), **options})


def values_of(loader):
    return [batch["x"].tolist() for batch in loader]


@pytest.fixture
def quick_end(monkeypatch):
    """Makes torch wait for less time for a worker that hangs when it is stopped."""
    monkeypatch.setattr(torch_workers, "MP_STATUS_CHECK_INTERVAL", 0.2)


# Errors


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_names_the_sample(num_workers):
    loader = make_loader(Faulty(10, raises=[5]), num_workers=num_workers)
    with pytest.raises(DataError, match=r"sample 5 of epoch 0 cannot be read: KeyError: 'no picture 5'") as caught:
        values_of(loader)
    # The traceback of the sample is shown too: as the cause, or as a note, because a worker cannot send a traceback.
    text = "".join(traceback.format_exception(caught.value))
    assert "__getitem__" in text
    assert "no picture" in text
    assert isinstance(caught.value.__cause__, KeyError) == (num_workers == 0)
    # The batches before it were yielded, and the position is after these.
    assert loader.state_dict()["window"] == 2
    with pytest.raises(DataError, match="sample 5"):
        values_of(loader)


def test_an_error_of_the_order_is_raised_after_the_batches_before_it():
    """Batches are requested from workers ahead of their use; those requested before the error are good."""
    lengths = dict(enumerate([1] * 9))
    loader = make_loader(Faulty(14), lengths=lengths.__getitem__, max_tokens=2, window=2, shuffle=False, num_workers=2)
    batches = iter(loader)
    assert values_of(itertools.islice(batches, 4)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(DataError, match=r"lengths\(9\) raised KeyError") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, KeyError)
    assert loader.state_dict()["window"] == 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_collation_names_the_samples(num_workers):
    def collate(samples):
        if samples[0]["x"] == 4:
            raise ValueError("no such shape")
        return data.pad()(samples)

    loader = make_loader(Faulty(10), num_workers=num_workers, collate=collate, context="fork")
    with pytest.raises(
        DataError, match=r"the batch of samples 4, 5 of epoch 0 cannot be collated: ValueError: no such"
    ):
        values_of(loader)


def test_long_batches_are_named_in_short():
    def collate(samples):
        raise ValueError("no")

    with pytest.raises(DataError, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more of epoch 0"):
        values_of(make_loader(Faulty(20), 20, collate=collate))


def test_an_error_that_cannot_be_sent():
    class OddError(Exception):
        def __init__(self, first, second):
            super().__init__(first, second)

        def __reduce__(self):
            raise TypeError("stays here")

    class Dataset(Faulty):
        def __getitem__(self, index):
            raise OddError(1, 2)

    with pytest.raises(DataError, match=r"sample 0 of epoch 0 cannot be read: OddError: \(1, 2\)"):
        values_of(make_loader(Dataset(4), num_workers=1, context="fork"))


# A worker that is killed while it hands over a tensor leaves torch's half of the socket open.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("fault", "reason"), [("dies", "exit code 3"), ("killed", "SIGKILL, as when .* out of memory")]
)
def test_a_worker_that_dies(fault, reason, quick_end):
    loader = make_loader(Faulty(12, **{fault: [6]}), num_workers=2, timeout=300)
    batches, actual = iter(loader), []
    expected = rf"a worker died.*samples \d+, \d+ of epoch 0 was awaited.*{reason}.*num_workers=0"
    with pytest.raises(DataError, match=expected):
        actual.extend(batch["x"].tolist() for batch in batches)
    assert actual == [[0, 1], [2, 3], [4, 5]][: len(actual)]
    # The next epoch has new workers, and reads the same sample again.
    with pytest.raises(DataError, match="a worker died"):
        list(loader)


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_interrupts_nothing_else(quick_end):
    """torch would raise an error wherever the main thread is, for example in the middle of a step."""
    children_before = {*multiprocessing.active_children()}
    dataset = Faulty(12, killed=[2])
    dataset.may_be_killed = multiprocessing.Event()
    batches = iter(make_loader(dataset, num_workers=1, timeout=300))
    next(batches)
    dataset.may_be_killed.set()
    start = time.monotonic()
    while {*multiprocessing.active_children()} - children_before:
        assert time.monotonic() < start + 60
        time.sleep(0.01)
    with pytest.raises(DataError, match="a worker died"):
        list(batches)


def test_torch_looks_for_dead_workers_while_it_waits(quick_end):
    """The signal of a death does not reach a loader in another thread, or one whose workers a server has forked."""
    options = WorkerOptions(num_workers=1, timeout=300, prefetch_factor=2, context=None)
    batches, waits = iter(_data_loader(Faulty(2), options, torch.Generator())), []
    queue_get = batches._data_queue.get
    batches._data_queue.get = lambda timeout: waits.append(timeout) or queue_get(timeout=timeout)
    assert len(list(batches)) == 2
    assert set(waits) == {0.2}


@pytest.mark.parametrize(
    "error", [EOFError(), ConnectionResetError(104, "reset by peer"), FileNotFoundError(2, "none")]
)
def test_a_worker_that_dies_while_a_tensor_is_fetched_from_it(error):
    def torn():
        raise error
        yield

    with pytest.raises(DataError, match=f"a worker died.*the 3rd was awaited: .*{re.escape(str(error)) or 'EOFError'}"):
        next(read_from_workers(torn(), 1.0, lambda: "the 3rd"))


class OfNotebook(list):
    """A dataset of a class that no file defines."""

    __module__ = "__main__"


def test_a_worker_that_cannot_import_the_program(quick_end, monkeypatch):
    """As in a notebook. A program without the guard ``__name__ == "__main__"`` fails at the same place."""
    monkeypatch.setattr(sys.modules["__main__"], "OfNotebook", OfNotebook, raising=False)
    loader = data.loader(OfNotebook([1, 2]), 1, num_workers=1, context="spawn")
    with pytest.raises(DataError, match=r"started by 'spawn' imports .* if __name__ == \"__main__\":, and"):
        list(loader)


def test_shared_memory_that_is_full():
    class Dataset(Faulty):
        def __getitem__(self, index):
            raise RuntimeError(
                "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
            )

    with pytest.raises(DataError, match=r"No space left on device.*--shm-size"):
        values_of(make_loader(Dataset(4), num_workers=1, context="fork"))


def test_a_worker_that_hangs(quick_end):
    # Long enough for a worker to start on a busy machine.
    loader = make_loader(Faulty(12, hangs=[4]), num_workers=1, timeout=2, context="fork")
    with pytest.raises(DataError, match=r"hung for longer than timeout=2 seconds.*samples 4, 5 of epoch 0"):
        list(loader)


def test_a_worker_that_hangs_in_an_unfinished_epoch_is_an_error_in_the_next(quick_end):
    loader = make_loader(Faulty(12, hangs=[4]), num_workers=1, timeout=2, context="fork")
    next(iter(loader))
    with pytest.raises(DataError, match="hung for longer"):
        list(loader)


def test_ctrl_c_ends_no_worker():
    loader = make_loader(Faulty(8, interrupted=[2]), num_workers=1, timeout=300)
    assert values_of(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


# Bad samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_skipped_and_counted(num_workers):
    loader = make_loader(Faulty(12, raises=[1, 4, 6]), 4, num_workers=num_workers, on_error="skip")
    with pytest.warns(UserWarning, match=r"sample 1 of epoch 0.*loader.skipped") as warned:
        actual = values_of(loader)
    # A warning of the first one; the others are counted. (Python warns too, about a fork, in another category.)
    assert len([warning for warning in warned if warning.category is UserWarning]) == 1
    assert loader.skipped == loader.state_dict()["skipped"] == 3
    # Batches keep their shape: good samples are repeated in place of bad ones.
    assert actual == [[0, 2, 3, 0], [5, 7, 5, 7], [8, 9, 10, 11]]


def test_the_number_of_skipped_samples_is_resumed_and_reset_when_an_epoch_starts_again():
    def loader():
        return make_loader(Faulty(12, raises=[1, 9]), 4, on_error="skip")

    first, second = loader(), loader()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = iter(first)
        next(batches)
        second.load_state_dict(first.state_dict())
        assert second.skipped == 1
        values_of(second)
        assert second.skipped == 2
        values_of(first)
        assert first.skipped == 2
        values_of(first)
        assert first.skipped == 4


def test_a_batch_without_a_good_sample_is_left_out():
    loader = make_loader(Faulty(6, raises=[2, 3]), on_error="skip")
    with pytest.warns(UserWarning, match="sample 2"):
        assert values_of(loader) == [[0, 1], [4, 5]]
    assert loader.skipped == 2
    resumed = make_loader(Faulty(6, raises=[2, 3]), on_error="skip")
    resumed.load_state_dict({**loader.state_dict(), "epoch": 0, "window": 2})
    assert values_of(resumed) == [[4, 5]]


def test_a_batch_without_a_good_sample_is_an_error_with_several_ranks():
    loader = make_loader(Faulty(8, raises=[4, 5]), num_ranks=2, on_error="skip")
    with (
        pytest.warns(UserWarning, match="sample 4"),
        pytest.raises(DataError, match=r"sample 4.*with several ranks no batch can be left out"),
    ):
        values_of(loader)


def test_bad_documents_become_padding():
    dataset = Faulty(8, raises=[0, 1, 2])
    loader = make_loader(dataset, lengths=[3] * 8, pack=6, collate=None, on_error="skip", window=8)
    with pytest.warns(UserWarning, match="sample"):
        batches = list(loader)
    assert {batch["tokens"].shape for batch in batches} == {(2, 6)}
    assert Counter(torch.cat([batch["tokens"].view(-1) for batch in batches]).tolist())[3] == 3
    assert sum(int((batch["documents"] >= 0).sum()) for batch in batches) == 15
    assert loader.skipped == 3


def test_raising_is_the_default():
    with pytest.raises(DataError, match='on_error="skip"'):
        values_of(make_loader(Faulty(4, raises=[3])))


# Processes of the workers


class Owner(Faulty):
    def __getitem__(self, index):
        return {"x": os.getpid()}


def test_workers_are_kept_from_epoch_to_epoch():
    loader = make_loader(Owner(8), num_workers=2)
    first = {pid for batch in values_of(loader) for pid in batch}
    assert len(first) == 2
    assert os.getpid() not in first
    next(iter(loader))
    assert {pid for batch in values_of(loader) for pid in batch} == first


# Newer versions of torch warn too.
@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_a_collate_function_that_cannot_be_sent_to_a_new_process_is_an_error():
    loader = make_loader(Faulty(4), num_workers=1, context="spawn", collate=lambda samples: samples)
    for _ in range(2):
        with pytest.raises(DataError, match=r"dataset or collate= cannot be sent to a worker.*lambda.*num_workers=0"):
            list(loader)


def test_more_workers_than_batches():
    assert values_of(make_loader(Faulty(3), num_workers=2, drop_last=False)) == [[0, 1], [2]]


def test_workers_read_on_the_host_whatever_the_default_device():
    loader = make_loader(Faulty(4), num_workers=1)
    with torch.device("meta"):
        assert values_of(loader) == [[0, 1], [2, 3]]


def test_our_datasets_and_collate_functions_can_be_pickled(tmp_path):
    data.write_tokens(tmp_path / "t.npy", [range(9)])
    sources = [data.TokenFile(tmp_path / "t.npy", 2), data.TokenDocuments(tmp_path / "t.npy")]
    sources.append(data.arrays({"x": torch.arange(3)}))
    for dataset in sources:
        for options in ({}, {"collate": data.pad(mask="tokens")}, {"lengths": [9] * len(dataset), "pack": 9}):
            loader = data.loader(dataset, 1, num_workers=1, context="spawn", **options)
            batches = loader._source._workers._dataset
            unpickled = pickle.loads(pickle.dumps(batches))
            assert str(unpickled._dataset[0]) == str(dataset[0])


def test_workers_that_are_not_forked_get_the_default_dtype(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    torch.set_default_dtype(torch.float64)
    try:
        options = WorkerOptions(num_workers=1, timeout=9, prefetch_factor=2, context="spawn")
        prepare = pickle.dumps(_data_loader(Faulty(1), options, torch.Generator()).worker_init_fn)
        torch.set_default_dtype(torch.float32)
        pickle.loads(prepare)(0)
        assert torch.rand(1).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
