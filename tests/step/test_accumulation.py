"""`accumulate`: gradients and metrics of microbatches, of any weight, in any dtype and for unused parameters."""

import math

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import optim, tree
from ftrain.errors import LossError
from tests.parallel.ranks import run
from tests.step.states import assert_same_bits


def sum_of_views(params, batch):
    # The gradients of the two parameters are views of the same memory.
    return ((params["a"].view(6) + params["b"].view(6)) * batch["x"].sum(0)).sum()


LOSSES = {
    "two gradients in one memory": (sum_of_views, {"a": torch.ones(2, 3), "b": torch.ones(3, 2)}),
    "one number for all": (lambda params, batch: params["a"].sum() * batch["x"].sum(), {"a": torch.ones(3, 4)}),
    "in another layout": (
        lambda params, batch: (params["a"].t().contiguous() * batch["x"].sum()).sum(),
        {"a": torch.ones(3, 4)},
    ),
    "parts of one gradient": (
        lambda params, batch: (torch.cat([params["a"], params["b"]]) * batch["x"].sum(0)).sum(),
        {"a": torch.ones(2), "b": torch.ones(4)},
    ),
    "the number with which the backward pass starts": (
        lambda params, batch: params["a"] + batch["x"].sum(),
        {"a": torch.tensor(1.0)},
    ),
    "a parameter without elements": (
        lambda params, batch: params["a"].sum() * batch["x"].sum() + params["b"].sum(),
        {"a": torch.ones(3), "b": torch.ones(0, 3)},
    ),
}


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_gradients_overwrite_no_other_tensor(name, weighted):
    loss, params = LOSSES[name]

    def weighted_loss(params, batch):
        count = batch["x"].shape[0] * 1.5
        return ft.Mean(loss(params, batch) * count, torch.tensor(count))

    batch = {"x": torch.arange(24.0).view(4, 6)}
    before = batch["x"].clone()
    step = ft.compose(ft.train_step(weighted_loss if weighted else loss, optim.sgd(0.1)), ft.accumulate(4))
    state = step.init(params)
    new, _ = step(state, batch)
    expected = tree.clone(state.params)
    for row in batch["x"].split(1):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in state.params.items()}
        grads = torch.autograd.grad(loss(leaves, {"x": row}), list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            expected[name] -= 0.1 * grad / 4
    assert torch.equal(batch["x"], before)
    torch.testing.assert_close(new.params, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_gradients_of_parameters_that_the_second_microbatch_uses_first(name):
    loss, params = LOSSES[name]

    def later_loss(params, batch):
        always = params["always"] * batch["x"].sum()
        return always + loss(params, batch) if batch["x"][0, 0] > 0 else always

    step = ft.compose(ft.train_step(later_loss, optim.sgd(0.1)), ft.accumulate(4))
    state, rows = step.init({**params, "always": torch.tensor(1.0)}), torch.arange(24.0).view(4, 6)
    new, _ = step(state, {"x": rows})
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in state.params.items()}
    (sum(later_loss(leaves, {"x": row}) for row in rows.split(1)) / 4).backward()
    expected = {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}
    torch.testing.assert_close(new.params, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weights", [[0.0, 3.0, 1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1e-30, 1.0, 1e30]])
def test_microbatches_of_any_weight_are_a_weighted_mean(weights):
    def loss(params, batch):
        return ft.Mean((params["w"] * batch["x"] * batch["weight"]).sum(), batch["weight"].sum())

    weight = torch.tensor(weights, dtype=torch.float64)
    batch = {"x": torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64), "weight": weight}
    step = ft.train_step(loss, optim.sgd(1.0))
    state = step.init({"w": torch.ones((), dtype=torch.float64)})
    new, metrics = ft.accumulate(3)(step)(state, batch)
    grad = (batch["x"] * weight).sum() / weight.sum() if weight.sum() else torch.zeros(())
    torch.testing.assert_close(new.params["w"], 1.0 - grad.double(), rtol=1e-12, atol=1e-12)
    expected, expected_metrics = step(state, batch)
    torch.testing.assert_close(new.params["w"], expected.params["w"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics["loss"], expected_metrics["loss"], rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("weights", [[1.0, 60000.0], [60000.0, 1.0], [0.0, 60000.0]])
def test_scaled_gradients_of_microbatches_of_any_weight_do_not_overflow(weights):
    """The gradient of a mean does not overflow, and no weighted sum is larger."""

    def loss(model, batch):
        weight = batch["weight"].sum()
        return ft.Mean(model(batch["x"]).float().mean() * weight, weight)

    batch = {"x": torch.ones(2, 4), "weight": torch.tensor(weights)}
    step = ft.train_step(ft.from_module(nn.Linear(4, 1), loss), optim.sgd(1.0))
    accumulated = ft.compose(step, ft.with_amp("fp16"), ft.accumulate(2))
    new, metrics = accumulated(accumulated.init(), batch)
    assert not metrics["skipped"]
    expected, _ = step(step.init(), batch)
    torch.testing.assert_close(new.params, expected.params, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", range(4))
def test_an_update_is_skipped_if_the_gradient_of_any_microbatch_is_not_finite(bad):
    loss = ft.from_module(nn.Linear(2, 1), lambda model, batch: model(batch).mean())
    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), ft.accumulate(2), ft.skip_nonfinite(3))
    state, batch = step.init(), torch.ones(4, 2)
    batch[bad] = float("inf")
    new, metrics = step(state, batch)
    assert metrics["skipped"]
    assert_same_bits(new.params, state.params)


def loss_without_b(params, batch):
    return (params["a"] * batch).sum()


def test_a_parameter_that_the_loss_does_not_use_is_refused():
    step = ft.accumulate(2)(ft.train_step(loss_without_b, optim.sgd(0.1)))
    with pytest.raises(LossError, match="does not use 1 of 2 parameters: b"):
        step(step.init({"a": torch.ones(2), "b": torch.ones(2)}), torch.ones(4, 2))


def test_a_parameter_that_the_loss_need_not_use_is_not_changed():
    step = ft.accumulate(2)(ft.train_step(loss_without_b, optim.sgd(0.1), allow_unused=True))
    new, _ = step(step.init({"a": torch.ones(2), "b": torch.ones(2)}), torch.ones(4, 2))
    assert torch.equal(new.params["b"], torch.ones(2))
    assert not torch.equal(new.params["a"], torch.ones(2))


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_parameter_that_some_microbatches_do_not_use(weighted, wrappers):
    """Such as an expert. `b` and `c` get one tensor as their first gradient, which must not become both sums."""
    params = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}

    def loss(params, batch):
        is_last = len(batch["x"]) == 1  # Of three microbatches of 2, 2 and 1 examples.
        total = (params["a"] * batch["x"]).sum() + ((params["b"] + params["c"]).sum() if is_last else 0.0)
        return ft.Mean(total, torch.tensor(float(len(batch["x"])))) if weighted else total / len(batch["x"])

    step = ft.compose(ft.train_step(loss, optim.sgd(1.0)), ft.accumulate(3), *wrappers)
    state, _ = step(step.init(params), {"x": torch.ones(5, 2)})
    expected = {"a": torch.zeros(2), "b": torch.full((2,), 0.8), "c": torch.full((2,), 0.8)}
    torch.testing.assert_close(state.params, expected)


def test_one_compiled_loss_serves_all_microbatches():
    """Dynamo does not compile again because the leaves have a gradient from the second microbatch on."""
    loss = ft.from_module(nn.Linear(3, 1), lambda model, batch: model(batch["x"]).square().mean())
    step = ft.train_step(loss, optim.sgd(0.1))
    state, batch = step.init(), {"x": torch.randn(8, 3)}
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    split = ft.compose(step, ft.accumulate(4), ft.compiled(lowering="split", backend="eager"))
    for _ in range(2):
        new, _ = split(state, batch)
    assert counters["stats"]["unique_graphs"] == 1
    expected, _ = ft.accumulate(4)(step)(state, batch)
    torch.testing.assert_close(new.params, expected.params)


def mean_times_weight(params, batch):
    """Return a Mean whose total is a mean times its weight: NaN x 0 if nothing counts."""
    count = batch["mask"].sum()
    prediction = (batch["x"] * batch["mask"] * params["a"]).sum() / count.clamp_min(1)
    mean = (prediction - 1).square() + torch.where(count == 0, torch.nan, 0.0)
    return ft.Mean(mean * count, count), {"copy": ft.Mean(mean.detach() * count, count)}


WITHOUT_WEIGHT = {"x": torch.tensor([7.0, 8.0]), "mask": torch.zeros(2)}
WITH_WEIGHT = {"x": torch.tensor([2.0, 3.0]), "mask": torch.tensor([1.0, 0.0])}


def state_with(value):
    return ft.train_step(mean_times_weight, optim.sgd(0.1)).init({"a": torch.tensor(value)})


@pytest.mark.parametrize(
    "wrappers",
    [
        (),
        (ft.skip_nonfinite(1),),
        (ft.clip(100.0),),
        (ft.with_amp("fp16"),),
        (ft.compiled(lowering="whole", backend="eager"),),
    ],
    ids=["plain", "skip_nonfinite", "clip", "fp16", "whole"],
)
@pytest.mark.parametrize(
    "microbatches", [(WITHOUT_WEIGHT, WITH_WEIGHT), (WITH_WEIGHT, WITHOUT_WEIGHT)], ids=["first", "last"]
)
def test_a_microbatch_without_weight_adds_nothing_even_if_it_is_nan(microbatches, wrappers):
    base = ft.train_step(mean_times_weight, optim.sgd(0.1))
    state = state_with(1.5)
    expected, expected_metrics = base(state, WITH_WEIGHT)
    step = ft.compose(base, ft.accumulate(2), *wrappers)
    batch = {name: torch.cat([microbatch[name] for microbatch in microbatches]) for name in WITH_WEIGHT}
    new, metrics = step(step.init({"a": torch.tensor(1.5)}), batch)
    torch.testing.assert_close(new.params, expected.params, rtol=1e-6, atol=0)
    assert not torch.equal(new.params["a"], state.params["a"])
    assert float(metrics["loss"]) == float(metrics["copy"]) == float(expected_metrics["loss"])


def test_a_batch_without_weight_changes_nothing_and_has_no_mean():
    step = ft.skip_nonfinite(1)(ft.train_step(mean_times_weight, optim.sgd(0.1)))
    state = step.init({"a": torch.tensor(1.5)})
    new, metrics = step(state, WITHOUT_WEIGHT)
    assert torch.equal(new.params["a"], state.params["a"])
    assert int(new.slots["skip_nonfinite"]["skipped"]) == 0
    assert torch.isnan(metrics["loss"])


def test_an_evaluation_leaves_out_batches_without_weight():
    evaluation, state = ft.eval_step(mean_times_weight), state_with(1.5)
    expected = ft.evaluate(evaluation, state, [WITH_WEIGHT])
    assert ft.evaluate(evaluation, state, [WITHOUT_WEIGHT, WITH_WEIGHT, WITHOUT_WEIGHT]) == expected
    assert expected["copy"] == expected["loss"]


def test_an_evaluation_of_batches_without_weight_has_no_mean_and_warns():
    evaluation = ft.eval_step(mean_times_weight)
    with pytest.warns(UserWarning, match="the mean of loss, copy is NaN"):
        means = ft.evaluate(evaluation, state_with(1.5), [WITHOUT_WEIGHT, WITHOUT_WEIGHT])
    assert all(math.isnan(mean) for mean in means.values())


def test_an_evaluation_does_not_hide_a_nan_that_counts():
    means = ft.evaluate(ft.eval_step(mean_times_weight), state_with(torch.nan), [WITHOUT_WEIGHT, WITH_WEIGHT])
    assert math.isnan(means["loss"])


def test_the_mean_of_a_metric_of_large_integers_does_not_wrap_around():
    def loss(params, batch):
        return (params["a"] * batch["x"]).mean(), {"large": torch.tensor(2**62), "exact": torch.tensor(2**24 + 1)}

    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), ft.accumulate(4))
    _, metrics = step(step.init({"a": torch.ones(3)}), {"x": torch.ones(4, 3)})
    assert (float(metrics["large"]), float(metrics["exact"])) == (2.0**62, 2**24 + 1)


