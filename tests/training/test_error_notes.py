"""Errors of a loss get a note that says what is wrong with the batch or the loss, and how to mend it."""

import re
import traceback

import pytest
import torch
from torch import nn

import ftrain as ft
from tests.training.problem import make_step, params


def make_linear(*wrappers, model=None):
    """Return a step of a linear model, or another, that reads `batch["x"]`."""
    loss = ft.from_module(model or nn.Linear(3, 1), lambda model, batch: model(batch["x"]).square().mean())
    return make_step(*wrappers, loss=loss)


def call_step(step, batch, initial_params=None):
    return step(step.init(initial_params), batch)


def call_fit(step, batch):
    return ft.fit(step, step.init(), [batch], progress=False)


def call_iterate(step, batch):
    return list(ft.iterate(step, step.init(), [batch]))


def call_evaluate(step, batch):
    return ft.evaluate(ft.eval_step(step.loss), step.init(), [batch])


@pytest.mark.parametrize("call", [call_step, call_fit, call_iterate, call_evaluate])
@pytest.mark.parametrize(
    ("batch", "note"),
    [
        ({"x": torch.zeros(2, 3).numpy()}, r"NumPy arrays \(batch\.x\), .*torch\.from_numpy, .*ft\.data\.loader"),
        ({"x": torch.zeros(2, 3).double()}, r"batch\.x is float64\[2, 3\], but the parameters are float32: convert"),
        ({"x": [[0.0] * 3] * 2}, r"lists in place of tensors \(batch\.x\), .*\.pad\(\), .*return_tensors='pt'$"),
        ({"x": torch.zeros(2, 3).byte()}, r"uint8 tensors \(batch\.x\), .*x\.float\(\) / 255"),
        ({"x": [torch.zeros(2)] * 3}, r"lists in place of tensors \(batch\.x\), .*collate=ft\.data\.pad\(\)"),
        ({"y": torch.zeros(2, 3)}, r"Linear\): its second argument was this batch: batch\.y is float32\[2, 3\]$"),
        ((torch.zeros(2, 3), 7), r"this batch: batch\.0 is float32\[2, 3\], batch\.1 is int$"),
    ],
    ids=["numpy", "float64", "lists", "uint8", "columns", "names", "tuple"],
)
def test_a_batch_that_does_not_fit_the_parameters_is_named_by_a_note(call, batch, note):
    with pytest.raises((TypeError, RuntimeError, KeyError)) as caught:
        call(make_linear(), batch)
    (message,) = caught.value.__notes__
    assert re.search(note, message)
    assert message in "".join(traceback.format_exception(caught.value))


def notes_of(error_type, call, *arguments):
    """Return the notes of the error that a call must raise, as one text."""
    with pytest.raises(error_type) as caught:
        call(*arguments)
    return "\n".join(caught.value.__notes__)


def test_a_batch_on_another_device_is_named():
    notes = notes_of(RuntimeError, call_step, make_linear(), {"x": torch.zeros(2, 3, device="meta")})
    assert "batch.x is on meta, but the parameters are on cpu" in notes


def test_a_criterion_that_is_passed_without_its_module_is_named():
    step = make_step(loss=lambda model, batch: model(batch))
    notes = notes_of(TypeError, call_step, step, torch.ones(2, 3), params())
    assert "ft.from_module(module, criterion)" in notes


def test_a_loss_that_calls_backward_is_named():
    def loss(params, batch):
        value = (params["w"] * batch).square().sum()
        value.backward()
        return value

    assert "called .backward()" in notes_of(RuntimeError, call_step, make_step(loss=loss), torch.ones(3), params())


def test_uint8_is_named_if_an_operation_does_not_take_it():
    """BatchNorm raises an error of another class than a linear layer, which the tests above have."""
    step = make_linear(model=nn.BatchNorm1d(3))
    notes = notes_of(NotImplementedError, call_step, step, {"x": torch.zeros(2, 3).byte()})
    assert "uint8 tensors (batch.x)" in notes


def test_a_float64_batch_is_named_if_the_step_is_compiled_and_accumulates():
    """The graph of a step that accumulates is captured with microbatches."""
    step = make_linear(ft.accumulate(2), ft.compiled(backend="eager"))
    assert "batch.x is float64[" in notes_of(RuntimeError, call_step, step, {"x": torch.zeros(2, 3).double()})


@pytest.mark.parametrize("wrapper", [ft.accumulate(2), ft.compiled(backend="eager")], ids=["accumulate", "compiled"])
def test_the_gradient_of_an_input_that_is_no_leaf_says_how_to_take_it(wrapper):
    def loss(params, batch):
        (slope,) = torch.autograd.grad((batch["x"] * params["w"]).sum(), batch["x"], create_graph=True)
        return slope.square().mean()

    batch = {"x": torch.ones(4, 3, requires_grad=True)}
    notes = notes_of(RuntimeError, call_step, make_step(wrapper, loss=loss), batch, params())
    assert "x = batch['x'].detach().requires_grad_()" in notes


def test_a_gradient_in_an_evaluation_gets_a_note_that_says_how_to_take_it():
    def slope(w, batch):
        x = batch["x"].detach().requires_grad_()
        return torch.autograd.grad((w * x).square().sum(), x, create_graph=True)[0].square().mean()

    def under_enable_grad(w, batch):
        with torch.enable_grad():
            return slope(w, batch)

    state, data = ft.train_step(slope, ft.optim.sgd(0.1)).init(torch.ones(2)), [{"x": torch.ones(3, 2)}]
    assert "under torch.enable_grad()" in notes_of(RuntimeError, ft.evaluate, ft.eval_step(slope), state, data)
    assert ft.evaluate(ft.eval_step(under_enable_grad), state, data) == {"loss": 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_error_that_has_nothing_to_do_with_the_batch_gets_no_note(dtype):
    """Also if the dtype of the batch is not that of the parameters."""

    def loss(params, batch):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck") as caught:
        call_step(make_step(loss=loss), {"x": torch.zeros(2, 3, dtype=dtype), "name": "train"}, params())
    assert not hasattr(caught.value, "__notes__")
