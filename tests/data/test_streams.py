"""Iterable datasets, with and without a position of their own, in this process and in a worker."""

import os
import random
import time

import pytest
import torch
import torch.utils.data._utils as torch_workers
from torch.utils.data import IterableDataset

from ftrain import data
from ftrain.errors import ComposeError, DataError, OptionError

SIZE, BATCH = 14, 3


class Plain(IterableDataset):
    """A dataset without a position."""

    def __init__(self, size=SIZE):
        self.size = size

    def sample(self, index):
        return {"index": index, "drawn": torch.rand((), dtype=torch.float64) + random.random()}

    def __iter__(self):
        for index in range(self.size):
            yield self.sample(index)


class AddsDraws(Plain):
    """A sample depends on what the earlier ones have drawn, as behind a shuffle buffer."""

    def __iter__(self):
        drawn = 0.0
        for sample in super().__iter__():
            drawn += sample["drawn"]
            yield {**sample, "drawn": drawn}


class KeepsPosition(Plain):
    """Keeps its position, and continues from it, as datasets with a cursor do."""

    read = 0

    def __init__(self, size=SIZE):
        super().__init__(size)
        self.next = 0

    def __iter__(self):
        while self.next < self.size:
            self.next += 1
            self.read += 1
            yield self.sample(self.next - 1)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class CountsEpochs(KeepsPosition):
    """Its epochs differ, and it counts them itself, so its position includes the number of finished epochs."""

    epochs = 0

    def __iter__(self):
        for sample in super().__iter__():
            yield {**sample, "index": sample["index"] + 100 * self.epochs}
        self.epochs += 1

    def state_dict(self):
        return {"next": self.next, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.next, self.epochs = state["next"], state["epochs"]


class RestartsEpochs(KeepsPosition):
    """Starts each epoch at the first sample; the position after an epoch is its end, without samples after it."""

    first = 0

    def __iter__(self):
        first, self.first = self.first, 0
        for index in range(first, self.size):
            self.next = index + 1
            yield self.sample(index)

    def load_state_dict(self, state):
        self.next = self.first = state["next"]


class StaysAtLoadedPosition(RestartsEpochs):
    """Starts each epoch at the position that was loaded last."""

    def __iter__(self):
        for index in range(self.first, self.size):
            self.next = index + 1
            yield self.sample(index)


class WithGetState(KeepsPosition):
    """Has the other pair of methods, ``get_state`` and ``set_state``."""

    state_dict = load_state_dict = None

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


class ShufflesByEpoch(Plain):
    """Like an IterableDataset of Hugging Face: shuffled by epoch, and a state that belongs to one."""

    def __init__(self, size=SIZE):
        super().__init__(size)
        self.epoch, self.at, self.loaded = 0, 0, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.loaded = state

    def __iter__(self):
        # A loaded state is used only in its own epoch.
        first = self.loaded["at"] if self.loaded and self.loaded["epoch"] == self.epoch else 0
        order = data.shuffled(range(self.size), self.size, epoch=self.epoch).tolist()
        for position in range(first, self.size):
            self.at = position + 1
            yield self.sample(order[position])


class ByIterator(Plain):
    """The iterator keeps the position, as torchdata allows."""

    def __iter__(self):
        return _Cursor(self)


class _Cursor:
    def __init__(self, dataset):
        self.dataset, self.next = dataset, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.dataset.size:
            raise StopIteration
        self.next += 1
        return self.dataset.sample(self.next - 1)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


KEEPERS = [KeepsPosition, CountsEpochs, RestartsEpochs, WithGetState, ShufflesByEpoch, ByIterator]


def make_loader(dataset, **options):
    return data.loader(dataset, BATCH, **{"shuffle": False, "drop_last": False, **options})


def rows(batches):
    return [list(zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True)) for batch in batches]


