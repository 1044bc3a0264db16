"""Sources: arrays, token files, datasets of other libraries; and the positions of sources that keep one."""

import errno
import functools
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ftrain as ft
from ftrain import data
from ftrain.errors import DataError, OptionError

# Arrays


def test_arrays_give_rows_of_a_tree():
    x, y = torch.arange(12).view(4, 3), np.array([1.0, 2.0, 3.0, 4.0])
    dataset = data.arrays({"x": x, "more": (y,)})
    assert len(dataset) == 4
    assert torch.equal(dataset[2]["x"], x[2])
    assert dataset[-1]["more"][0] == 4.0
    (batch,) = data.loader(dataset, 4, shuffle=False)
    assert torch.equal(batch["x"], x)
    assert torch.equal(batch["more"][0], torch.from_numpy(y))
    assert len(list(dataset)) == 4


def test_a_tensor_alone_is_a_tree():
    assert [int(row) for row in data.arrays(torch.arange(3))] == [0, 1, 2]


def test_a_memory_mapped_array_is_read_without_a_warning(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(10))
    # torch warns about tensors that share read-only memory, and a warning is an error in tests.
    dataset = data.arrays({"x": np.load(tmp_path / "x.npy", mmap_mode="r")})
    assert [batch["x"].tolist() for batch in data.loader(dataset, 5, shuffle=False)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


def test_arrays_of_another_byte_order(tmp_path):
    np.arange(6, dtype=">i4").tofile(tmp_path / "x.bin")
    dataset = data.arrays(np.memmap(tmp_path / "x.bin", ">i4").reshape(3, 2))
    (batch,) = data.loader(dataset, 3, shuffle=False)
    assert batch.tolist() == [row.tolist() for row in dataset] == [[0, 1], [2, 3], [4, 5]]


def test_a_memory_mapped_array_is_sent_by_the_name_of_its_file(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4000))
    whole = np.load(tmp_path / "x.npy", mmap_mode="r")
    for mapped in (whole, whole[10:], np.asarray(whole)[10:3000].reshape(-1, 10)[3:], whole.view(">u4")[1:]):
        dataset = data.arrays(mapped)
        message = pickle.dumps(dataset)
        assert len(message) < 1000
        assert torch.equal(pickle.loads(message).rows([0, 200, -1]), dataset.rows([0, 200, -1]))
    assert len(pickle.dumps(data.TokenFile(whole, 7))) < 1000
    # These differ from the file, or are not a contiguous part of it.
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed[5] = -1
    for copied in (changed, whole[::2], whole[::-1], whole + 1, whole[:0]):
        assert np.array_equal(pickle.loads(pickle.dumps(data.arrays(copied)))._data, copied)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "found none"),
        ({"x": torch.zeros(3), "y": torch.zeros(2)}, r"data.x: 3, data.y: 2"),
        ({"x": [1, 2]}, "data.x.0 is int"),
        ({"x": torch.zeros(())}, r"data.x is float32\[\]"),
        ({"x": np.array(["a", "b"])}, "data.x is ndarray: can't convert"),
    ],
)
def test_a_tree_that_is_not_one_of_arrays_is_an_error(tree, message):
    with pytest.raises(DataError, match=message):
        data.arrays(tree)


# Token files


@given(st.lists(st.lists(st.integers(0, 65535), max_size=30), max_size=20), st.integers(1, 10))
def test_documents_and_windows_are_read_as_they_were_written(tmp_path_factory, documents, length):
    path = tmp_path_factory.mktemp("tokens") / "text.npy"
    data.write_tokens(path, documents)
    flat = [token for document in documents for token in document]
    dataset = data.TokenDocuments(path)
    assert [sample["tokens"].tolist() for sample in dataset] == documents
    assert dataset.lengths.tolist() == [len(document) for document in documents]
    assert np.load(path).tolist() == flat
    count = max(len(flat) - 1, 0) // length
    if not count:
        with pytest.raises(DataError, match=f"{len(flat)} tokens are too few"):
            data.TokenFile(path, length)
        return
    windows = data.TokenFile(path, length)
    assert len(windows) == count
    assert [token for window in windows for token in window["tokens"].tolist()] == flat[: count * length]
    assert [token for window in windows for token in window["labels"].tolist()] == flat[1 : count * length + 1]
    assert windows[0]["tokens"].dtype == torch.int64


def test_a_file_of_many_tokens_is_read_by_workers(tmp_path):
    path = tmp_path / "text.npy"
    with data.TokenWriter(path, np.int32) as writer:
        for start in range(0, 10000, 100):
            writer.add(torch.arange(start, start + 100))
    in_worker = data.loader(data.TokenFile(path, 10), 7, num_workers=1)
    in_this_process = data.loader(data.TokenFile(path, 10), 7)
    for a, b in zip(in_worker, in_this_process, strict=True):
        assert torch.equal(a["tokens"], b["tokens"])
        assert torch.equal(a["labels"], b["tokens"] + 1)


