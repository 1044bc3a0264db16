"""Collation: which fields are padded, with which value, on which side; and the share of padding in a batch."""

from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from ftrain import data
from ftrain.errors import BatchError, DataError, OptionError

ROWS = st.lists(st.lists(st.integers(1, 99), max_size=12), min_size=1, max_size=6)


@given(ROWS, st.integers(1, 8), st.sampled_from(["left", "right"]), st.sampled_from([None, 12, 15]), st.booleans())
def test_padding_keeps_all_values_and_masks_the_rest(rows, multiple, side, length, as_tensors):
    options = {"multiple": multiple} if length is None else {"length": length}
    samples = [{"tokens": row, "labels": row} for row in rows]
    # Empty lists alone have no dtype, so rows with one are tensors.
    if as_tensors or not all(rows):
        samples = [{name: torch.tensor(row, dtype=torch.int64) for name, row in sample.items()} for sample in samples]
    batch = data.pad(**options, side=side, values={"tokens": 7}, mask="tokens")(samples)
    longest = max(map(len, rows))
    width = length or -(-longest // multiple) * multiple
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(batch, (len(rows), width))
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "attention_mask": torch.bool,
    }
    for row, tokens, labels, mask in zip(rows, batch["tokens"], batch["labels"], batch["attention_mask"], strict=True):
        assert tokens[mask].tolist() == labels[mask].tolist() == row
        assert (tokens[~mask] == 7).all()
        assert (labels[~mask] == -100).all()
        real = mask.tolist()
        assert real == sorted(real, reverse=side == "right")
    share = data.padding(batch)
    assert float(share.total) == width * len(rows) - sum(map(len, rows))
    assert float(share.weight) == width * len(rows)


def test_fields_have_lengths_and_types_of_their_own():
    samples = [
        {"source": [1, 2, 3], "target": [1.5], "image": np.zeros((2, 2), np.float32), "class": 3, "name": "a"},
        {"source": [4], "target": [2.5, 3.5], "image": np.ones((2, 2), np.float32), "class": 4, "name": "b"},
    ]
    batch = data.pad()(samples)
    assert batch["source"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["target"].tolist() == [[1.5, 0.0], [2.5, 3.5]]
    assert batch["image"].shape == (2, 2, 2)
    assert batch["class"].tolist() == [3, 4]
    assert batch["name"] == ["a", "b"]


def test_complex_numbers_are_padded():
    assert data.pad()([{"x": [1j]}, {"x": [2.0, 3j]}])["x"].tolist() == [[1j, 0], [2, 3j]]


def test_only_the_fields_that_are_named_are_padded():
    samples = [{"frames": torch.ones(3, 2), "box": [1, 2]}, {"frames": torch.ones(1, 2), "box": [3, 4]}]
    batch = data.pad(fields=["frames"], multiple=4)(samples)
    assert batch["frames"].shape == (2, 4, 2)
    assert batch["frames"].sum() == 8
    assert batch["box"].tolist() == [[1, 2], [3, 4]]


def test_bools_are_padded_with_false():
    assert data.pad()([{"keep": [True]}, {"keep": [True, True]}])["keep"].tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.bool])
def test_a_padding_value_that_the_dtype_cannot_hold(dtype):
    # In bytes, -100 would be the label 156.
    samples = [{"labels": torch.tensor(row).to(dtype)} for row in ([1, 0, 1], [1])]
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(DataError, match=rf"pad: field labels is {name}, which cannot hold the padding value -100; .*"):
        data.pad()(samples)
    assert data.pad(values={"labels": 1})(samples)["labels"].tolist() == [[1, 0, 1], [1, 1, 1]]
    assert data.pad()(samples[:1] * 2)["labels"].dtype == dtype


def test_samples_that_are_too_long_are_cut_only_with_cut():
    samples = [{"tokens": [1, 2, 3, 4]}, {"tokens": [5]}]
    with pytest.raises(DataError, match="field tokens is 4 long, more than length=3; pass cut=True"):
        data.pad(length=3)(samples)
    batch = data.pad(length=3, cut=True, side="left", mask="tokens")(samples)
    assert batch["tokens"].tolist() == [[1, 2, 3], [0, 0, 5]]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1], [0, 0, 1]]


