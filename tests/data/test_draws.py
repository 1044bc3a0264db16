"""The random numbers of samples depend on seed, epoch and index; generators are seeded only for samples that draw."""

import functools
import pickle
import random
from contextlib import nullcontext
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ftrain import data
from ftrain.data import rng_streams
from ftrain.errors import DataError

SIZE, BATCH = 24, 4

SOURCES = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": np.random.rand,
    "gauss": lambda: random.gauss(0, 1),
    "normal": lambda: float(torch.randn(())),
    "bytes": lambda: np.random.bytes(3),
}


class Sometimes:
    """Draws for some indices, and counts how often each is read."""

    def __init__(self, source, indices, size=SIZE):
        self.source, self.indices, self.size, self.reads = source, indices, size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.reads.append(index)
        return index, SOURCES[self.source]() if index in self.indices else None


class Always(Sometimes):
    """The same, and says that it draws, so that it is seeded for each sample."""

    draws = True


def seed_all():
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def read_passes(dataset, passes=2, **options):
    loader = data.loader(dataset, BATCH, collate=list, **options)
    return [list(loader) for _ in range(passes)]


@functools.cache
def expected_samples(source, indices):
    """Return the samples of two epochs, each seeded by itself, without a loader."""
    dataset = Sometimes(source, indices)

    def sample(epoch, index):
        rng_streams.seed_sample(0, epoch, index)
        return dataset[index]

    with rng_streams.PreservedState():
        return [[sample(epoch, index) for index in range(SIZE)] for epoch in range(2)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("indices", [tuple(range(SIZE)), (17,), (3, 4, 21)])
def test_samples_that_draw_seldom_draw_the_same(source, indices):
    actual = read_passes(Sometimes(source, indices))
    assert [sorted(sample for batch in batches for sample in batch) for batches in actual] == expected_samples(
        source, indices
    )
    assert actual == read_passes(Always(source, indices))


def test_samples_that_draw_seldom_draw_the_same_in_workers():
    expected = read_passes(Always("numpy", (3, 17)))
    assert read_passes(Sometimes("numpy", (3, 17)), num_workers=2) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [("torch", 0.47761476039886475), ("python", 0.7980265284288426), ("numpy", 0.8089606049709576)],
)
def test_a_sample_draws_what_it_has_always_drawn(source, expected):
    """The numbers are those of a version of the loader that seeded for every sample."""
    _, batches = read_passes(Sometimes(source, (17,)), seed=3)
    assert (17, expected) in chain.from_iterable(batches)


def test_a_collation_draws_what_it_has_always_drawn():
    loader = data.loader(range(SIZE), BATCH, seed=3, shuffle=False, collate=lambda samples: random.random())
    _, drawn = [list(loader) for _ in range(2)]
    assert drawn[4] == 0.8970059101066912


def count_seeded(monkeypatch, dataset, **options):
    """Return how many samples are seeded in two passes."""
    seeded_samples = []
    seed_sample = rng_streams.seed_sample

    def recording_seed_sample(*args):
        seeded_samples.append(args)
        seed_sample(*args)

    with monkeypatch.context() as patched:
        patched.setattr(rng_streams, "seed_sample", recording_seed_sample)
        read_passes(dataset, **options)
    return len(seeded_samples)


def test_samples_that_draw_nothing_are_read_once_and_not_seeded(monkeypatch):
    dataset = Sometimes("torch", ())
    assert not count_seeded(monkeypatch, dataset)
    assert len(dataset.reads) == 2 * SIZE


def test_the_first_batch_that_draws_is_read_again_with_seeding_as_are_all_later_ones(monkeypatch):
    dataset = Sometimes("python", range(SIZE))
    assert count_seeded(monkeypatch, dataset) == 2 * SIZE
    assert len(dataset.reads) == 2 * SIZE + BATCH
    dataset = Sometimes("python", (9,))
    # The third batch is the first to be seeded.
    assert count_seeded(monkeypatch, dataset, shuffle=False) == 2 * SIZE - 2 * BATCH
    assert len(dataset.reads) == 2 * SIZE + BATCH


@pytest.mark.parametrize(("says", "times"), [(False, 0), (True, 2 * SIZE)])
def test_a_dataset_may_say_whether_it_draws(monkeypatch, says, times):
    dataset = Sometimes("torch", ())
    dataset.draws = says
    assert count_seeded(monkeypatch, dataset) == times
    assert len(dataset.reads) == 2 * SIZE


def test_a_stream_may_say_whether_it_draws(monkeypatch):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(SIZE))

    stream = Stream()
    assert count_seeded(monkeypatch, stream, shuffle=False) == 2 * (SIZE + 1)
    stream.draws = False
    assert not count_seeded(monkeypatch, stream, shuffle=False)


def test_a_dataset_that_says_that_it_draws_may_restore_the_state():
    class Forked(Always):
        def __getitem__(self, index):
            with torch.random.fork_rng():
                return index, float(torch.rand(()))

    passes = [read_passes(Forked("torch", ()), passes=1, shuffle=shuffle)[0] for shuffle in (True, False)]
    actual = [dict(chain.from_iterable(batches)) for batches in passes]
    assert actual[0] == actual[1]
    assert len(set(actual[0].values())) == SIZE


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_whether_a_sample_raises_may_be_drawn(on_error):
    class Fragile(Sometimes):
        def __getitem__(self, index):
            if index in self.indices and random.random() < 0.5:
                raise ValueError(index)
            return index

    class Seeded(Fragile):
        draws = True

    def outcome(dataset_class):
        loader, actual = data.loader(dataset_class("python", (5, 6, 7, 13)), BATCH, collate=list, on_error=on_error), []
        try:
            actual += loader
        except DataError as error:
            return actual, str(error)
        return actual, loader.skipped

    warns = pytest.warns(UserWarning, match="cannot be read") if on_error == "skip" else nullcontext()
    with warns:
        assert outcome(Fragile) == outcome(Seeded)