def test_documents_of_a_token_file_are_packed(tmp_path):
    path = tmp_path / "text.npy"
    documents = [[number] * (number % 9) for number in range(60)]
    data.write_tokens(path, documents)
    dataset = data.TokenDocuments(path)
    seen = torch.cat([b["tokens"].view(-1) for b in data.loader(dataset, 2, lengths=dataset.lengths, pack=16)])
    assert sorted(seen[seen > 0].tolist()) == [token for document in documents for token in document]


def test_a_raw_file_of_tokens(tmp_path):
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "text.bin")
    windows = data.TokenFile(np.memmap(tmp_path / "text.bin", dtype=np.uint16, mode="r"), 4)
    assert windows[1]["labels"].tolist() == [5, 6, 7, 8]


def test_a_writer_that_dies_leaves_no_file(tmp_path):
    def documents():
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.write_tokens(tmp_path / "text.npy", documents())
    assert list(tmp_path.iterdir()) == []
    # A writer that is killed leaves no file of the final name.
    writer = data.TokenWriter(tmp_path / "text.npy")
    writer.add([1])
    assert not (tmp_path / "text.npy").exists()
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.ends.npy", "text.npy"]


def test_a_full_disk_is_named_and_leaves_no_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"text\.npy could not be written: .*No space left.*; make room"):
        data.write_tokens(tmp_path / "new" / "text.npy", [[1, 2, 3]])
    assert list((tmp_path / "new").iterdir()) == []


def test_writers_of_one_file_do_not_mix_their_documents(tmp_path):
    path = tmp_path / "text.npy"
    with data.TokenWriter(path) as writer:
        writer.add([1] * 10_000)
        data.write_tokens(path, [[2, 3]])
        assert np.load(path).tolist() == [2, 3]
    assert np.load(path).tolist() == [1] * 10_000


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([70000], "70000.*uint16 from 0 to 65535"),
        ([-1], "from -1"),
        ([0.5], "float64"),
        ([[1]], r"\(1, 1\)"),
    ],
)
def test_tokens_that_the_dtype_cannot_hold_are_an_error(tokens, message, tmp_path):
    with pytest.raises(DataError, match=message):
        data.write_tokens(tmp_path / "text.npy", [[1], tokens])
    assert list(tmp_path.iterdir()) == []


def test_wrong_paths_files_and_options_are_errors(tmp_path):
    with pytest.raises(OptionError, match=r"ends in \.npy"):
        data.TokenWriter(tmp_path / "text.bin")
    with pytest.raises(OptionError, match="float32"):
        data.TokenWriter(tmp_path / "text.npy", np.float32)
    with pytest.raises(OptionError, match="TokenWriter: dtype is 'uint17'; needs an integer dtype of numpy"):
        data.TokenWriter(tmp_path / "text.npy", "uint17")
    with pytest.raises(DataError, match="cannot be read"):
        data.TokenFile(tmp_path / "text.npy", 2)
    (tmp_path / "text.npy").write_text("hello")
    with pytest.raises(
        DataError, match=r"must be a \.npy file, as ft\.data\.write_tokens makes them; .* pass np\.memmap"
    ):
        data.TokenFile(tmp_path / "text.npy", 2)
    np.save(tmp_path / "text.npy", np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"\(2, 3\) and dtype float64"):
        data.TokenFile(tmp_path / "text.npy", 2)
    with pytest.raises(DataError, match=r"tokens are a list; needs a path, or an array: np\.asarray"):
        data.TokenFile([1, 2, 3], 2)
    with pytest.raises(OptionError, match="length is 0"):
        data.TokenFile(np.arange(5), 0)


def test_a_token_file_that_was_cut_off_is_an_error(tmp_path):
    path = tmp_path / "text.npy"
    data.write_tokens(path, [range(100)])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match="cannot be read"):
        data.TokenFile(path, 2)


def test_ends_of_another_token_file_are_an_error(tmp_path):
    data.write_tokens(tmp_path / "a.npy", [range(5)])
    data.write_tokens(tmp_path / "b.npy", [range(9)])
    (tmp_path / "a.ends.npy").replace(tmp_path / "b.ends.npy")
    with pytest.raises(DataError, match="has 9 tokens, and its documents end at 5"):
        data.TokenDocuments(tmp_path / "b.npy")
    with pytest.raises(DataError, match=r"a\.ends\.npy cannot be read"):
        data.TokenDocuments(tmp_path / "a.npy")


