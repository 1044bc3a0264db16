"""Iterable datasets: with a position of their own or without, in this process and in a worker."""

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
    """Knows nothing of positions."""

    def __init__(self, size=SIZE):
        self.size = size

    def sample(self, index):
        return {"index": index, "drawn": torch.rand((), dtype=torch.float64) + random.random()}

    def __iter__(self):
        for index in range(self.size):
            yield self.sample(index)


class Keeps(Plain):
    """Keeps its position, and goes on from it: as datasets with a cursor do."""

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


class Counts(Keeps):
    """Its epochs differ, and it counts them itself: what it yields next depends on where the epoch before ended."""

    epochs = 0

    def __iter__(self):
        for sample in super().__iter__():
            yield {**sample, "index": sample["index"] + 100 * self.epochs}
        self.epochs += 1

    def state_dict(self):
        return {"next": self.next, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.next, self.epochs = state["next"], state["epochs"]


class Restarts(Keeps):
    """Starts over by itself, but has no samples from the position at the end of an epoch on."""

    first = 0

    def __iter__(self):
        first, self.first = self.first, 0
        for index in range(first, self.size):
            self.next = index + 1
            yield self.sample(index)

    def load_state_dict(self, state):
        self.next = self.first = state["next"]


class Stays(Restarts):
    """Starts each epoch at the position that was loaded last."""

    def __iter__(self):
        for index in range(self.first, self.size):
            self.next = index + 1
            yield self.sample(index)


class Named(Keeps):
    """The other pair of names."""

    state_dict = load_state_dict = None

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


class Shuffles(Plain):
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
        # The loaded state stays, and counts in its own epoch only.
        first = self.loaded["at"] if self.loaded and self.loaded["epoch"] == self.epoch else 0
        order = data.shuffled(range(self.size), self.size, epoch=self.epoch).tolist()
        for place in range(first, self.size):
            self.at = place + 1
            yield self.sample(order[place])


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


KEEPERS = [Keeps, Counts, Restarts, Named, Shuffles, ByIterator]


def made(dataset, **options):
    return data.loader(dataset, BATCH, **{"shuffle": False, "drop_last": False, **options})


def rows(batches):
    return [list(zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True)) for batch in batches]


def test_batches_come_in_the_order_of_the_stream():
    assert [batch["index"].tolist() for batch in made(Plain(7))] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [batch["index"].tolist() for batch in made(Plain(7), drop_last=True)] == [[0, 1, 2], [3, 4, 5]]
    assert list(made(Plain(2), drop_last=True)) == list(made(Plain(0))) == []


@pytest.mark.parametrize("kind", KEEPERS)
def test_resuming_anywhere(kind):
    whole = made(kind())
    passes = [rows(whole) for _ in range(3)]
    assert len({tuple(map(tuple, actual)) for actual in passes}) == 3
    for stop in range(len(passes[1]) + 1):
        first, second = made(kind()), made(kind())
        list(first)
        begun = iter(first)
        assert rows([next(begun) for _ in range(stop)]) == passes[1][:stop]
        second.load_state_dict(first.state_dict())
        assert rows(second) == passes[1][stop:]
        assert rows(second) == passes[2]


@pytest.mark.parametrize("kind", KEEPERS)
def test_resuming_reads_nothing_again(kind):
    first, dataset = made(kind()), kind(10**12)
    begun = iter(first)
    next(begun)
    state = {**first.state_dict(), "batch": 10**9}
    state["source"] = {**state["source"], **({"at": 10**6} if kind is Shuffles else {"next": 10**11})}
    if kind is Shuffles:
        dataset = kind(10**6 + 5)
    loader = made(dataset)
    loader.load_state_dict(state)
    start = time.process_time()
    next(iter(loader))
    assert time.process_time() - start < 5


@pytest.mark.parametrize("kind", KEEPERS)
def test_peeking_changes_nothing(kind):
    expected = made(kind())
    passes = [rows(expected) for _ in range(2)]
    loader = made(kind())
    for actual in passes:
        next(iter(loader))
        assert rows(loader) == actual


@pytest.mark.parametrize("kind", [Keeps, Shuffles])
def test_in_one_worker(kind):
    """The worker sends the position with each batch: that of the batches yielded, not of those it has prepared."""
    passes = [rows(made(kind()))]
    loader = made(kind(), num_workers=1)
    begun = iter(loader)
    assert rows([next(begun), next(begun)]) == passes[0][:2]
    state = loader.state_dict()
    assert state["source"].get("next", state["source"].get("at")) == 2 * BATCH
    here = made(kind())
    here.load_state_dict(state)
    assert rows(here) == passes[0][2:]
    loader.load_state_dict(state)
    assert rows(loader) == passes[0][2:]


