"""Laws of resuming: from any position, with any number of workers, the remaining batches have the same bits."""

import json
import random
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import data
from ftrain.errors import DataError

SIZE, BATCH = 26, 4
LENGTHS = [i * 7 % 13 + 1 for i in range(SIZE)]


class Augmented:
    """Each sample draws from the global generators of torch, Python and numpy."""

    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = torch.rand(()) + random.random() + np.random.rand()
        return {"index": index, "drawn": drawn.double(), "tokens": torch.randint(9, (LENGTHS[index % SIZE],))}


LOADER_OPTIONS = {
    "fixed": {},
    "in_order": {"shuffle": False},
    "rest": {"drop_last": False},
    "rank": {"rank": 1, "num_ranks": 2},
    "lengths": {"lengths": LENGTHS, "window": 8, "drop_last": False},
    "tokens": {"lengths": LENGTHS, "window": 8, "max_tokens": 26},
}


def collate(samples):
    """Pad the samples; draws random numbers too."""
    return {**data.pad()(samples), "noise": torch.rand(2)}


def make_loader(name="fixed", num_workers=0, **options):
    return data.loader(Augmented(), BATCH, collate=collate, num_workers=num_workers, **LOADER_OPTIONS[name], **options)


def assert_same_batches(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def three_passes():
    """The batches of three epochs without an interruption, by the name of the options."""
    loaders = {name: make_loader(name) for name in LOADER_OPTIONS}
    return {name: [list(loader) for _ in range(3)] for name, loader in loaders.items()}


@pytest.fixture(scope="module")
def with_workers():
    """A loader with workers for each set of options, made once because workers start slowly."""
    return {name: make_loader(name, num_workers=2) for name in LOADER_OPTIONS}


@pytest.mark.parametrize("name", LOADER_OPTIONS)
def test_a_loader_resumes_at_any_position(name, three_passes):
    passes = three_passes[name]
    for epoch in range(2):
        for stop in range(len(passes[epoch]) + 1):
            first, second = make_loader(name), make_loader(name)
            for _ in range(epoch):
                list(first)
            batches = iter(first)
            assert_same_batches([next(batches) for _ in range(stop)], passes[epoch][:stop])
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert second.state_dict() == first.state_dict()
            assert_same_batches(list(second), passes[epoch][stop:])
            assert_same_batches(list(second), passes[epoch + 1])


@pytest.mark.parametrize("name", LOADER_OPTIONS)
def test_workers_change_nothing_and_batches_that_they_prepared_are_neither_lost_nor_repeated(
    name, three_passes, with_workers
):
    loader, passes = with_workers[name], three_passes[name]
    loader.load_state_dict(make_loader(name).state_dict())
    assert_same_batches(list(loader), passes[0])
    for stop in (0, 1, len(passes[1]) // 2, len(passes[1])):
        batches = iter(loader)
        assert_same_batches([next(batches) for _ in range(stop)], passes[1][:stop])
        state = loader.state_dict()
        # Resume without workers, and in the same loader while its workers still read for the old position.
        resumed = make_loader(name)
        resumed.load_state_dict(state)
        assert_same_batches(list(resumed), passes[1][stop:])
        loader.load_state_dict(state)
        assert_same_batches(list(loader), passes[1][stop:])
        assert_same_batches(list(loader), passes[2])
        loader.load_state_dict({**make_loader(name).state_dict(), "epoch": 1})


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_loader_that_was_resumed_can_be_resumed_again(first_stop, second_stop):
    loader = make_loader()
    whole = [batch["index"].tolist() for _ in range(2) for batch in loader]
    loader, seen = make_loader(), []
    for stop in (first_stop, second_stop):
        seen += [batch["index"].tolist() for _, batch in zip(range(stop), _endless(loader), strict=False)]
        resumed = make_loader()
        resumed.load_state_dict(loader.state_dict())
        loader = resumed
    seen += [batch["index"].tolist() for _, batch in zip(range(12), _endless(loader), strict=False)]
    assert seen[:12] == whole[:12]


def _endless(loader):
    while True:
        yield from loader


def test_the_last_batch_of_a_pass_is_not_yet_its_end():
    loader = make_loader()
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    at_end = loader.state_dict()
    assert (at_end["epoch"], at_end["window"]) == (0, len(loader))
    assert next(batches, None) is None
    assert (loader.state_dict()["epoch"], loader.state_dict()["window"]) == (1, 0)
    resumed = make_loader()
    resumed.load_state_dict(at_end)
    assert list(resumed) == []
    assert resumed.state_dict() == loader.state_dict()
    assert_same_batches(list(resumed), list(loader))


def test_an_iterator_that_was_left_changes_nothing(three_passes):
    loader = make_loader()
    next(iter(loader))
    next(iter(loader))
    assert_same_batches(list(loader), three_passes["fixed"][0])
    next(iter(loader))
    assert_same_batches(list(loader), three_passes["fixed"][1])
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    loader.load_state_dict(state)
    next(iter(loader))
    # After an unfinished resumed epoch, the next one starts at the same position.
    assert_same_batches(list(loader), three_passes["fixed"][2][1:])


def test_the_state_is_whole_numbers_and_does_not_grow():
    loader = make_loader()
    small = loader.state_dict()
    list(loader)
    assert len(loader.state_dict()) == len(small)
    assert all(isinstance(value, int) for value in small.values())


def test_an_earlier_iterator_raises_an_error():
    loader = make_loader()
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(DataError, match="one iterator at a time"):
        next(first)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="a position was loaded"):
        next(second)


# Random numbers


def test_the_generators_of_the_process_are_left_alone():
    def states():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()

    torch.manual_seed(3)
    before = states()
    for _ in make_loader():
        assert torch.equal(states()[0], before[0])
    after = states()
    assert torch.equal(after[0], before[0])
    assert after[1] == before[1]
    assert np.array_equal(after[2][1], before[2][1])


def test_the_generators_are_left_alone_by_workers_too():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = make_loader(num_workers=1)
    list(loader)
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sample_draws_the_same_in_any_batch_and_anew_in_each_epoch():
    def drawn(**options):
        """Return what each sample draws, by its index, in two epochs."""
        loader = data.loader(Augmented(), drop_last=False, collate=data.pad(), **options)
        epochs = [{}, {}]
        for draws in epochs:
            for batch in loader:
                draws.update(zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True))
        return epochs

    first, second = drawn(batch_size=4)
    assert drawn(batch_size=7) == [first, second]
    assert drawn(batch_size=1, shuffle=False) == [first, second]
    assert len({*first.values(), *second.values(), *drawn(batch_size=4, seed=1)[0].values()}) == 3 * SIZE


