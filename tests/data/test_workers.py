"""Workers that raise, die or hang; bad samples; and loaders whose workers are left in the middle of a pass."""

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
    """Does what `faults` says of an index; these are actions by name, so that they can be sent."""

    draws = False
    may_be_killed = None

    def __init__(self, size, **faults):
        self.size, self.faults = size, {index: fault for fault, actual in faults.items() for index in actual}

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


def made(dataset, batch_size=2, **options):
    return data.loader(dataset, batch_size, **{"shuffle": False, "collate": data.pad(), **options})


def taken(loader):
    return [batch["x"].tolist() for batch in loader]


@pytest.fixture
def quick_end(monkeypatch):
    """A worker that hangs is waited for a little less when it is stopped."""
    monkeypatch.setattr(torch_workers, "MP_STATUS_CHECK_INTERVAL", 0.2)


# Errors


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_names_the_sample(num_workers):
    loader = made(Faulty(10, raises=[5]), num_workers=num_workers)
    with pytest.raises(DataError, match=r"sample 5 of epoch 0 cannot be read: KeyError: 'no picture 5'") as caught:
        taken(loader)
    # Where it came from is shown too: as its cause, or as a note, for a traceback cannot be sent.
    text = "".join(traceback.format_exception(caught.value))
    assert "__getitem__" in text
    assert "no picture" in text
    assert isinstance(caught.value.__cause__, KeyError) == (num_workers == 0)
    # The batches before it were yielded, and the position is after these.
    assert loader.state_dict()["window"] == 2
    with pytest.raises(DataError, match="sample 5"):
        taken(loader)


