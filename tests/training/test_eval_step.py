"""`ft.evaluate` returns exact means over all examples of the data, and changes neither the state nor the batches."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import DataError, LossError
from tests.training.problem import assert_bitwise, batches, fit, make_step, params, squares, train_by_hand


def weighted_rows():
    """Return inputs (11, 3) and targets (11,) of float64, and which rows count in the loss."""
    x, y = torch.randn(11, 3, dtype=torch.float64), torch.randn(11, dtype=torch.float64)
    return x, y, torch.arange(11) % 3 != 1


def selected_loss(params, batch):
    """Return the mean over the rows that `keep` selects, and as metrics the mean over all and the selected share."""
    x, y, keep = batch
    errors = (x @ params["w"] - y) ** 2
    count = keep.sum().double()
    length = torch.tensor(float(len(y)), dtype=torch.float64)
    return ft.Mean((errors * keep).sum(), count), {"all": errors.mean(), "share": ft.Mean(count, length)}


@pytest.mark.parametrize("size", [1, 4, 5, 11])
def test_means_are_exact_for_batches_of_unequal_length(size):
    state = make_step(loss=selected_loss).init({"w": params()["w"].double()})
    x, y, keep = weighted_rows()
    data = list(zip(x.split(size), y.split(size), keep.split(size), strict=True))
    actual = ft.evaluate(ft.eval_step(selected_loss), state, data)
    errors = (x @ state.params["w"] - y) ** 2
    expected = {"loss": errors[keep].mean(), "all": errors.mean(), "share": keep.double().mean()}
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert type(actual[name]) is float
        assert actual[name] == pytest.approx(float(value), rel=1e-14)


def test_means_of_float32_are_added_up_in_float64():
    # In float32, 2**24 + 1 is 2**24 again: the two ones would be lost.
    def loss(params, batch):
        return ft.Mean(batch * params, torch.tensor(2.0**24))

    state = ft.train_step(loss, ft.optim.sgd(0.1)).init(torch.ones(()))
    data = [torch.tensor(2.0**24), torch.tensor(1.0), torch.tensor(1.0)]
    assert ft.evaluate(ft.eval_step(loss), state, data)["loss"] == (2.0**24 + 2) / (3 * 2.0**24)


def test_the_rows_of_numpy_arrays_are_counted():
    step = ft.eval_step(lambda params, batch: torch.as_tensor(batch).float().mean())
    assert ft.evaluate(step, make_step().init(params()), [np.arange(2), np.arange(2, 8)])["loss"] == 3.5


def test_a_batch_with_unequal_axes_whose_examples_cannot_be_counted_is_warned_of():
    def loss(params, batch):
        return batch["nodes"].mean() * params["w"].sum()

    batch = {"edges": torch.ones(2, 7), "nodes": torch.ones(5, 3)}
    message = r"loss: batch.edges has 2 rows and batch.nodes 5; .* \(loss\) .*: return ft.Mean"
    with pytest.warns(UserWarning, match=message):
        ft.evaluate(ft.eval_step(loss), make_step(loss=loss).init(params()), [batch])


def test_a_batch_of_another_class_whose_examples_cannot_be_counted_is_warned_of():
    @dataclasses.dataclass
    class Batch:
        x: np.ndarray

    step = ft.eval_step(lambda params, batch: torch.as_tensor(batch.x).float().mean())
    data = [Batch(np.arange(2)), Batch(np.arange(2, 8))]
    with pytest.warns(UserWarning, match=r"examples in a Batch is not known.* \(loss\): return ft\.Mean"):
        values = ft.evaluate(step, make_step().init(params()), data)
    # The mean over batches, of 2 and 6 examples.
    assert values["loss"] == (0.5 + 4.5) / 2


def test_a_batch_that_is_a_number_has_no_examples_to_count():
    """Such as an index; there is no warning."""
    step = ft.eval_step(lambda params, batch: torch.tensor(float(batch)))
    assert ft.evaluate(step, make_step().init(params()), [1, 2])["loss"] == 1.5


def test_a_mean_over_no_examples_is_nan_with_a_warning():
    step = ft.eval_step(lambda params, batch: (batch @ params["w"]).square().mean())
    with pytest.warns(UserWarning, match="evaluate: the mean of loss is NaN.*no examples"):
        values = ft.evaluate(step, make_step().init(params()), [torch.zeros(0, 3)])
    assert math.isnan(values["loss"])


def test_a_loader_that_leaves_out_samples_is_warned_of(recwarn):
    step = ft.eval_step(lambda params, batch: (batch @ params["w"]).sum())
    state, dataset = make_step().init(params()), ft.data.arrays(torch.ones(9, 3))
    ft.evaluate(step, state, ft.data.loader(dataset, 2, drop_last=False))
    assert not recwarn
    with pytest.warns(UserWarning, match=r"leaves out 1 samples.*shuffle=False, drop_last=False"):
        ft.evaluate(step, state, ft.data.loader(dataset, 2))


def test_the_averages_of_ema_can_be_evaluated():
    state, _ = fit(make_step(ft.ema(0.5)), batches())
    evaluation = ft.eval_step(squares)
    actual = ft.evaluate(evaluation, ft.averaged(state), batches())
    average = params()["w"]
    for count in range(1, 5):
        trained, _ = train_by_hand(make_step(), batches()[:count])
        average = torch.lerp(average, trained.params["w"], 0.5)
    x, y = (torch.cat(column) for column in zip(*batches(), strict=True))
    assert actual["loss"] == pytest.approx(float(((x @ average - y) ** 2).mean()), rel=1e-5)
    assert actual != ft.evaluate(evaluation, state, batches())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", torch.bfloat16])
def test_the_loss_is_computed_in_a_narrow_dtype(dtype):
    dtypes = []

    def loss(params, batch):
        output = batch[0] @ params["w"].unsqueeze(-1)
        dtypes.append(output.dtype)
        return output.float().square().mean()

    state = make_step(loss=loss).init(params())
    wide = ft.evaluate(ft.eval_step(loss), state, batches())
    narrow = ft.evaluate(ft.eval_step(loss), state, batches(), dtype=dtype)
    assert narrow["loss"] == pytest.approx(wide["loss"], rel=1e-2)
    assert set(dtypes) == {torch.float32, torch.float16 if dtype == "fp16" else torch.bfloat16}


def test_neither_the_state_nor_random_numbers_are_changed():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    loss = ft.from_module(module, lambda model, batch: model(batch[0]).square().mean())
    state, data = make_step(loss=loss).init(), batches(3, length=2)
    copy, random_state = ft.tree.clone(state), torch.get_rng_state()
    values = ft.evaluate(ft.eval_step(loss), state, data)
    assert ft.evaluate(ft.eval_step(loss), state, data) == values
    assert_bitwise(state, copy)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_the_loss_gets_copies_of_the_dicts_of_batch_and_buffers():
    def loss(params, batch, buffers):
        buffers["count"] = buffers["count"] + 1
        batch["x"] = batch["x"] * 2
        return (batch["x"] @ params["w"]).mean(), {}, buffers

    state = make_step(loss=loss).init(params(), buffers={"count": torch.zeros(())})
    batch = {"x": torch.ones(2, 3)}
    ft.evaluate(ft.eval_step(loss), state, [batch])
    assert float(state.buffers["count"]) == 0
    assert torch.equal(batch["x"], torch.ones(2, 3))


def writes_params(params, batch, buffers):
    params["w"].add_(1)
    return squares(params, batch)


def writes_batch(params, batch, buffers):
    batch[0].mul_(2)
    return squares(params, batch)


def writes_buffers(params, batch, buffers):
    buffers["count"].add_(1)
    return squares(params, batch)


@pytest.mark.parametrize(
    ("loss", "path"), [(writes_params, "params.w"), (writes_batch, "batch.0"), (writes_buffers, "buffers.count")]
)
def test_a_loss_that_changes_its_inputs_in_place_is_an_error(loss, path):
    state = make_step(loss=loss).init(params(), buffers={"count": torch.zeros(())})
    with pytest.raises(LossError, match=f"{loss.__name__}.*{path} in place"):
        ft.evaluate(ft.eval_step(loss), state, batches(1))


def evaluate_metric(metric):
    """Evaluate a loss with this metric, called "score", and return the result."""

    def loss(params, batch):
        return params["w"].square().mean(), {"score": metric}

    return ft.evaluate(ft.eval_step(loss), make_step(loss=loss).init(params()), batches(3))


@pytest.mark.parametrize("number", [np.float32(0.5), np.int64(3), np.array(2.0), True, 0.25])
def test_metrics_may_be_numbers_of_python_and_numpy(number):
    assert evaluate_metric(number)["score"] == float(number)


@pytest.mark.parametrize(
    ("metric", "description"),
    [
        (torch.ones(2), "float32[2]"),
        ("text", "str"),
        (torch.tensor(1j), "complex64[]"),
        (ft.Mean(torch.ones(2), torch.ones(())), "a Mean of float32[2]"),
    ],
)
def test_a_metric_that_is_no_number_is_an_error(metric, description):
    message = f"loss: the metric 'score' is {description}; an evaluation takes"
    with pytest.raises(LossError, match=re.escape(message)):
        evaluate_metric(metric)


@pytest.mark.parametrize("data", [{"x": torch.ones(2, 3)}, torch.ones(2, 3), None], ids=["dict", "tensor", "None"])
def test_data_that_is_one_batch_or_nothing_is_refused(data):
    with pytest.raises(DataError, match=rf"evaluate: data is a {type(data).__name__}; needs an iterable of batches"):
        ft.evaluate(ft.eval_step(squares), make_step().init(params()), data)