def test_the_draws_of_a_collation_depend_only_on_its_batch(three_passes):
    def noise(loader):
        return [tuple(batch["noise"].tolist()) for batch in loader]

    def loader():
        dataset = data.arrays({"x": torch.arange(SIZE)})
        return data.loader(dataset, BATCH, collate=lambda samples: {"noise": torch.rand(2)})

    whole = loader()
    passes = [noise(whole), noise(whole)]
    assert len({*passes[0], *passes[1]}) == 2 * len(whole)
    resumed = loader()
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 1, "window": 2})
    torch.manual_seed(99)
    assert noise(resumed) == passes[1][2:]
    # The draws of a collation do not depend on those of the samples.
    by_samples = {tuple(batch["noise"].tolist()) for batch in three_passes["fixed"][0]}
    assert by_samples == set(passes[0])


# Positions that do not fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed: found 0, this loader has 1"),
        ({"batch_size": 5}, "batch_size: found 4, this loader has 5"),
        ({"shuffle": False}, "shuffle: found True, this loader has False"),
        ({"drop_last": False}, "drop_last: found True, this loader has False"),
        ({"num_ranks": 2}, "num_ranks: found 1, this loader has 2"),
        ({"dataset": Augmented(99)}, "samples: found 26, this loader has 99"),
        ({"lengths": LENGTHS}, "window_size: missing"),
        ({"lengths": LENGTHS, "max_tokens": 50}, "max_tokens: missing"),
    ],
)
def test_a_position_of_another_loader(options, message):
    arguments = {"dataset": Augmented(), "batch_size": 4, **options}
    with pytest.raises(DataError, match=message):
        data.loader(**arguments).load_state_dict(data.loader(Augmented(), 4).state_dict())


