"""The loss scale of fp16: the metric that a step returns, and small gradients that it keeps."""

import pytest
import torch

import ftrain as ft
from ftrain import tree
from ftrain.errors import LossError
from ftrain.training import progress
from tests.faults.problem import batch, failing, make, params, squares


def scaled_squares(params, batch):
    """Return a loss whose gradients are finite unless the factor of the batch is not."""
    return squares(params, batch) * 2.0**-8 * batch["factor"]


# In a graph, all batches must have the same names.
FINITE_BATCH = {**batch(), "factor": torch.ones(())}
OVERFLOWING_BATCH = {**batch(), "factor": torch.tensor(float("inf"))}


@pytest.mark.parametrize("wrappers", [(), (ft.donated(),), (ft.accumulate(2),), (ft.compiled(backend="eager"),)])
def test_the_metrics_have_the_scale_that_the_step_used(wrappers):
    step = make(scaled_squares, ft.with_amp("fp16"), ft.skip_nonfinite(), *wrappers)
    state, history = step.init(params()), []
    for inputs in (FINITE_BATCH, OVERFLOWING_BATCH, OVERFLOWING_BATCH, FINITE_BATCH):
        state, metrics = step(state, inputs)
        assert metrics["loss_scale"].shape == ()
        assert metrics["loss_scale"].dtype == torch.float32
        history.append(metrics)
    # Read at the end, because a later step might have written to the tensors of an earlier one.
    assert [float(metrics["loss_scale"]) for metrics in history] == [2.0**16, 2.0**16, 2.0**15, 2.0**14]
    assert [bool(metrics["skipped"]) for metrics in history] == [False, True, True, False]
    assert float(state.slots["with_amp"]["scale"]) == 2.0**14


def test_the_metric_loss_scale_shares_no_memory_with_the_state():
    step = make(squares, ft.with_amp("fp16"))
    state = step.init(params())
    new_state, metrics = step(state, batch())
    addresses = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves((state, new_state))}
    assert metrics["loss_scale"].untyped_storage().data_ptr() not in addresses


def test_fit_records_the_loss_scale_and_does_not_show_it_in_its_progress():
    step = make(scaled_squares, ft.with_amp("fp16"), ft.accumulate(2))
    _, history = ft.fit(step, step.init(params()), [FINITE_BATCH, OVERFLOWING_BATCH, FINITE_BATCH], progress=False)
    assert history["loss_scale"] == [2.0**16, 2.0**16, 2.0**15]
    assert "loss_scale" not in progress.describe(history[-1], {}, 1.0, 0)


def test_bf16_has_no_loss_scale():
    step = make(squares, ft.with_amp("bf16"))
    _, metrics = step(step.init(params()), batch())
    assert set(metrics) == {"loss", "lr"}


def test_a_metric_called_loss_scale_is_refused():
    step = make(lambda params, batch: (squares(params, batch), {"loss_scale": torch.ones(())}), ft.with_amp("fp16"))
    with failing(LossError, "with_amp", "'loss_scale'", "rename"):
        step(step.init(params()), batch())


def test_small_gradients_are_not_lost_in_fp16():
    """This is why parameters must be float32: the scaled gradient is not 0 in float16, and the unscaled one is."""

    def loss(params, batch):
        return (params["w"] * batch).sum()

    step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), ft.with_amp("fp16"))
    state = step.init({"w": torch.zeros(2)})
    state, _ = step(state, torch.full((2,), 2.0**-26))
    assert state.params["w"].tolist() == [-(2.0**-26)] * 2
    assert torch.tensor(2.0**-26).half() == 0