def test_an_error_of_the_order_comes_when_its_turn_has_come():
    """Workers are asked for batches ahead of their use; those that were asked for before the error are good."""
    lengths = dict(enumerate([1] * 9))
    loader = made(Faulty(14), lengths=lengths.__getitem__, max_tokens=2, window=2, shuffle=False, num_workers=2)
    batches = iter(loader)
    assert taken(itertools.islice(batches, 4)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
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

    loader = made(Faulty(10), num_workers=num_workers, collate=collate, context="fork")
    with pytest.raises(
        DataError, match=r"the batch of samples 4, 5 of epoch 0 cannot be collated: ValueError: no such"
    ):
        taken(loader)


def test_long_batches_are_named_in_short():
    def collate(samples):
        raise ValueError("no")

    with pytest.raises(DataError, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more of epoch 0"):
        taken(made(Faulty(20), 20, collate=collate))


def test_an_error_that_cannot_be_sent():
    class OddError(Exception):
        def __init__(self, one, other):
            super().__init__(one, other)

        def __reduce__(self):
            raise TypeError("stays here")

    class Dataset(Faulty):
        def __getitem__(self, index):
            raise OddError(1, 2)

    with pytest.raises(DataError, match=r"sample 0 of epoch 0 cannot be read: OddError: \(1, 2\)"):
        taken(made(Dataset(4), num_workers=1, context="fork"))


# A worker that is killed while it hands over a tensor leaves torch's half of the socket open.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("fault", "how"), [("dies", "exit code 3"), ("killed", "SIGKILL, as when .* out of memory")])
def test_a_worker_that_dies(fault, how, quick_end):
    loader = made(Faulty(12, **{fault: [6]}), num_workers=2, timeout=300)
    begun, actual = iter(loader), []
    expected = rf"a worker died.*samples \d+, \d+ of epoch 0 was awaited.*{how}.*num_workers=0"
    with pytest.raises(DataError, match=expected):
        actual.extend(batch["x"].tolist() for batch in begun)
    assert actual == [[0, 1], [2, 3], [4, 5]][: len(actual)]
    # The next pass has new workers, and meets what killed the last one again.
    with pytest.raises(DataError, match="a worker died"):
        list(loader)


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_interrupts_nothing_else(quick_end):
    """Torch would raise where the main thread is, such as in the middle of a step."""
    others = {*multiprocessing.active_children()}
    dataset = Faulty(12, killed=[2])
    dataset.may_be_killed = multiprocessing.Event()
    begun = iter(made(dataset, num_workers=1, timeout=300))
    next(begun)
    dataset.may_be_killed.set()
    begin = time.monotonic()
    while {*multiprocessing.active_children()} - others:
        assert time.monotonic() < begin + 60
        time.sleep(0.01)
    with pytest.raises(DataError, match="a worker died"):
        list(begun)


def test_torch_looks_for_dead_workers_while_it_waits(quick_end):
    """The signal of a death does not reach a loader in another thread, or one whose workers a server has forked."""
    options = WorkerOptions(num_workers=1, timeout=300, prefetch_factor=2, context=None)
    begun, waits = iter(_data_loader(Faulty(2), options, torch.Generator())), []
    queue_get = begun._data_queue.get
    begun._data_queue.get = lambda timeout: waits.append(timeout) or queue_get(timeout=timeout)
    assert len(list(begun)) == 2
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
    """A dataset of a class that is in no file."""

    __module__ = "__main__"


def test_a_worker_that_cannot_import_the_program(quick_end, monkeypatch):
    """As that of a notebook; and a program without a guard dies in the same place."""
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
        taken(made(Dataset(4), num_workers=1, context="fork"))


def test_a_worker_that_hangs(quick_end):
    # Long enough for a worker to start on a busy machine.
    loader = made(Faulty(12, hangs=[4]), num_workers=1, timeout=2, context="fork")
    with pytest.raises(DataError, match=r"hung for longer than timeout=2 seconds.*samples 4, 5 of epoch 0"):
        list(loader)


def test_a_worker_that_hangs_over_a_pass_that_was_left(quick_end):
    loader = made(Faulty(12, hangs=[4]), num_workers=1, timeout=2, context="fork")
    next(iter(loader))
    with pytest.raises(DataError, match="hung for longer"):
        list(loader)


def test_ctrl_c_ends_no_worker():
    loader = made(Faulty(8, interrupted=[2]), num_workers=1, timeout=300)
    assert taken(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


# Bad samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_skipped_and_counted(num_workers):
    loader = made(Faulty(12, raises=[1, 4, 6]), 4, num_workers=num_workers, on_error="skip")
    with pytest.warns(UserWarning, match=r"sample 1 of epoch 0.*loader.skipped") as warned:
        actual = taken(loader)
    # Only of the first; the others are counted. (Python has a warning of its own about a fork.)
    assert len([each for each in warned if each.category is UserWarning]) == 1
    assert loader.skipped == loader.state_dict()["skipped"] == 3
    # Batches keep their shape: good samples take the places of bad ones.
    assert actual == [[0, 2, 3, 0], [5, 7, 5, 7], [8, 9, 10, 11]]


def test_the_count_is_resumed_and_a_pass_that_starts_over_counts_anew():
    def loader():
        return made(Faulty(12, raises=[1, 9]), 4, on_error="skip")

    first, second = loader(), loader()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun = iter(first)
        next(begun)
        second.load_state_dict(first.state_dict())
        assert second.skipped == 1
        taken(second)
        assert second.skipped == 2
        taken(first)
        assert first.skipped == 2
        taken(first)
        assert first.skipped == 4


def test_a_batch_without_a_good_sample_is_left_out():
    loader = made(Faulty(6, raises=[2, 3]), on_error="skip")
    with pytest.warns(UserWarning, match="sample 2"):
        assert taken(loader) == [[0, 1], [4, 5]]
    assert loader.skipped == 2
    resumed = made(Faulty(6, raises=[2, 3]), on_error="skip")
    resumed.load_state_dict({**loader.state_dict(), "epoch": 0, "window": 2})
    assert taken(resumed) == [[4, 5]]


def test_but_not_where_other_ranks_would_wait_for_it():
    loader = made(Faulty(8, raises=[4, 5]), num_ranks=2, on_error="skip")
    with (
        pytest.warns(UserWarning, match="sample 4"),
        pytest.raises(DataError, match=r"sample 4.*with several ranks no batch can be left out"),
    ):
        taken(loader)


def test_bad_documents_leave_their_place_empty():
    dataset = Faulty(8, raises=[0, 1, 2])
    loader = made(dataset, lengths=[3] * 8, pack=6, collate=None, on_error="skip", window=8)
    with pytest.warns(UserWarning, match="sample"):
        batches = list(loader)
    assert {batch["tokens"].shape for batch in batches} == {(2, 6)}
    assert Counter(torch.cat([batch["tokens"].view(-1) for batch in batches]).tolist())[3] == 3
    assert sum(int((batch["documents"] >= 0).sum()) for batch in batches) == 15
    assert loader.skipped == 3


def test_raising_is_the_default():
    with pytest.raises(DataError, match='on_error="skip"'):
        taken(made(Faulty(4, raises=[3])))


# Life of the workers


class Owner(Faulty):
    def __getitem__(self, index):
        return {"x": os.getpid()}


def test_workers_live_from_pass_to_pass():
    loader = made(Owner(8), num_workers=2)
    first = {pid for batch in taken(loader) for pid in batch}
    assert len(first) == 2
    assert os.getpid() not in first
    next(iter(loader))
    assert {pid for batch in taken(loader) for pid in batch} == first


# Torch says it too, from some version on.
@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_what_cannot_be_sent_to_a_new_process():
    loader = made(Faulty(4), num_workers=1, context="spawn", collate=lambda samples: samples)
    for _ in range(2):
        with pytest.raises(DataError, match=r"dataset or collate= cannot be sent to a worker.*lambda.*num_workers=0"):
            list(loader)


def test_more_workers_than_batches():
    assert taken(made(Faulty(3), num_workers=2, drop_last=False)) == [[0, 1], [2]]


def test_workers_read_on_the_host_whatever_the_default_device():
    loader = made(Faulty(4), num_workers=1)
    with torch.device("meta"):
        assert taken(loader) == [[0, 1], [2, 3]]


def test_what_goes_to_a_new_process_can_be_sent(tmp_path):
    data.write_tokens(tmp_path / "t.npy", [range(9)])
    sources = [data.TokenFile(tmp_path / "t.npy", 2), data.TokenDocuments(tmp_path / "t.npy")]
    sources.append(data.arrays({"x": torch.arange(3)}))
    for dataset in sources:
        for options in ({}, {"collate": data.pad(mask="tokens")}, {"lengths": [9] * len(dataset), "pack": 9}):
            loader = data.loader(dataset, 1, num_workers=1, context="spawn", **options)
            batches = loader._source._workers._dataset
            sent = pickle.loads(pickle.dumps(batches))
            assert str(sent._dataset[0]) == str(dataset[0])


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