@pytest.mark.parametrize("source", SOURCES)
def test_the_process_draws_on_as_if_nothing_had_been_read(source):
    def next_draw(dataset):
        seed_all()
        list(data.loader(dataset, BATCH, collate=list))
        return SOURCES[source]()

    assert next_draw(Sometimes("torch", ())) == next_draw(Sometimes(source, (9,))) == next_draw([0] * BATCH)
    seed_all()
    assert SOURCES[source]() == next_draw(Sometimes(source, range(SIZE)))


@pytest.mark.parametrize("source", [*SOURCES, "word"])
def test_a_loop_draws_between_batches_as_if_nothing_was_read(source, monkeypatch):
    monkeypatch.setitem(SOURCES, "word", lambda: random.getrandbits(32))

    def draws(batches):
        seed_all()
        return [[SOURCES[source]() for _ in range(count % 3)] for count, _ in zip(range(SIZE), batches, strict=False)]

    draws_nothing = Sometimes("torch", ())
    assert draws(data.loader(draws_nothing, 1, collate=list, seed=0)) == draws(range(SIZE))


def test_pythons_numbers_go_on_at_each_place_of_its_generator():
    """It computes 624 numbers at once, and then the next 624."""
    random.seed(1)
    expected = [random.getrandbits(32) for _ in range(1400)]
    random.seed(1)
    actual = []
    for _ in range(1400):
        with rng_streams.PreservedState(detect=True) as preserved:
            assert not preserved.has_drawn()
        actual.append(random.getrandbits(32))
    assert actual == expected


def test_a_normal_number_that_python_has_left_over_is_a_draw():
    random.gauss(0, 1)
    assert read_passes(Sometimes("gauss", (3,))) == read_passes(Always("gauss", (3,)))
    random.gauss(0, 1)


def test_a_loader_within_a_sample_hides_no_draw():
    """Its own draws are seeded; those of the sample around it count, before and after."""

    class Outer(Sometimes):
        def __getitem__(self, index):
            before = SOURCES[self.source]() if index % 2 else None
            inner = list(data.loader(Sometimes(self.source, (1,), 4), 2, collate=list))
            return index, before, inner, SOURCES[self.source]() if index == 8 else None

    class OuterThatDraws(Outer):
        draws = True

    for source in ("python", "numpy", "torch", "gauss"):
        assert read_passes(Outer(source, ())) == read_passes(OuterThatDraws(source, ()))


# Reading by the batch


class ByBatch(Sometimes):
    """Also returns several samples at a time, as datasets of Hugging Face do."""

    def __init__(self, *args):
        super().__init__(*args)
        self.batches = []

    def __getitems__(self, indices):
        self.batches.append(list(indices))
        return [super(ByBatch, self).__getitem__(index) for index in indices]


def test_samples_are_read_together_where_a_dataset_can():
    dataset = ByBatch("torch", ())
    assert read_passes(dataset) == read_passes(Sometimes("torch", ()))
    assert sorted(chain.from_iterable(dataset.batches)) == sorted([*range(SIZE)] * 2)
    assert {len(batch) for batch in dataset.batches} == {BATCH}
    assert sorted(dataset.reads) == sorted([*range(SIZE)] * 2)


def test_samples_that_draw_are_read_one_by_one():
    assert read_passes(ByBatch("numpy", (3, 17))) == read_passes(Sometimes("numpy", (3, 17)))


@pytest.mark.parametrize("damage", [lambda items: items[1:], lambda items: 1 / 0])
def test_samples_are_read_one_by_one_where_reading_together_fails(damage):
    class Torn(ByBatch):
        def __getitems__(self, indices):
            return damage(super().__getitems__(indices))

    assert read_passes(Torn("python", ())) == read_passes(Sometimes("python", ()))


def test_a_token_file_that_is_read_by_the_batch_gives_the_batches_of_default_collate(tmp_path):
    data.write_tokens(tmp_path / "t.npy", [range(50)])
    dataset = data.TokenFile(tmp_path / "t.npy", 6)
    for by_batch, by_sample in zip(
        data.loader(dataset, 3),
        data.loader(dataset, 3, collate=lambda s: torch.utils.data.default_collate(s)),
        strict=True,
    ):
        assert list(by_batch) == list(by_sample)
        for name in by_batch:
            assert torch.equal(by_batch[name], by_sample[name])
            assert by_batch[name].dtype == torch.int64
            assert by_batch[name].is_contiguous()


def test_a_token_file_that_vanished_names_its_samples(tmp_path):
    data.write_tokens(tmp_path / "t.npy", [range(50)])
    # Pickled, as a worker process receives it: the file is not open yet.
    unpickled = pickle.loads(pickle.dumps(data.TokenFile(tmp_path / "t.npy", 6)))
    (tmp_path / "t.npy").unlink()
    with pytest.raises(DataError, match=r"the batch of samples 0, 1 of epoch 0 cannot be read: DataError: TokenFile: "):
        list(data.loader(unpickled, 2, shuffle=False))


def test_a_data_loader_is_no_dataset():
    with pytest.raises(DataError, match=r"a DataLoader, which gives batches; pass its \.dataset"):
        data.loader(DataLoader([1, 2]), 2, shuffle=False)