def test_batches_come_in_the_order_of_the_stream():
    assert [batch["index"].tolist() for batch in make_loader(Plain(7))] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [batch["index"].tolist() for batch in make_loader(Plain(7), drop_last=True)] == [[0, 1, 2], [3, 4, 5]]
    assert list(make_loader(Plain(2), drop_last=True)) == list(make_loader(Plain(0))) == []


@pytest.mark.parametrize("dataset_class", KEEPERS)
def test_resuming_anywhere(dataset_class):
    whole = make_loader(dataset_class())
    passes = [rows(whole) for _ in range(3)]
    assert len({tuple(map(tuple, actual)) for actual in passes}) == 3
    for stop in range(len(passes[1]) + 1):
        first, second = make_loader(dataset_class()), make_loader(dataset_class())
        list(first)
        batches = iter(first)
        assert rows([next(batches) for _ in range(stop)]) == passes[1][:stop]
        second.load_state_dict(first.state_dict())
        assert rows(second) == passes[1][stop:]
        assert rows(second) == passes[2]


@pytest.mark.parametrize("dataset_class", KEEPERS)
def test_resuming_reads_nothing_again(dataset_class):
    first, dataset = make_loader(dataset_class()), dataset_class(10**12)
    batches = iter(first)
    next(batches)
    state = {**first.state_dict(), "batch": 10**9}
    state["source"] = {**state["source"], **({"at": 10**6} if dataset_class is ShufflesByEpoch else {"next": 10**11})}
    if dataset_class is ShufflesByEpoch:
        dataset = dataset_class(10**6 + 5)
    loader = make_loader(dataset)
    loader.load_state_dict(state)
    start = time.process_time()
    next(iter(loader))
    assert time.process_time() - start < 5


@pytest.mark.parametrize("dataset_class", KEEPERS)
def test_an_iterator_that_was_left_changes_nothing(dataset_class):
    expected = make_loader(dataset_class())
    passes = [rows(expected) for _ in range(2)]
    loader = make_loader(dataset_class())
    for actual in passes:
        next(iter(loader))
        assert rows(loader) == actual


@pytest.mark.parametrize("dataset_class", [KeepsPosition, ShufflesByEpoch])
def test_a_stream_in_one_worker_is_resumed(dataset_class):
    """The position is that after the batches that were yielded, not after those that the worker has read."""
    passes = [rows(make_loader(dataset_class()))]
    loader = make_loader(dataset_class(), num_workers=1)
    batches = iter(loader)
    assert rows([next(batches), next(batches)]) == passes[0][:2]
    state = loader.state_dict()
    assert state["source"].get("next", state["source"].get("at")) == 2 * BATCH
    in_this_process = make_loader(dataset_class())
    in_this_process.load_state_dict(state)
    assert rows(in_this_process) == passes[0][2:]
    loader.load_state_dict(state)
    assert rows(loader) == passes[0][2:]