def test_samples_of_length_zero():
    empty = torch.zeros(0, dtype=torch.int64)
    batch = data.pad(mask="tokens")([{"tokens": empty}, {"tokens": empty}])
    assert batch["tokens"].shape == (2, 0)
    assert torch.isnan(data.padding(batch).value)
    assert data.pad(length=2)([{"tokens": empty}])["tokens"].tolist() == [[0, 0]]
    # An empty list has no dtype: it takes that of the others.
    batch = data.pad()([{"tokens": []}, {"tokens": [1, 2]}])
    assert batch["tokens"].tolist() == [[0, 0], [1, 2]]
    assert batch["tokens"].dtype == torch.int64


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        ([], {}, "the batch has no samples"),
        ([[1, 2]], {}, "a sample is a list; needs mappings"),
        ([{"x": 1}, {"y": 1}], {}, r"fields \['x'\] and \['y'\]"),
        ([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 2)}], {}, r"field x has shapes \[\(1, 2\), \(2, 2\)\].*fields="),
        ([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 3)}], {"fields": ["x"]}, "only the first axis may differ"),
        ([{"x": [1]}, {"x": [1.5]}], {}, "torch.float32.*torch.int64|torch.int64.*torch.float32"),
        ([{"x": object()}], {}, "field x holds a object; needs a tensor"),
        ([{"x": None}], {}, "field x holds a NoneType"),
        ([{"x": 1}], {"fields": ["x"]}, "only the first axis may differ"),
        ([{"x": [1]}], {"mask": "tokens"}, "mask='tokens' is not a field; there are x"),
        ([{"x": [1], "attention_mask": [0]}], {"mask": "x"}, "mask= would replace the field attention_mask"),
        ([{"x": 1}], {"mask": "x"}, "mask='x' holds 1; needs one of sequences"),
        ([{"x": "text"}], {"mask": "x"}, "mask='x' holds 'text'; needs one of sequences"),
    ],
)
def test_samples_that_cannot_be_padded_are_errors_that_say_why(samples, options, message):
    with pytest.raises(DataError, match=message):
        data.pad(**options)(samples)


@pytest.mark.parametrize(
    "options",
    [{"length": 0}, {"multiple": 0}, {"length": 8, "multiple": 2}, {"side": "middle"}, {"cut": True}],
)
def test_wrong_options_are_errors_that_name_them(options):
    with pytest.raises(OptionError, match=f"pad: {next(iter(options))}"):
        data.pad(**options)


# The share of padding


def test_padding_of_packed_rows():
    batch = data.pack([[1, 2, 3], [4, 5]], 4, rows=3)
    assert float(data.padding(batch)) == pytest.approx(7 / 12)


def test_padding_is_counted_exactly_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        share = data.padding({"attention_mask": torch.ones(300, 300)})
    finally:
        torch.set_default_dtype(torch.float32)
    assert share.total.dtype == share.weight.dtype == torch.float32
    assert float(share.weight) == 90_000


def test_padding_adds_up_over_batches():
    first = data.padding(UserDict(attention_mask=torch.tensor([[1, 0]])))
    second = data.padding({"attention_mask": torch.ones(1, 6)})
    assert float(first.pooled(second)) == 1 / 8


@pytest.mark.parametrize("batch", [{"tokens": torch.ones(2, 2)}, torch.ones(2), {"attention_mask": [1]}])
def test_padding_needs_documents_or_a_mask(batch):
    with pytest.raises(BatchError, match="neither documents nor attention_mask"):
        data.padding(batch)


ONES = torch.ones(2, 2)
SAMPLES = {
    "tensors": [{"x": ONES, "y": torch.tensor(1)}, {"y": torch.tensor(2), "x": -ONES, "more": ONES}],
    "numbers": [{"x": ONES, "y": 1.5}, {"x": ONES, "y": 2.5}],
    "trees": [{"x": {"y": ONES}}, {"x": {"y": -ONES}}],
    "parameters": [{"x": torch.nn.Parameter(ONES)}, {"x": ONES}],
    "nothing": [{}, {}],
    "shapes": [{"x": ONES}, {"x": ONES[0]}],
    "sparse": [{"x": ONES.to_sparse()}] * 2,
    "missing": [{"x": ONES, "y": ONES}, {"x": ONES}],
    "types": [{"x": ONES}, {"x": 1.0}],
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
def test_samples_are_collated_as_torch_does_it(samples):
    loader = data.loader(samples, 2, shuffle=False)
    try:
        expected = default_collate(samples)
    except Exception as error:
        with pytest.raises(DataError, match=type(error).__name__):
            next(iter(loader))
    else:
        torch.testing.assert_close(next(iter(loader)), expected, rtol=0, atol=0)