def test_a_position_does_not_fit_other_lengths_of_as_many_samples():
    def make_loader(lengths):
        return data.loader(Augmented(), 4, lengths=lengths)

    state = make_loader(LENGTHS).state_dict()
    make_loader([*map(int, LENGTHS)]).load_state_dict(state)
    with pytest.raises(DataError, match=r"lengths: found [0-9]+, this loader has"):
        make_loader(LENGTHS[::-1]).load_state_dict(state)
    # A state from lengths that are a function has no checksum, and fits.
    loader = make_loader(LENGTHS)
    loader.load_state_dict({name: value for name, value in state.items() if name != "lengths"})
    loader.load_state_dict(state)


def test_lengths_may_be_a_list_in_one_run_and_a_function_in_the_next():
    def make_loader(lengths):
        return data.loader(Augmented(), 4, lengths=lengths, collate=data.pad())

    by_list, by_function = make_loader(LENGTHS), make_loader(lambda index: int(LENGTHS[index]))
    for first, second in ((by_list, by_function), (by_function, by_list)):
        next(iter(first))
        state = first.state_dict()
        for loader in (first, second):
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        for first_batch, second_batch in zip(first, second, strict=True):
            assert torch.equal(first_batch["drawn"], second_batch["drawn"])


@pytest.mark.parametrize("options", [{}, {"lengths": LENGTHS}], ids=["in order", "by length"])
def test_a_position_fits_another_number_of_ranks_with_as_many_samples_in_a_batch_of_all(options):
    def ranks(num_ranks):
        size, collated = 6 // num_ranks, {"collate": data.pad(), **options}
        return [data.loader(Augmented(), size, rank=rank, num_ranks=num_ranks, **collated) for rank in range(num_ranks)]

    def drawn(loaders):
        """Return the numbers that the samples of each batch of all ranks have drawn."""
        batches_of_ranks = zip(*loaders, strict=True)
        return [sorted(torch.cat([batch["drawn"] for batch in batches]).tolist()) for batches in batches_of_ranks]

    (alone,) = ranks(1)
    next(iter(alone))
    position = alone.state_dict()
    expected = drawn(ranks(1))
    for num_ranks in (2, 3):
        resumed = ranks(num_ranks)
        for loader in resumed:
            loader.load_state_dict(position)
        assert drawn(resumed) == expected[1:]


def test_all_differences_are_listed():
    state = data.loader(Augmented(), 4).state_dict()
    with pytest.raises(DataError) as caught:
        data.loader(Augmented(99), 5, seed=2).load_state_dict(state)
    assert all(f"{name}: found" in str(caught.value) for name in ("seed", "samples", "batch_size"))
    with pytest.raises(DataError, match=r"Loader.load_state_dict: the position is None; needs what state_dict"):
        data.loader(Augmented(99), 5).load_state_dict(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": -1}, "epoch: found -1"),
        ({"window": 1.5}, "window: found 1.5"),
        ({"batch": "0"}, "batch: found '0'"),
        ({"window": 99}, "window is 99, and an epoch has 6"),
        ({"step": 3}, "step: unexpected"),
        ({"source": {}}, "source: unexpected"),
    ],
)
def test_a_malformed_position_is_an_error_that_names_the_key(change, message):
    loader = make_loader()
    with pytest.raises(DataError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(DataError, match="epoch: missing"):
        loader.load_state_dict({})


def test_a_position_of_another_version_of_the_order():
    with pytest.raises(DataError, match="order: found 3, this loader has 2"):
        make_loader().load_state_dict({**make_loader().state_dict(), "order": 3})
    with pytest.raises(DataError, match="order: missing"):
        make_loader().load_state_dict(
            {name: value for name, value in make_loader().state_dict().items() if name != "order"}
        )


def test_ranks_share_a_position():
    first, second = make_loader("rank"), data.loader(Augmented(), BATCH, collate=collate, rank=0, num_ranks=2)
    batches = iter(first)
    next(batches)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_a_batch_that_was_dropped_is_freed_before_the_next_one_is_read():
    alive, references = [], []

    class Watching(list):
        draws = False

        def __getitem__(self, index):
            alive.append(sum(reference() is not None for reference in references))
            return torch.ones(3)

    for batch in data.loader(Watching(range(8)), 2):
        references.append(weakref.ref(batch))
        del batch
    assert len(references) == 4
    assert alive == [0] * 8