@pytest.mark.parametrize("size", [SIZE, 2 * BATCH])
@pytest.mark.parametrize("dataset_class", [CountsEpochs, RestartsEpochs, StaysAtLoadedPosition, ByIterator])
def test_epochs_follow_each_other_in_one_worker_as_in_this_process(dataset_class, size):
    """Each epoch has a new worker, which gets the position at the end of the epoch before."""
    in_this_process = make_loader(dataset_class(size))
    epochs = [rows(in_this_process) for _ in range(2)]
    loader = make_loader(dataset_class(size), num_workers=1)
    assert rows(loader) == epochs[0]
    state = loader.state_dict()
    assert rows(loader) == epochs[1]
    later = make_loader(dataset_class(size))
    later.load_state_dict(state)
    assert rows(later) == epochs[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_a_position_samples_are_read_again_with_one_warning(num_workers):
    whole = make_loader(AddsDraws())
    passes = [rows(whole) for _ in range(2)]
    first, second = make_loader(AddsDraws()), make_loader(AddsDraws(), num_workers=num_workers)
    batches = iter(first)
    next(batches), next(batches)
    second.load_state_dict(first.state_dict())
    with pytest.warns(
        UserWarning, match=r"AddsDraws has neither state_dict nor get_state, so 6 samples are read again"
    ) as caught:
        assert rows(second) == passes[0][2:]
    assert len([warning for warning in caught if warning.category is UserWarning]) == 1
    assert rows(second) == passes[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_ends_before_the_position_is_an_error(num_workers):
    first, second = make_loader(Plain()), make_loader(Plain(5), num_workers=num_workers)
    batches = iter(first)
    next(batches), next(batches)
    second.load_state_dict(first.state_dict())
    with (
        pytest.warns(UserWarning, match="6 samples are read again"),
        pytest.raises(DataError, match=r"it ended after 5 samples, and 6 were read before; .* the dataset of the"),
    ):
        rows(second)


def test_a_position_from_a_dataset_that_had_none_is_warned_of():
    first, second = make_loader(Plain()), make_loader(KeepsPosition())
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.warns(
        UserWarning, match="KeepsPosition had no position when this one was saved, so 3 samples are read again"
    ):
        rows(second)


def test_any_object_that_can_be_iterated_many_times_is_a_stream():
    class Twice:
        def __iter__(self):
            return iter([{"x": 1}, {"x": 2}])

    loader = data.loader(Twice(), 2, shuffle=False)
    assert [batch["x"].tolist() for _ in range(2) for batch in loader] == [[1, 2], [1, 2]]
    with pytest.raises(ComposeError, match="stream"):
        len(loader)


@pytest.mark.parametrize(("drop_last", "length"), [(True, 2), (False, 3)])
def test_a_stream_with_a_length_has_a_number_of_batches(drop_last, length):
    class Sized(Plain):
        def __len__(self):
            return self.size

    loader = make_loader(Sized(7), drop_last=drop_last)
    assert len(loader) == len(list(loader)) == length


# Faults


class Breaks(Plain):
    def __init__(self, fault):
        super().__init__(9)
        self.fault = fault

    def sample(self, index):
        if index == 4 and self.fault == "raises":
            raise OSError("gone")
        if index == 4 and self.fault == "dies":
            os._exit(1)
        if index == 4 and self.fault == "hangs":
            time.sleep(60)
        return super().sample(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_names_the_sample_by_its_place(num_workers):
    loader = make_loader(Breaks("raises"), num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    with pytest.raises(DataError, match="sample 4 of the stream, epoch 0: OSError: gone"):
        next(batches)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_worker_that_dies_or_hangs(fault, monkeypatch):
    monkeypatch.setattr(torch_workers, "MP_STATUS_CHECK_INTERVAL", 0.2)
    with pytest.raises(DataError, match=r"a worker died, or hung.*the next batch of the stream"):
        list(make_loader(Breaks(fault), num_workers=1, timeout=0.5))


def test_a_collation_that_fails():
    def collate(samples):
        raise ValueError("no")

    expected = r"samples 0 to 2 of the stream, epoch 0, cannot be collated: ValueError: no; repair the samples"
    with pytest.raises(DataError, match=expected):
        list(make_loader(Plain(), collate=collate))


def test_a_stream_that_cannot_be_opened():
    class Shut(IterableDataset):
        def __iter__(self):
            raise OSError("shut")

    with pytest.raises(DataError, match="the stream of epoch 0 cannot be opened: OSError: shut"):
        list(make_loader(Shut()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "shuffle=False"),
        ({"num_workers": 2}, "num_workers=1 instead of 2"),
        ({"num_ranks": 2}, "num_ranks=1"),
        ({"lengths": [1] * SIZE}, "no lengths"),
        ({"pack": 8}, "no .*pack="),
        ({"max_tokens": 8}, "no .*max_tokens="),
        ({"on_error": "skip"}, "a stream that raised has ended"),
    ],
)
def test_options_that_a_stream_does_not_support_are_errors(options, message):
    with pytest.raises(OptionError, match=f"Plain is an iterable dataset, and needs .*{message}"):
        make_loader(Plain(), **options)
