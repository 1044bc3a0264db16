"""What `fit` takes as data and as a batch, what it refuses, and what it warns of."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ftrain as ft
from ftrain.errors import DataError
from tests.training.problem import assert_bitwise, batches, fit, make_step, train_by_hand


def test_a_dataloader_is_data():
    x, y = torch.randn(10, 3), torch.arange(10.0)
    state, history = fit(make_step(), DataLoader(TensorDataset(x, y), batch_size=4), epochs=2)
    batches_of_loader = list(zip(x.split(4), y.split(4), strict=True))
    expected, losses = train_by_hand(make_step(), batches_of_loader * 2)
    assert_bitwise(state, expected)
    assert history["loss"] == losses


def test_a_dataloader_of_dicts_and_a_loss_of_dicts():
    rows = [{"x": torch.full((3,), float(i)), "y": torch.tensor(float(i)), "id": i} for i in range(6)]
    step = make_step(loss=lambda params, batch: ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean())
    _, history = fit(step, DataLoader(rows, batch_size=2, shuffle=True), steps=7)
    assert len(history) == 7


def test_batches_may_hold_strings_and_numbers():
    def loss(params, batch):
        assert batch["name"] == "train"
        return (batch["x"] @ params["w"]).square().mean() * batch["scale"]

    data = [{"x": x, "name": "train", "scale": 2} for x, _ in batches()]
    _, history = fit(make_step(loss=loss), data)
    assert len(history) == 4


def test_batches_of_hugging_faces_collators_train_like_dicts():
    """They are of the class `BatchEncoding`, which is a mapping but no dict."""
    transformers = pytest.importorskip("transformers")
    data = [transformers.BatchEncoding({"x": x, "y": y}) for x, y in batches()]

    def loss(params, batch):
        return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()

    step = make_step(ft.accumulate(2), loss=loss)
    actual, _ = fit(step, data)
    expected, _ = fit(step, [dict(batch) for batch in data])
    assert_bitwise(actual, expected)


def test_a_cycle_over_the_data_is_logged(caplog):
    fit(make_step(), itertools.cycle(batches()), steps=3)
    (message,) = caplog.messages
    assert "does not shuffle or augment again" in message
    assert "Pass what it cycles over" in message


def test_data_that_an_earlier_run_has_begun_is_warned_of(recwarn):
    step = make_step(loss=lambda params, batch: (batch @ params["w"]).sum())
    data = ft.data.loader(ft.data.arrays(torch.ones(8, 3)), 2)
    state, _ = fit(step, data, steps=3)
    # The same state goes on with the data.
    fit(step, data, state, steps=5)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"state is at step 0, and the data at epoch 1, window 1, batch 0"):
        fit(step, data, steps=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": torch.ones(2, 3)}, r"data is a dict, one batch; needs an iterable of batches: \[batch\]"),
        (torch.ones(4, 3), r"data is a Tensor, one batch; needs an iterable of batches: \[batch\]"),
        (TensorDataset(torch.ones(4, 3)), r"data is TensorDataset; .* pass a dataset to a DataLoader"),
    ],
)
def test_data_that_is_no_iterable_of_batches_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        fit(make_step(), data)