@pytest.mark.parametrize("size", [SIZE, 2 * BATCH])
@pytest.mark.parametrize("kind", [Counts, Restarts, Stays, ByIterator])
def test_epochs_follow_each_other_in_one_worker_as_in_this_process(kind, size):
    """Each epoch has a worker of its own, to which the position at the end of the one before is sent."""
    here = made(kind(size))
    epochs = [rows(here) for _ in range(2)]
    loader = made(kind(size), num_workers=1)
    assert rows(loader) == epochs[0]
    state = loader.state_dict()
    assert rows(loader) == epochs[1]
    later = made(kind(size))
    later.load_state_dict(state)
    assert rows(later) == epochs[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_a_position_samples_are_read_again_and_this_is_said_once(num_workers):
    whole = made(Plain())
    passes = [rows(whole) for _ in range(2)]
    first, second = made(Plain()), made(Plain(), num_workers=num_workers)
    begun = iter(first)
    next(begun), next(begun)
    second.load_state_dict(first.state_dict())
    with pytest.warns(
        UserWarning, match=r"Plain has neither state_dict nor get_state, so 6 samples are read again"
    ) as said:
        assert rows(second) == passes[0][2:]
    assert len([each for each in said if each.category is UserWarning]) == 1
    assert rows(second) == passes[1]


def test_a_dataset_that_had_no_position_when_it_was_saved():
    first, second = made(Plain()), made(Keeps())
    next(iter(first))
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="Keeps had no position when this one was saved, so 3 samples are read again"):
        rows(second)


def test_any_iterable_that_can_be_gone_through_again():
    class Twice:
        def __iter__(self):
            return iter([{"x": 1}, {"x": 2}])

    loader = data.loader(Twice(), 2, shuffle=False)
    assert [batch["x"].tolist() for _ in range(2) for batch in loader] == [[1, 2], [1, 2]]
    with pytest.raises(ComposeError, match="stream"):
        len(loader)


@pytest.mark.parametrize(("drop_last", "length"), [(True, 2), (False, 3)])
def test_the_length_where_the_dataset_has_one(drop_last, length):
    class Sized(Plain):
        def __len__(self):
            return self.size

    loader = made(Sized(7), drop_last=drop_last)
    assert len(loader) == len(list(loader)) == length


# Faults


class Breaks(Plain):
    def __init__(self, how):
        super().__init__(9)
        self.how = how

    def sample(self, index):
        if index == 4 and self.how == "raises":
            raise OSError("gone")
        if index == 4 and self.how == "dies":
            os._exit(1)
        if index == 4 and self.how == "hangs":
            time.sleep(60)
        return super().sample(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_names_the_sample_by_its_place(num_workers):
    loader = made(Breaks("raises"), num_workers=num_workers)
    begun = iter(loader)
    next(begun)
    with pytest.raises(DataError, match="sample 4 of the stream, epoch 0: OSError: gone"):
        next(begun)


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_worker_that_dies_or_hangs(how, monkeypatch):
    monkeypatch.setattr(torch_workers, "MP_STATUS_CHECK_INTERVAL", 0.2)
    with pytest.raises(DataError, match=r"a worker died, or hung.*the next batch of the stream"):
        list(made(Breaks(how), num_workers=1, timeout=0.5))


def test_a_collation_that_fails():
    def collate(samples):
        raise ValueError("no")

    expected = r"samples 0 to 2 of the stream, epoch 0, cannot be collated: ValueError: no; repair the samples"
    with pytest.raises(DataError, match=expected):
        list(made(Plain(), collate=collate))


def test_a_stream_that_cannot_be_opened():
    class Shut(IterableDataset):
        def __iter__(self):
            raise OSError("shut")

    with pytest.raises(DataError, match="the stream of epoch 0 cannot be opened: OSError: shut"):
        list(made(Shut()))


@pytest.mark.parametrize(
    ("options", "words"),
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
def test_what_a_stream_cannot_do(options, words):
    with pytest.raises(OptionError, match=f"Plain is an iterable dataset, and needs .*{words}"):
        made(Plain(), **options)