# Datasets of other libraries


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class LikeHuggingFace:
    """A stand-in for `datasets.Dataset`: columns, rows as dicts of Python values, no torch class."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}

    def __getitems__(self, keys):
        return [self[key] for key in keys]


def test_map_style_datasets_and_lists():
    rows = [{"x": float(i)} for i in range(6)]
    for dataset in (rows, Rows(rows), tuple(rows)):
        assert [batch["x"].tolist() for batch in data.loader(dataset, 3, shuffle=False)] == [[0, 1, 2], [3, 4, 5]]
    (batch,) = data.loader(TensorDataset(torch.arange(4), torch.ones(4)), 4, shuffle=False)
    assert batch[0].tolist() == [0, 1, 2, 3]


def test_a_dataset_like_those_of_hugging_face():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    dataset = LikeHuggingFace(
        {
            "input_ids": [[7] * length for length in lengths],
            "attention_mask": [[1] * length for length in lengths],
            "length": lengths,
            "text": [str(length) for length in lengths],
        }
    )
    loader = data.loader(dataset, 2, lengths=dataset["length"], collate=data.pad(), window=8)
    actual = list(loader)
    assert sorted(text for batch in actual for text in batch["text"]) == sorted(map(str, lengths))
    for batch in actual:
        assert torch.equal(batch["input_ids"], 7 * batch["attention_mask"])
        assert batch["attention_mask"].sum(1).tolist() == batch["length"].tolist()
    assert float(functools.reduce(ft.Mean.pooled, map(data.padding, actual))) == pytest.approx(1 - 31 / 36)


# Positions


class LikeStatefulDataLoader:
    """A stand-in for that of torchdata: `state_dict` returns a state that changes with the next batch."""

    def __init__(self):
        self.state = {"at": [0]}

    def __iter__(self):
        while self.state["at"][0] < 5:
            self.state["at"][0] += 1
            yield {"x": torch.tensor(self.state["at"][0])}
        self.state["at"][0] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class WithGetState(LikeStatefulDataLoader):
    state_dict = load_state_dict = None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


@pytest.mark.parametrize("source_class", [LikeStatefulDataLoader, WithGetState])
def test_sources_that_keep_their_own_position(source_class):
    source = source_class()
    batches = iter(source)
    next(batches), next(batches)
    saved = data.position(source)
    assert saved == {"at": [2]}
    remaining = [int(batch["x"]) for batch in batches]
    assert saved == {"at": [2]}
    other = source_class()
    data.seek(other, saved)
    assert [int(batch["x"]) for batch in other] == remaining == [3, 4, 5]
    assert saved == {"at": [2]}


@pytest.mark.parametrize(
    "source", [[1, 2], (1,), DataLoader([1, 2]), iter([1])], ids=["list", "tuple", "torch", "iterator"]
)
def test_sources_without_a_position(source):
    assert data.position(source) is None
    with pytest.raises(DataError, match=f"{type(source).__name__} has neither"):
        data.seek(source, {})


def test_a_source_that_cannot_load_a_state_has_no_position():
    class Half:
        def state_dict(self):
            return {}

    assert data.position(Half()) is None


@pytest.mark.parametrize("has_position", [False, True])
def test_a_loader_of_accelerate_has_a_position_if_the_one_that_it_wraps_has_one(has_position):
    class Adapter:
        """As ``accelerator.prepare`` returns one."""

        def __init__(self, loader):
            self.base_dataloader = loader

        def state_dict(self):
            return self.base_dataloader.state_dict()

        def load_state_dict(self, state):
            self.base_dataloader.load_state_dict(state)

    loader = data.loader([1, 2], 1) if has_position else DataLoader([1, 2])
    assert data.position(Adapter(loader)) == (loader.state_dict() if has_position else None)


def test_a_loader_in_a_thread():
    batches = []
    thread = threading.Thread(target=lambda: batches.extend(data.loader([{"x": 1}] * 4, 2, num_workers=1)))
    thread.start()
    thread.join()
    assert len(batches) == 2


@pytest.mark.parametrize("num_workers", [0, 1])
def test_arrays_give_the_same_batches_as_sample_by_sample(num_workers):
    tree = {"x": torch.arange(24.0).view(12, 2), "y": np.arange(12, dtype=np.uint8), "z": (torch.arange(12) % 2 == 0,)}

    class BySample(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return data.arrays(tree)[index]

    options = {"seed": 3, "drop_last": False, "num_workers": num_workers, "context": "fork"}
    loaders = data.loader(data.arrays(tree), 5, **options), data.loader(BySample(), 5, **options)
    for _ in range(2):
        for by_batch, by_sample in zip(*loaders, strict=True):
            assert by_batch["y"].dtype == by_sample["y"].dtype
            assert all(torch.equal(by_batch[name], by_sample[name]) for name in ("x", "y"))
            assert torch.equal(by_batch["z"][0], by_sample["z"][0])


def test_a_tensor_dataset_gives_matching_rows_of_its_tensors():
    x, y = torch.arange(24.0).view(12, 2), torch.arange(12)
    for rows_of_x, rows_of_y in data.loader(TensorDataset(x, y), 4, seed=1):
        assert torch.equal(rows_of_x[:, 0], 2.0 * rows_of_y)
