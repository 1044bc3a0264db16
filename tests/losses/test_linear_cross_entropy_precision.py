"""`linear_cross_entropy` in 16 bits: under autocast, and of inputs in 16 bits."""

import pytest
import torch

from ftrain.losses import linear_cross_entropy
from tests.losses.cases import randn
from tests.losses.linear_cases import (
    WIDTH,
    assert_all_close,
    layer,
    loss_and_grads,
    loss_of_logits,
    random_labels,
    relative_error,
)

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", HALVES)
def test_under_autocast_it_is_as_exact_as_the_loss_of_the_logits(dtype, smoothing):
    weight, bias = layer(torch.float32, classes=100, width=32)
    hidden, weight, labels = randn(64, 32, dtype=torch.float32), weight / 4, random_labels(64, classes=100)
    options = {"bias": bias, "label_smoothing": smoothing}
    in_float64 = hidden.double(), weight.double(), labels
    exact_total, _, *exact_grads = loss_and_grads(loss_of_logits, *in_float64, **{**options, "bias": bias.double()})
    with torch.autocast("cpu", dtype):
        actual = loss_and_grads(linear_cross_entropy, hidden, weight, labels, chunk=16, **options)
        expected = loss_and_grads(loss_of_logits, hidden, weight, labels, **options)
    assert all(tensor.dtype == torch.float32 for tensor in actual)
    # Both round the logits to 16 bits, so the values agree; the gradients have at most 1.2 times the same error.
    assert float(actual[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    assert float(actual[0]) != pytest.approx(float(exact_total), rel=1e-9)
    for grad, expected_grad, exact in zip(actual[2:], expected[2:], exact_grads, strict=True):
        assert relative_error(grad, exact) < 1.2 * relative_error(expected_grad, exact) < 0.02


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_inputs_in_16_bits_are_summed_in_float32(dtype):
    # 4096 equal rows, one in each chunk: a sum in 16 bits would stop growing long before the last one.
    row, weight = randn(1, WIDTH, dtype=dtype), layer(dtype)[0]
    labels, rows = torch.full((4096,), 3), row.expand(4096, -1)
    actual = loss_and_grads(linear_cross_entropy, rows, weight, labels, chunk=1, cotangent=1 / 4096)
    assert [tensor.dtype for tensor in actual] == [torch.float32] * 2 + [dtype] * 2
    expected = loss_and_grads(loss_of_logits, row.double(), weight.double(), labels[:1], cotangent=1.0)
    (hidden_grad, weight_grad), (expected_hidden_grad, expected_weight_grad) = actual[2:], expected[2:]
    assert relative_error(weight_grad, expected_weight_grad) < 4 * torch.finfo(dtype).eps
    sum_of_rows = hidden_grad.double().sum(0, keepdim=True)
    assert relative_error(sum_of_rows, expected_hidden_grad) < 8 * torch.finfo(dtype).eps


def test_the_gradient_of_a_small_probability_does_not_underflow_in_float16():
    hidden, weight, labels = torch.ones(1, 1).half(), torch.tensor([[0.0], [-20.0]]).half(), torch.tensor([0])
    _, _, _, grad = loss_and_grads(linear_cross_entropy, hidden, weight, labels, cotangent=2.0**16)
    exact = loss_and_grads(loss_of_logits, hidden.double(), weight.double(), labels, cotangent=2.0**16)
    assert float(grad[1]) == pytest.approx(float(exact[3][1]), rel=1e-2)


def test_autocast_leaves_float64_alone():
    hidden, (weight, _), labels = randn(9, WIDTH), layer(), random_labels(9)
    with torch.autocast("cpu", torch.bfloat16):
        actual = loss_and_grads(linear_cross_entropy, hidden, weight, labels)
    assert_all_close(actual, loss_and_grads(loss_of_logits, hidden, weight, labels))
