"""Which samples are in which batch: shares of ranks, last batches, lengths, tokens, rows; the cost of a position."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import data
from ftrain.data import epoch_plan
from ftrain.data.batch_samplers import in_order
from ftrain.errors import ComposeError, DataError, OptionError

MANY = 10**12


class Indices:
    """Sample i is i; reading is counted."""

    draws = False

    def __init__(self, size):
        self.size, self.read = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read += 1
        return index


def make_loader(size, batch_size, **options):
    return data.loader(Indices(size), batch_size, collate=list, **options)


def read_epoch(size, batch_size, num_ranks=1, **options):
    """Return the batches of one epoch, for every rank."""
    return [list(make_loader(size, batch_size, rank=rank, num_ranks=num_ranks, **options)) for rank in range(num_ranks)]


def flat(batches):
    return [index for batch in batches for index in batch]


LENGTHS = np.random.default_rng(0).integers(1, 100, 5000)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_ranks_get_equal_numbers_of_batches_and_each_sample_once(
    size, batch_size, num_ranks, shuffle, drop_last, by_length
):
    global_batch_size = batch_size * num_ranks
    options = {"shuffle": shuffle, "drop_last": drop_last, "lengths": LENGTHS[:size] if by_length else None}
    if drop_last and size < global_batch_size:
        with pytest.raises(DataError, match=f"{size} samples.*{global_batch_size}.*drop_last"):
            read_epoch(size, batch_size, num_ranks, **options)
        return
    ranks = read_epoch(size, batch_size, num_ranks, **options)
    counts = {len(batches) for batches in ranks}
    assert counts == {size // global_batch_size if drop_last else -(-size // global_batch_size)}
    assert counts == {len(make_loader(size, batch_size, num_ranks=num_ranks, **options))}
    seen = Counter(flat(flat(ranks)))
    remainder = size % global_batch_size
    if drop_last and not by_length:
        # Together they are the batches that one rank reads.
        global_batches = [flat(batches) for batches in zip(*ranks, strict=True)]
        assert global_batches == read_epoch(size, global_batch_size, **options)[0]
    if drop_last:
        assert {len(batch) for batch in flat(ranks)} == {batch_size}
        assert set(seen.values()) == {1}
        assert len(seen) == size - remainder
    else:
        assert set(seen) == set(range(size))
        assert sum(seen.values()) - size == (max(num_ranks - remainder, 0) if remainder else 0)
        for batches_of_ranks in zip(*ranks, strict=True):
            sizes = [len(batch) for batch in batches_of_ranks]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1


def test_unshuffled_order_is_that_of_the_data():
    assert read_epoch(7, 3, shuffle=False, drop_last=False) == [[[0, 1, 2], [3, 4, 5], [6]]]
    assert read_epoch(6, 1, 2, shuffle=False) == [[[0], [2], [4]], [[1], [3], [5]]]


def test_the_samples_of_a_global_batch_do_not_depend_on_how_many_ranks_share_it():
    samples = {
        num_ranks: [sorted(flat(batches)) for batches in zip(*read_epoch(50, 12 // num_ranks, num_ranks), strict=True)]
        for num_ranks in (1, 2, 3, 4)
    }
    assert samples[1] == samples[2] == samples[3] == samples[4]


def test_the_order_depends_on_the_epoch_and_the_seed():
    first = make_loader(40, 4, seed=3)
    orders = [flat(first) for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(40)) for order in orders)
    again = make_loader(40, 4, seed=3)
    assert [flat(again) for _ in range(3)] == orders
    assert flat(make_loader(40, 4, seed=4)) != orders[0]
    unshuffled = make_loader(8, 4, shuffle=False)
    assert [flat(unshuffled) for _ in range(2)] == [list(range(8))] * 2


# Cost of a position


@pytest.mark.parametrize("options", [{}, {"max_tokens": 400}, {"pack": 128}], ids=["size", "tokens", "pack"])
@pytest.mark.parametrize("lengths", [False, True])
def test_a_position_costs_the_same_anywhere(options, lengths):
    if options and not lengths:
        pytest.skip("needs lengths")
    indices_asked = []

    def length(index):
        indices_asked.append(index)
        return index % 100 + 1

    def cost(window):
        loader = make_loader(MANY, 8, **options, **({"lengths": length, "window": 64} if lengths else {}))
        loader.load_state_dict({**loader.state_dict(), "window": window})
        indices_asked.clear()
        batch = next(iter(loader))
        assert loader._source._workers._dataset._dataset.read == len(batch)
        return len(indices_asked)

    assert cost(10) == cost(10_000_000) == (64 if lengths else 0)


# Lengths


def test_batches_of_similar_lengths():
    size = 4096
    lengths = LENGTHS[:size]

    def share_of_padding(**options):
        (batches,) = read_epoch(size, 16, **options)
        longest = sum(len(batch) * lengths[batch].max() for batch in batches)
        return 1 - lengths.sum() / longest

    assert share_of_padding() > 0.4
    assert share_of_padding(lengths=lengths, window=1024) < 0.03
    # The batches are not in the order of their lengths.
    (batches,) = read_epoch(size, 16, lengths=lengths, window=1024)
    longest = np.array([lengths[batch].max() for batch in batches])
    assert abs(np.corrcoef(longest[1:], longest[:-1])[0, 1]) < 0.3


def test_lengths_of_ranks_are_alike():
    for batches_of_ranks in zip(*read_epoch(4096, 4, 4, lengths=LENGTHS[:4096], window=4096), strict=True):
        lengths = LENGTHS[flat(batches_of_ranks)]
        assert lengths.max() - lengths.min() <= 3


@given(st.integers(1, 200), st.integers(100, 400), st.integers(1, 3), st.booleans(), st.sampled_from([None, 5]))
def test_batches_have_at_most_max_tokens(size, max_tokens, num_ranks, drop_last, rows):
    lengths = LENGTHS[:size]
    options = {"lengths": lengths, "max_tokens": max_tokens, "drop_last": drop_last, "window": 64}
    if drop_last and size < num_ranks:
        with pytest.raises(DataError):
            read_epoch(size, rows, num_ranks, **options)
        return
    ranks = read_epoch(size, rows, num_ranks, **options)
    for batch in flat(ranks):
        assert len(batch) * lengths[batch].max() <= max_tokens
        assert 1 <= len(batch) <= (rows or size)
    for batches_of_ranks in zip(*ranks, strict=True):
        assert len({len(batch) for batch in batches_of_ranks}) == 1
    seen = Counter(flat(flat(ranks)))
    remainder = size % num_ranks
    expected = size - remainder if drop_last else size + (num_ranks - remainder if remainder else 0)
    assert sum(seen.values()) == expected
    if not drop_last:
        assert set(seen) == set(range(size))


def test_token_batches_are_full():
    (batches,) = read_epoch(5000, None, lengths=LENGTHS, max_tokens=1000)
    filled = [len(batch) * LENGTHS[batch].max() for batch in batches]
    assert np.mean(filled) > 900
    (batches,) = read_epoch(5000, 16, lengths=LENGTHS, max_tokens=1000)
    assert np.mean([len(batch) == 16 or len(batch) * LENGTHS[batch].max() > 800 for batch in batches]) > 0.98


def test_a_sample_with_more_than_max_tokens_is_an_error():
    with pytest.raises(DataError, match="sample 1 has 9 tokens, more than max_tokens=8"):
        read_epoch(3, None, lengths=[1, 9, 2], max_tokens=8)


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 3), st.integers(100, 300))
def test_each_document_fits_into_the_rows_of_its_batch(size, rows, num_ranks, room):
    lengths = LENGTHS[:size].copy()
    lengths[::7] = 0
    ranks = read_epoch(size, rows, num_ranks, lengths=lengths, pack=room, window=64)
    assert len({len(batches) for batches in ranks}) == 1
    for batch in flat(ranks):
        packed = data.pack([[1] * lengths[index] for index in batch], room, rows=rows)
        assert packed["tokens"].shape == (rows, room)
        assert int((packed["documents"] >= 0).sum()) == lengths[batch].sum()
    seen = Counter(flat(flat(ranks)))
    assert set(seen) == set(np.flatnonzero(lengths))
    assert set(seen.values()) <= {1}


def test_rows_are_nearly_full():
    loader = data.loader([[1] * length for length in LENGTHS], 8, lengths=LENGTHS, pack=256)
    empty = [float(data.padding(batch)) for batch in loader]
    assert np.mean(empty) < 0.02


def test_a_document_that_is_longer_than_a_row_is_an_error():
    with pytest.raises(DataError, match="document 1 has 9 tokens, more than pack=8"):
        read_epoch(3, 1, lengths=[1, 9, 2], pack=8)


def test_lengths_from_a_function_make_the_same_batches():
    assert read_epoch(300, 4, lengths=lambda index: int(LENGTHS[index])) == read_epoch(300, 4, lengths=LENGTHS[:300])
    assert read_epoch(300, 4, lengths=list(map(int, LENGTHS[:300]))) == read_epoch(300, 4, lengths=LENGTHS[:300])


@pytest.mark.parametrize("lengths", [[1, 2], [1.0, 2.0, 3.0], [[1, 2, 3]], [1, -1, 2]])
def test_wrong_lengths_are_an_error(lengths):
    with pytest.raises(DataError, match=r"lengths.*3 whole numbers"):
        make_loader(3, 1, lengths=lengths)


@pytest.mark.parametrize(("length", "expected"), [(-1, "the least is -1"), (1.5, "float64"), (None, "object")])
def test_a_function_that_returns_a_wrong_length_is_an_error(length, expected):
    with pytest.raises(DataError, match=rf"lengths have shape \(3,\).*{expected}.*needs 3 whole numbers"):
        list(make_loader(3, 1, lengths=lambda index: length))


def test_an_error_of_a_function_of_lengths_names_the_index():
    with pytest.raises(DataError, match=r"lengths\(0\) raised TypeError.*function of the index"):
        list(make_loader(3, 1, lengths=lambda sample: len(sample["tokens"]), shuffle=False))


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": None}, "batch_size is None"),
        ({"rank": 1}, "rank is 1"),
        ({"rank": -1}, "rank is -1"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 0.5}, "num_workers is 0.5"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": "9"}, "timeout is '9'"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"seed": 1 << 64}, "seed = 18446744073709551616 does not fit"),
        ({"collate": 3}, "collate is 3"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"context": "thread"}, "context is 'thread'; choices are .*spawn"),
        ({"on_error": "ignore"}, "on_error is 'ignore'; choices are raise, skip"),
        ({"max_tokens": 8}, "max_tokens=8 needs lengths"),
        ({"pack": 8}, "pack=8 needs lengths"),
        ({"window": 8}, "window=8 needs lengths"),
        ({"window": 0, "lengths": [1] * 9}, "window is 0"),
        ({"max_tokens": 8, "pack": 8, "lengths": [1] * 9}, "max_tokens=8 and pack=8"),
    ],
)
def test_wrong_options_are_errors_that_name_them(options, message):
    with pytest.raises(OptionError, match=f"loader: {message}"):
        data.loader(Indices(9), **{"batch_size": 2, **options})


@pytest.mark.parametrize("seed", [None, "1", 1.5])
def test_a_seed_that_is_not_an_integer_is_an_error(seed):
    with pytest.raises(ComposeError, match="loader: seed is"):
        data.loader(Indices(9), 2, seed=seed)


def test_positions_are_plain_numbers_whatever_numbers_the_options_are():
    """Checkpoints refuse numbers of numpy."""
    numpy = {"seed": np.int64(3), "shuffle": np.bool_(True), "drop_last": np.bool_(True), "num_ranks": np.int64(1)}
    lengths = {"lengths": [1] * 9, "max_tokens": np.int64(4), "window": np.int64(9)}
    for options in (numpy, {**numpy, **lengths}):
        state = data.loader(Indices(9), np.int64(2), **options).state_dict()
        assert {type(value) for value in state.values()} == {int, bool}
    stream = data.loader(set(range(9)), np.int64(2), **{**numpy, "shuffle": False})
    assert {type(value) for value in stream.state_dict().values()} == {int, bool}


@pytest.mark.parametrize(
    "dataset",
    [3, {}, {"x": [1]}, iter([1, 2]), "train.npy", (torch.zeros(4, 2), torch.zeros(4))],
    ids=["int", "dict", "tree", "iterator", "path", "pair of arrays"],
)
def test_objects_that_are_not_datasets_are_refused(dataset):
    with pytest.raises(DataError, match=f"loader: the dataset is a {type(dataset).__name__}"):
        data.loader(dataset, 1)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_dataset_without_samples_is_an_error(drop_last):
    with pytest.raises(DataError, match="no sample"):
        data.loader([], 1, drop_last=drop_last)


def test_length_1_and_a_batch_larger_than_the_data():
    assert read_epoch(1, 1) == [[[0]]]
    assert read_epoch(1, 5, drop_last=False) == [[[0]]]
    assert sorted(flat(read_epoch(3, 5, drop_last=False)[0])) == [0, 1, 2]
    # With more ranks than samples, each rank still has a batch: no rank waits for another one.
    assert read_epoch(1, 2, 3, drop_last=False) == [[[0]]] * 3


def test_len_is_an_error_if_it_depends_on_lengths():
    loader = make_loader(10, None, lengths=[1] * 10, max_tokens=4)
    with pytest.raises(ComposeError, match="depends on the lengths"):
        len(loader)
    # `list` calls `len` too, and ignores its error.
    assert len(list(loader)) == 3


def test_batches_of_many_windows_are_computed_at_once_as_the_order_gives_them(monkeypatch):
    monkeypatch.setattr(epoch_plan, "BLOCK", 7)
    for size, batch_size in ((40, 3), (40, 7), (40, 8), (6, 6), (13, 1)):
        order = data.shuffled(range(size), size, seed=5, epoch=0).tolist()
        plan = epoch_plan.EpochPlan(size, in_order(batch_size, 0, 1), 5, True, False)
        for window in range(plan.num_windows + 1):
            requested = [index for request in plan.requests(0, window, 0) for index in request.indices]
            assert requested == order[window * batch_size :]
