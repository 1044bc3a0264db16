"""Laws of resuming: the batches that were left, bit for bit, from any point, with any number of workers."""

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
    """Each sample draws from all generators there are."""

    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = torch.rand(()) + random.random() + np.random.rand()
        return {"index": index, "drawn": drawn.double(), "tokens": torch.randint(9, (LENGTHS[index % SIZE],))}


KINDS = {
    "fixed": {},
    "in_order": {"shuffle": False},
    "rest": {"drop_last": False},
    "rank": {"rank": 1, "num_ranks": 2},
    "lengths": {"lengths": LENGTHS, "window": 8, "drop_last": False},
    "tokens": {"lengths": LENGTHS, "window": 8, "max_tokens": 26},
}


def collate(samples):
    """Draws too."""
    return {**data.pad()(samples), "noise": torch.rand(2)}


def made(kind="fixed", num_workers=0, **options):
    return data.loader(Augmented(), BATCH, collate=collate, num_workers=num_workers, **KINDS[kind], **options)


def same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def three_passes():
    """What no interruption gives, by kind."""
    loaders = {kind: made(kind) for kind in KINDS}
    return {kind: [list(loader) for _ in range(3)] for kind, loader in loaders.items()}


@pytest.fixture(scope="module")
def with_workers():
    """Workers start slowly: each kind has two, for all tests."""
    return {kind: made(kind, num_workers=2) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_any_stop_point(kind, three_passes):
    passes = three_passes[kind]
    for epoch in range(2):
        for stop in range(len(passes[epoch]) + 1):
            first, second = made(kind), made(kind)
            for _ in range(epoch):
                list(first)
            begun = iter(first)
            same([next(begun) for _ in range(stop)], passes[epoch][:stop])
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert second.state_dict() == first.state_dict()
            same(list(second), passes[epoch][stop:])
            same(list(second), passes[epoch + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_workers_change_nothing_and_what_they_prepared_is_neither_lost_nor_repeated(kind, three_passes, with_workers):
    loader, passes = with_workers[kind], three_passes[kind]
    loader.load_state_dict(made(kind).state_dict())
    same(list(loader), passes[0])
    for stop in (0, 1, len(passes[1]) // 2, len(passes[1])):
        begun = iter(loader)
        same([next(begun) for _ in range(stop)], passes[1][:stop])
        state = loader.state_dict()
        # Into one without workers, and into itself, while they still work on what nobody asks for any more.
        other = made(kind)
        other.load_state_dict(state)
        same(list(other), passes[1][stop:])
        loader.load_state_dict(state)
        same(list(loader), passes[1][stop:])
        same(list(loader), passes[2])
        loader.load_state_dict({**made(kind).state_dict(), "epoch": 1})


@given(st.integers(0, 6), st.integers(0, 6))
def test_stopping_twice(first_stop, second_stop):
    loader = made()
    whole = [batch["index"].tolist() for _ in range(2) for batch in loader]
    loader, seen = made(), []
    for stop in (first_stop, second_stop):
        seen += [batch["index"].tolist() for _, batch in zip(range(stop), _endless(loader), strict=False)]
        resumed = made()
        resumed.load_state_dict(loader.state_dict())
        loader = resumed
    seen += [batch["index"].tolist() for _, batch in zip(range(12), _endless(loader), strict=False)]
    assert seen[:12] == whole[:12]


def _endless(loader):
    while True:
        yield from loader


def test_the_last_batch_of_a_pass_is_not_yet_its_end():
    loader = made()
    begun = iter(loader)
    for _ in range(len(loader)):
        next(begun)
    at_end = loader.state_dict()
    assert (at_end["epoch"], at_end["window"]) == (0, len(loader))
    assert next(begun, None) is None
    assert (loader.state_dict()["epoch"], loader.state_dict()["window"]) == (1, 0)
    resumed = made()
    resumed.load_state_dict(at_end)
    assert list(resumed) == []
    assert resumed.state_dict() == loader.state_dict()
    same(list(resumed), list(loader))


def test_peeking_changes_nothing(three_passes):
    loader = made()
    next(iter(loader))
    next(iter(loader))
    same(list(loader), three_passes["fixed"][0])
    next(iter(loader))
    same(list(loader), three_passes["fixed"][1])
    begun = iter(loader)
    next(begun)
    state = loader.state_dict()
    loader.load_state_dict(state)
    next(iter(loader))
    # A resumed pass that is left starts over where it began.
    same(list(loader), three_passes["fixed"][2][1:])


def test_the_state_is_whole_numbers_and_does_not_grow():
    loader = made()
    small = loader.state_dict()
    list(loader)
    assert len(loader.state_dict()) == len(small)
    assert all(isinstance(value, int) for value in small.values())


def test_one_pass_at_a_time():
    loader = made()
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(DataError, match="one iterator at a time"):
        next(first)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="a position was loaded"):
        next(second)


# What draws


def test_the_generators_of_the_process_are_left_alone():
    def states():
        return torch.get_rng_state(), random.getstate(), np.random.get_state()

    torch.manual_seed(3)
    before = states()
    for _ in made():
        assert torch.equal(states()[0], before[0])
    after = states()
    assert torch.equal(after[0], before[0])
    assert after[1] == before[1]
    assert np.array_equal(after[2][1], before[2][1])


def test_the_generators_are_left_alone_by_workers_too():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loader = made(num_workers=1)
    list(loader)
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sample_draws_the_same_in_any_batch_and_anew_in_each_epoch():
    def drawn(**options):
        loader = data.loader(Augmented(), drop_last=False, collate=data.pad(), **options)
        return [
            dict(zip(index, values, strict=True))
            for index, values in (
                ([i for b in batches for i in b["index"].tolist()], [d for b in batches for d in b["drawn"].tolist()])
                for batches in (list(loader), list(loader))
            )
        ]

    first, second = drawn(batch_size=4)
    assert drawn(batch_size=7) == [first, second]
    assert drawn(batch_size=1, shuffle=False) == [first, second]
    assert len({*first.values(), *second.values(), *drawn(batch_size=4, seed=1)[0].values()}) == 3 * SIZE


def test_what_the_collation_draws_belongs_to_its_batch(three_passes):
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
    # Nor is it what the last sample would have gone on to draw.
    by_samples = {tuple(batch["noise"].tolist()) for batch in three_passes["fixed"][0]}
    assert by_samples == set(passes[0])


# Positions that do not fit


@pytest.mark.parametrize(
    ("options", "words"),
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
def test_a_position_of_another_loader(options, words):
    chosen = {"dataset": Augmented(), "batch_size": 4, **options}
    with pytest.raises(DataError, match=words):
        data.loader(**chosen).load_state_dict(data.loader(Augmented(), 4).state_dict())


def test_a_position_does_not_fit_other_lengths_of_as_many_samples():
    def made(lengths):
        return data.loader(Augmented(), 4, lengths=lengths)

    state = made(LENGTHS).state_dict()
    made([*map(int, LENGTHS)]).load_state_dict(state)
    with pytest.raises(DataError, match=r"lengths: found [0-9]+, this loader has"):
        made(LENGTHS[::-1]).load_state_dict(state)
    # Those of a function do not tell.
    loader = made(LENGTHS)
    loader.load_state_dict({name: value for name, value in state.items() if name != "lengths"})
    loader.load_state_dict(state)


def test_lengths_may_be_a_list_in_one_run_and_a_function_in_the_next():
    def made(lengths):
        return data.loader(Augmented(), 4, lengths=lengths, collate=data.pad())

    by_list, by_function = made(LENGTHS), made(lambda index: int(LENGTHS[index]))
    for first, then in ((by_list, by_function), (by_function, by_list)):
        next(iter(first))
        state = first.state_dict()
        for loader in (first, then):
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        for one, other in zip(first, then, strict=True):
            assert torch.equal(one["drawn"], other["drawn"])


@pytest.mark.parametrize("options", [{}, {"lengths": LENGTHS}], ids=["in order", "by length"])
def test_a_position_fits_another_number_of_ranks_with_as_many_samples_in_a_batch_of_all(options):
    def ranks(num_ranks):
        size, collated = 6 // num_ranks, {"collate": data.pad(), **options}
        return [data.loader(Augmented(), size, rank=rank, num_ranks=num_ranks, **collated) for rank in range(num_ranks)]

    def drawn(loaders):
        """Return what the samples of each batch of all ranks have drawn."""
        together = zip(*loaders, strict=True)
        return [sorted(torch.cat([batch["drawn"] for batch in batches]).tolist()) for batches in together]

    (alone,) = ranks(1)
    next(iter(alone))
    position = alone.state_dict()
    expected = drawn(ranks(1))
    for num_ranks in (2, 3):
        resumed = ranks(num_ranks)
        for loader in resumed:
            loader.load_state_dict(position)
        assert drawn(resumed) == expected[1:]


def test_all_that_differs_is_listed():
    state = data.loader(Augmented(), 4).state_dict()
    with pytest.raises(DataError) as caught:
        data.loader(Augmented(99), 5, seed=2).load_state_dict(state)
    assert all(f"{name}: found" in str(caught.value) for name in ("seed", "samples", "batch_size"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epoch": -1}, "epoch: found -1"),
        ({"window": 1.5}, "window: found 1.5"),
        ({"batch": "0"}, "batch: found '0'"),
        ({"window": 99}, "window is 99, and an epoch has 6"),
        ({"step": 3}, "step: unexpected"),
        ({"source": {}}, "source: unexpected"),
    ],
)
def test_a_position_that_is_none(change, words):
    loader = made()
    with pytest.raises(DataError, match=words):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(DataError, match="epoch: missing"):
        loader.load_state_dict({})


def test_a_position_of_another_version_of_the_order():
    with pytest.raises(DataError, match="order: found 3, this loader has 2"):
        made().load_state_dict({**made().state_dict(), "order": 3})
    with pytest.raises(DataError, match="order: missing"):
        made().load_state_dict({name: value for name, value in made().state_dict().items() if name != "order"})


def test_ranks_share_a_position():
    first, second = made("rank"), data.loader(Augmented(), BATCH, collate=collate, rank=0, num_ranks=2)
    begun = iter(first)
    next(begun)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_a_batch_that_was_dropped_is_freed_before_the_next_one_is_read():
    alive, earlier = [], []

    class Watching(list):
        draws = False

        def __getitem__(self, index):
            alive.append(sum(each() is not None for each in earlier))
            return torch.ones(3)

    for batch in data.loader(Watching(range(8)), 2):
        earlier.append(weakref.ref(batch))
        del batch
    assert len(earlier) == 4
    assert alive == [0] * 8
