"""Losses without a gradient, with a wrong result or signature, or that are not pure functions."""

import collections
import types

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError, StructureError
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, params, run, squares

Pair = collections.namedtuple("Pair", "first second")
CAPTURED = ft.compiled(backend="eager", lowering="whole")
modes = pytest.mark.parametrize("wrappers", [(), (CAPTURED,), (ft.accumulate(2),)], ids=["eager", "whole", "pieces"])


def mean(total, weight):
    return lambda params, batch: ft.Mean(total(params), weight(params))


def total(params):
    return params["w"].sum() + params["b"]


@modes
@pytest.mark.parametrize(
    ("loss", "actual"),
    [
        (lambda params, batch: params["w"], "returned float32[3]"),
        (lambda params, batch: params["w"].sum().reshape(1), "returned float32[1]"),
        (lambda params, batch: None, "returned NoneType"),
        (lambda params, batch: 1.0, "returned float"),
        (lambda params, batch: {"loss": params["w"].sum()}, "returned dict"),
        (lambda params, batch: (total(params), {}, None, 4), "tuple of length 4"),
        (lambda params, batch: (total(params),), "tuple of length 1"),
        (lambda params, batch: (total(params), [1]), "needs a dict of tensors or Means"),
        (mean(lambda p: p["w"], lambda p: torch.ones(())), "returned a Mean of float32[3]"),
        (mean(total, lambda p: torch.ones(2)), "returned a Mean of float32[2]"),
        (mean(total, lambda p: 4), "returned a Mean of int"),
    ],
)
def test_a_loss_that_returns_another_type_is_an_error(loss, actual, wrappers):
    with failing(LossError, "loss: ", actual):
        run(loss, *wrappers)


@modes
@pytest.mark.parametrize("value", [ft.Mean(torch.ones(()), 4), ft.Mean(1.0, 2.0), ft.Mean(1.0, torch.ones(()))])
def test_a_metric_that_is_a_mean_of_python_numbers_is_an_error(value, wrappers):
    with failing(LossError, "loss: the metric 'kept' is a Mean of ", "needs 0-d tensors", "torch.tensor(4.0)"):
        run(lambda params, batch: (total(params), {"kept": value}), *wrappers)


def test_the_error_lists_the_allowed_results():
    with failing(LossError, "0-d tensor", "Mean", "(loss, metrics)", "(loss, metrics, buffers)"):
        run(lambda params, batch: None)
    with failing(LossError, "(loss, metrics, buffers), such as its ['loss']"):
        run(lambda params, batch: {"loss": params["w"].sum(), "logits": params["w"]})


def test_errors_name_the_loss_function():
    def my_loss(params, batch):
        return None

    with failing(LossError, "my_loss: returned NoneType"):
        run(my_loss)


@modes
@pytest.mark.parametrize(
    "loss",
    [
        lambda params, batch: total(params).detach(),
        lambda params, batch: batch["x"].sum(),
        lambda params, batch: torch.zeros(()),
    ],
)
def test_a_loss_that_does_not_depend_on_the_parameters_is_an_error(loss, wrappers):
    with failing(LossError, "does not depend on the parameters", "detach", "no_grad"):
        run(loss, *wrappers)


def test_a_loss_that_was_a_python_number_is_an_error_that_names_item():
    with failing(LossError, "does not depend on the parameters", ".item()"):
        run(lambda params, batch: torch.tensor(total(params).item()))


@modes
def test_a_weight_that_depends_on_parameters_is_an_error(wrappers):
    with failing(LossError, "weight of the Mean depends on the parameters", "detach"):
        run(mean(total, lambda p: p["w"].sum()), *wrappers)


@modes
@pytest.mark.parametrize("loss", [lambda params, batch: total(params).long(), mean(lambda p: total(p) > 0, total)])
def test_a_loss_of_integers_or_bools_is_an_error(loss, wrappers):
    with failing(LossError, "the loss is ", "needs a floating-point"):
        run(loss, *wrappers)


@modes
def test_an_unused_parameter_is_an_error_that_names_it(wrappers):
    def loss(params, batch):
        return params["used"].sum() + params["deep"][0]["yes"].sum()

    tree = {"used": torch.ones(2), "deep": [{"yes": torch.ones(2), "no": torch.ones(3)}]}
    step = make(loss, *wrappers)
    with failing(LossError, "1 of 3", "deep.0.no", "allow_unused=True", "trainable="):
        step(step.init(tree), batch())


def test_many_unused_parameters_are_counted_and_not_all_listed():
    tree = {f"p{index:02}": torch.ones(1) for index in range(30)}
    step = make(lambda params, batch: params["p00"].sum())
    with failing(LossError, "29 of 30", "p01", "...") as caught:
        step(step.init(tree), batch())
    assert "p29" not in str(caught.value)


