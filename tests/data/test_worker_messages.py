"""A batch that a worker has sent is the same as one that this process has made."""

import operator
import os
import threading
from collections import UserDict, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from ftrain import data
from ftrain.data.worker_messages import MAX_BYTES
from ftrain.errors import DataError

Pair = namedtuple("Pair", "left right")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint8, torch.int64]


class Once:
    """A dataset of one sample, which is the batch."""

    draws = False

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.make()


def batch_from_worker(make):
    """Return a batch that `make` has made in a worker."""
    (batch,) = data.loader(Once(make), 1, collate=operator.itemgetter(0), num_workers=1)
    return batch


def numbers(*shape):
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def values_of_all_types():
    whole = numbers(4, 6)
    return {
        **{str(dtype): numbers(2, 3).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4, dtype=torch.int32),
        "transposed": numbers(3, 5).T,
        "expanded": numbers(3, 1).expand(3, 5),
        "channels last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part of a larger one": numbers(100)[10:20],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "differentiated": numbers(3).requires_grad_(),
        "parameter": torch.nn.Parameter(numbers(3)),
        "large": torch.full((MAX_BYTES // 4 + 1,), 2.0),
        "packed": pack_sequence([numbers(3), numbers(2)]),
        "object": UserDict(x=numbers(2)),
        "nested": [Pair(numbers(2), {"none": None, "text": "x"}), (whole[:, :-1], whole[:, 1:])],
        7: numbers(1),
    }


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_batches_of_workers_are_those_of_this_process():
    def described(value):
        if isinstance(value, torch.Tensor):
            dense = value.to_dense().resolve_conj()
            layout = value.stride() if value.layout is torch.strided else None
            bits = dense.contiguous().view(-1).view(torch.uint8).tolist() if dense.numel() else []
            return type(value), value.dtype, value.shape, layout, value.requires_grad, bits
        if isinstance(value, dict | UserDict):
            return [(key, described(item)) for key, item in value.items()]
        return (type(value), *map(described, value)) if isinstance(value, list | tuple) else value

    assert described(batch_from_worker(values_of_all_types)) == described(values_of_all_types())


def aliases():
    whole, tied = numbers(8), numbers(3)
    return {"left": whole[:5], "right": whole[3:], "first": tied, "second": tied, "alone": numbers(3)}


def test_tensors_that_share_memory_share_it_in_a_sent_batch():
    batch = batch_from_worker(aliases)
    assert batch["first"] is batch["second"]
    assert batch["first"] is not batch["alone"]
    batch["left"][4] = -1.0
    assert batch["right"][1] == -1.0


def many():
    return [numbers(count) for count in range(1, 20)]


def test_tensors_lie_in_memory_as_those_of_this_process_do():
    """They have the same alignment, on which the order of sums in kernels may depend."""
    batch = batch_from_worker(many)
    assert [small.data_ptr() % 64 for small in batch] == [0] * 19
    assert not any(small.is_shared() for small in batch)


class Refilled:
    """Fills the same buffer for each sample."""

    draws = False

    def __init__(self):
        self.buffer = torch.zeros(1000)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"x": self.buffer.fill_(index)}


def test_a_buffer_that_is_filled_again_is_sent_as_it_was():
    loader = data.loader(
        Refilled(), 1, collate=operator.itemgetter(0), num_workers=1, shuffle=False, prefetch_factor=20
    )
    assert [batch["x"].unique().tolist() for batch in loader] == [[float(index)] for index in range(40)]


def test_a_batch_that_cannot_be_pickled_is_an_error():
    with pytest.raises(DataError, match=r"cannot be sent from its worker: TypeError: cannot pickle"):
        batch_from_worker(threading.Lock)


class UserDicts:
    """Makes batches of another class than dict, as tokenizers do."""

    def __call__(self, samples):
        return UserDict(x=torch.stack([sample["x"] for sample in samples]))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where Linux lists them")
@pytest.mark.parametrize("collate", [None, data.pad(), UserDicts()])
def test_small_batches_take_no_open_files(collate):
    loader = data.loader([{"x": torch.ones(3), "y": torch.ones(2)}] * 60, 2, collate=collate, num_workers=1)
    batches = iter(loader)
    batches_kept, before = [next(batches)], len(os.listdir("/proc/self/fd"))
    batches_kept += batches
    assert len(batches_kept) == 30
    assert len(os.listdir("/proc/self/fd")) <= before