@pytest.mark.parametrize(("metric", "shown"), [({"a": torch.ones(())}, "dict"), ("text", "str"), (None, "NoneType")])
def test_a_metric_that_has_no_mean_is_refused(metric, shown):
    def loss(params, batch):
        return (params["a"] * batch["x"]).mean(), {"metric": metric}

    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), ft.accumulate(2))
    with pytest.raises(LossError, match=f"accumulate: the metric 'metric' is {shown}; .* a Mean or a number"):
        step(step.init({"a": torch.ones(3)}), {"x": torch.ones(4, 3)})


@pytest.mark.parametrize(("length", "microbatches"), [(3, 2), (8, 3)])
def test_a_metric_whose_shape_differs_between_microbatches_is_refused(length, microbatches):
    """Two microbatches of three examples have two and one: the shapes [2] and [1], which would broadcast."""

    def loss(params, batch):
        errors = (params["a"] * batch["x"]).mean(1)
        return errors.mean(), {"errors": errors.detach()}

    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), ft.accumulate(microbatches))
    message = r"accumulate: the metric 'errors' has the shape \[.\] in one microbatch, and \["
    with pytest.raises(LossError, match=message):
        step(step.init({"a": torch.ones(3)}), {"x": torch.ones(length, 3)})


@pytest.mark.parametrize(("value", "dtype"), [(6e4, torch.float16), (250, torch.uint8), (1, torch.bool)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 60), (2, 30), (2, 1)])
def test_numbers_of_a_narrow_dtype_are_summed_in_a_wider_one(value, dtype, ranks, microbatches):
    """In its own dtype the sum overflows (float16), wraps around (uint8) or is True (bool)."""
    number = torch.tensor(value, dtype=dtype)

    def loss(params, batch):
        total = (params["a"] * 0).sum() + number.float()
        total = total.to(dtype) if dtype.is_floating_point else total
        return ft.Mean(total, torch.tensor(1.0)), {
            "mean": ft.Mean(number, torch.tensor(1, dtype=torch.uint8)),
            "number": number,
        }

    def metrics_on_rank(_):
        sharded = ft.sharded(ft.parallel.mesh())
        step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), ft.accumulate(microbatches), sharded)
        _, metrics = step(step.init({"a": torch.ones(3)}), torch.ones(300))
        return metrics

    for metrics in run(ranks, metrics_on_rank):
        assert metrics["loss"] == metrics["mean"] == metrics["number"] == number