@modes
def test_an_unused_parameter_that_is_allowed_has_a_gradient_of_zero(wrappers):
    step = make(lambda params, batch: params["w"].sum(), *wrappers, ft.clip(1e9), allow_unused=True)
    state = step.init(params())
    new, metrics = step(state, batch())
    assert torch.equal(new.params["b"], state.params["b"])
    assert torch.equal(new.opt_state["mu"]["b"], torch.zeros(()))
    assert not torch.equal(new.params["w"], state.params["w"])
    assert float(metrics["grad_norm"]) == pytest.approx(3**0.5)


@pytest.mark.parametrize(
    "wrappers", [(), (ft.accumulate(2),), (ft.update_in_backward(),)], ids=["plain", "accumulate", "late"]
)
def test_a_sparse_gradient_is_an_error(wrappers):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Embedding(5, 3, sparse=True))
    loss = ft.from_module(model, lambda model, batch: model[0](model[1](batch["x"])).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    with failing(LossError, "the gradient of params.1.weight is sparse", "sparse=True"):
        step(step.init(), {"x": torch.tensor([0, 1, 1, 4])})


def changes_params(params, batch, buffers):
    with torch.no_grad():
        params["w"].add_(1)
    return squares(params, batch)


def changes_params_under_grad(params, batch, buffers):
    params["w"].add_(1)
    return squares(params, batch)


def changes_frozen(params, batch, buffers):
    params["b"].add_(1)
    return squares(params, batch)


def changes_batch(params, batch, buffers):
    batch["x"].mul_(2)
    return squares(params, batch)


def changes_buffers(params, batch, buffers):
    buffers["seen"].add_(1)
    return squares(params, batch), {}, buffers


@modes
@pytest.mark.parametrize(
    ("loss", "path"),
    [
        (changes_params, "params.w"),
        (changes_params_under_grad, "params"),
        (changes_frozen, ".b in place"),
        (changes_batch, "batch.x"),
        (changes_buffers, "buffers.seen"),
    ],
)
def test_a_loss_that_changes_its_inputs_in_place_is_an_error(loss, path, wrappers):
    step = make(loss, *wrappers, trainable=["w"])
    state = step.init(params(), buffers={"seen": torch.zeros(())})
    with failing(LossError, loss.__name__, "in place", path, "clone"):
        step(state, batch())


def test_a_loss_that_assigns_to_the_dict_of_buffers_does_not_change_the_old_state():
    def counting(params, batch, *, buffers):
        buffers["seen"] = buffers["seen"] + 1
        return squares(params, batch), {}, buffers

    step = make(counting)
    state = step.init(params(), buffers={"seen": torch.zeros(())})
    new, _ = step(state, batch())
    assert float(new.buffers["seen"]) == 1
    assert float(state.buffers["seen"]) == 0


def test_a_loss_that_assigns_to_the_batch_does_not_change_that_of_the_caller():
    def doubling(params, batch):
        batch["x"] = batch["x"] * 2
        return squares(params, batch)

    inputs = batch()
    run(doubling, inputs=inputs)
    assert_same_bits(inputs, batch())


@pytest.mark.parametrize("wrappers", [(), (CAPTURED,)], ids=["eager", "whole"])
@pytest.mark.parametrize(
    ("returned", "path"),
    [
        ({"other": torch.zeros(())}, "seen"),
        (None, "seen"),
        ({"seen": torch.zeros(2)}, "seen"),
        ({"seen": torch.zeros((), dtype=torch.int64)}, "seen"),
    ],
)
def test_buffers_of_another_structure_are_an_error(returned, path, wrappers):
    step = make(lambda params, batch, *, buffers: (squares(params, batch), {}, returned), *wrappers)
    state = step.init(params(), buffers={"seen": torch.zeros(())})
    with pytest.raises(ft.errors.FtrainError, match=path) as caught:
        step(state, batch())
    assert isinstance(caught.value, LossError | ft.errors.StructureError)


@pytest.mark.parametrize("donate", [False, True])
def test_buffers_in_other_containers_are_returned_in_those_of_the_state(donate):
    def loss(params, batch, buffers):
        carried = collections.OrderedDict(b=buffers["b"] + 2, a=(buffers["a"].first + 1, None))
        return total(params), {}, carried

    step = make(loss, ft.skip_nonfinite(), *[ft.donated()] * donate)
    state = step.init(params(), buffers={"a": Pair(torch.zeros(()), None), "b": torch.zeros(())})
    for _ in range(2):
        state, _ = step(state, batch())
    assert type(state.buffers) is dict
    assert state.buffers["a"] == Pair(torch.tensor(2.0), None)
    assert state.buffers["b"] == 4


def test_a_loss_without_buffers_may_return_none_for_them():
    step = make(lambda params, batch: (total(params), {}, None), ft.skip_nonfinite())
    state, _ = step(step.init(params()), batch())
    assert state.buffers == {}


@pytest.mark.parametrize(
    ("leaf", "remedy"), [(0, r"torch\.tensor\(0\)"), (types.SimpleNamespace(x=torch.ones(1)), "optree.dataclasses")]
)
def test_buffers_and_parameters_that_are_not_tensors_are_an_error(leaf, remedy):
    step = make(lambda params, batch, buffers: total(params))
    with pytest.raises(StructureError, match=rf"buffers\.n is .*; needs a tensor: .*{remedy}"):
        step.init(params(), buffers={"n": leaf})
    with pytest.raises(StructureError, match=r"params\.n is " + ("int" if leaf == 0 else ".*optree.dataclasses")):
        step.init({**params(), "n": leaf})


@modes
def test_a_metric_called_loss_is_an_error(wrappers):
    with failing(LossError, "metric", "'loss'", "rename"):
        run(lambda params, batch: (squares(params, batch), {"loss": torch.zeros(())}), *wrappers)


@pytest.mark.parametrize(
    ("name", "wrappers"), [("lr", ()), ("grad_norm", (ft.clip(1.0),)), ("skipped", (ft.skip_nonfinite(),))]
)
def test_a_metric_with_the_name_of_one_that_the_step_reports_is_an_error(name, wrappers):
    with failing(LossError, "metric", repr(name), "rename"):
        run(lambda params, batch: (squares(params, batch), {name: torch.zeros(())}), *wrappers)


@pytest.mark.parametrize(
    ("loss", "signature"),
    [
        (lambda: None, "loss()"),
        (lambda params: None, "loss(params)"),
        (lambda params, batch, more: None, "loss(params, batch, more)"),
        (lambda params, batch, *, temperature: None, "temperature"),
    ],
)
def test_a_loss_with_other_arguments_is_an_error_that_shows_its_signature(loss, signature):
    with failing(LossError, "train_step", signature, "(params, batch)"):
        ft.train_step(loss, ft.optim.sgd(0.1))
    with failing(LossError, "eval_step", signature, "(params, batch)"):
        ft.eval_step(loss)


@pytest.mark.parametrize("loss", [3, None, "mse"])
def test_a_loss_that_is_not_a_function_is_an_error(loss):
    with failing(LossError, "train_step", "function", repr(loss)):
        ft.train_step(loss, ft.optim.sgd(0.1))


def test_a_module_in_place_of_a_loss_is_an_error_that_names_from_module():
    with failing(LossError, "Linear", "from_module"):
        ft.train_step(nn.Linear(3, 1), ft.optim.sgd(0.1))


@pytest.mark.parametrize("wrappers", [(), (CAPTURED,), (ft.accumulate(2),)], ids=["eager", "whole", "pieces"])
@pytest.mark.parametrize("part", ["trained", "frozen"])
def test_an_assignment_to_data_is_an_error(part, wrappers):
    """As in the key encoder of momentum contrast (MoCo). In a graph the assignment would be lost."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.trained, self.frozen = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)

        def forward(self, x):
            weight = getattr(self, part).weight
            weight.data = weight.data * 0.9 + self.trained.weight.data * 0.1
            return self.trained(x) - self.frozen(x)

    loss = ft.from_module(Pair(), lambda model, batch: model(batch["x"]).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    with failing(LossError, f"{part}.weight", "in place", "buffers"):
        step(step.init(), batch())


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2),)], ids=["eager", "pieces"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_to_data_in_place_is_an_error(dtype, wrappers):
    """As in normalising flows, where the first batch initialises a parameter."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(2, 3, dtype=dtype).T)

        def forward(self, x):
            self.shift.data.copy_(x.mean(0)[:, None])
            return x.to(dtype) @ self.shift

    loss = ft.from_module(Shift(), lambda model, batch: model(batch["x"]).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    with failing(LossError, "params.shift in place through its .data", "run it once before step.init()"):
        step(step.init(), batch())


def test_buffers_that_get_their_shape_in_the_first_call_are_an_error():
    """Such as those of torch's observers per channel."""

    class Range(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.register_buffer("largest", torch.empty(0))

        def forward(self, x):
            self.largest = x.detach().abs().amax(0)
            return super().forward(x)

    step = ft.train_step(ft.from_module(Range(), lambda model, batch: model(batch["x"]).mean()), ft.optim.sgd(0.1))
    with failing(StructureError, "largest: found float32[3], needs float32[0]", "once before step.init()"):
        step(step.init(), batch())
