"""What a batch is after it has travelled from a worker: what it would be without workers."""

import operator
import os
from collections import namedtuple

import pytest
import torch

from ftrain import data
from ftrain.data.worker_messages import MAX_BYTES

Pair = namedtuple("Pair", "left right")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint8, torch.int64]


class Once:
    """Datasets of one sample, which is the batch."""

    draws = False

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.make()


def sent(make):
    """The batch that a worker makes."""
    (batch,) = data.loader(Once(make), 1, collate=operator.itemgetter(0), num_workers=1)
    return batch


def numbers(*shape):
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def kinds():
    whole = numbers(4, 6)
    return {
        **{str(dtype): numbers(2, 3).to(dtype) for dtype in DTYPES},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4, dtype=torch.int32),
        "transposed": numbers(3, 5).T,
        "channels last": numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part of a larger one": numbers(100)[10:20],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(numbers(3)),
        "large": torch.full((MAX_BYTES // 4 + 1,), 2.0),
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
        if isinstance(value, dict):
            return [(key, described(item)) for key, item in value.items()]
        return (type(value), *map(described, value)) if isinstance(value, list | tuple) else value

    assert described(sent(kinds)) == described(kinds())


def aliases():
    whole, same = numbers(8), numbers(3)
    return {"left": whole[:5], "right": whole[3:], "first": same, "second": same, "alone": numbers(3)}


def test_tensors_that_share_memory_still_do():
    batch = sent(aliases)
    assert batch["first"] is batch["second"]
    assert batch["first"] is not batch["alone"]
    batch["left"][4] = -1.0
    assert batch["right"][1] == -1.0


def test_tensors_lie_in_memory_as_those_of_this_process_do():
    """Kernels may add up in another order at other places."""
    small = sent(aliases)["alone"]
    assert small.data_ptr() % 64 == 0
    assert not small.is_shared()


class Refilled:
    """Fills one buffer again for each sample."""

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


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files where Linux lists them")
@pytest.mark.parametrize("collate", [None, data.pad()])
def test_small_batches_take_no_open_files(collate):
    loader = data.loader([{"x": torch.ones(3), "y": torch.ones(2)}] * 60, 2, collate=collate, num_workers=1)
    batches = iter(loader)
    kept, before = [next(batches)], len(os.listdir("/proc/self/fd"))
    kept += batches
    assert len(kept) == 30
    assert len(os.listdir("/proc/self/fd")) <= before