@pytest.mark.parametrize(("ranks", "microbatches", "length"), [(1, 2, 8), (2, 1, 8), (2, 2, 8), (1, 2, 7), (2, 2, 7)])
def test_an_integer_that_float32_cannot_represent_keeps_its_value(ranks, microbatches, length):
    number = 2**25 + 1

    def loss(params, batch):
        return (params["a"] * 0).sum() + batch.sum(), {"tokens": torch.tensor(number)}

    def metric_on_rank(_):
        sharded = ft.sharded(ft.parallel.mesh())
        step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), ft.accumulate(microbatches), sharded)
        _, metrics = step(step.init({"a": torch.ones(3)}), torch.ones(length))
        return int(metrics["tokens"])

    assert run(ranks, metric_on_rank) == [number] * ranks


def test_a_plain_loss_in_float16_is_summed_in_a_wider_dtype():
    def loss(params, batch):
        return (params["a"] * 0).sum().half() + 3e4

    step = ft.compose(ft.train_step(loss, optim.sgd(0.1)), ft.accumulate(4))
    assert step(step.init({"a": torch.ones(3)}), torch.ones(8))[1]["loss"] == 3e4


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("first_length", "num_messages"),
    [
        (1, 1),
        (4, 0),  # A short batch that is not the first is normal at the end of an epoch.
    ],
)
def test_a_first_batch_with_fewer_examples_than_microbatches_is_logged(first_length, num_messages, wrappers, caplog):
    step = ft.train_step(lambda params, batch: (params * batch).square().mean(), optim.sgd(0.1))
    step = ft.compose(step, ft.accumulate(4), *wrappers)
    state = step.init(torch.ones(()))
    for length in (first_length, 1):
        state, _ = step(state, torch.ones(length))
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == num_messages
    assert all("only 1 of 4 microbatches" in message for message in messages)
