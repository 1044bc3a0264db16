"""`mse` and `binary_cross_entropy` equal those of torch, also with weights and masks."""

import pytest
import torch
from torch.nn import functional as F

from ftrain.losses import binary_cross_entropy, mse
from tests.losses.cases import EXACT, F64, assert_equals_torch, is_scalar, numbers, randn, value_and_grad

LOSSES = [mse, binary_cross_entropy]
LOSSES_OF_TORCH = [(mse, F.mse_loss), (binary_cross_entropy, F.binary_cross_entropy_with_logits)]


@pytest.mark.parametrize(("loss", "torch_loss"), LOSSES_OF_TORCH)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4)])
def test_value_and_gradient_are_those_of_torch_for_any_shape(loss, torch_loss, shape):
    targets = randn(*shape, seed=3).sigmoid()
    assert_equals_torch(lambda x: loss(x, targets), lambda x: torch_loss(x, targets), randn(*shape))
    assert float(loss(randn(*shape), targets).weight) == targets.numel()


@pytest.mark.parametrize("shape", [(), (4,), (3, 1)])
def test_pos_weight_is_that_of_torch(shape):
    targets, weight, pos_weight = randn(3, 4, seed=3).sigmoid(), randn(4, seed=4).abs(), randn(*shape, seed=5).abs()

    def torch_loss(x):
        total = F.binary_cross_entropy_with_logits(x, targets, weight, reduction="sum", pos_weight=pos_weight)
        return total / weight.expand(3, 4).sum()

    assert_equals_torch(
        lambda x: binary_cross_entropy(x, targets, weight=weight, pos_weight=pos_weight), torch_loss, randn(3, 4)
    )


@pytest.mark.parametrize(("loss", "torch_loss"), LOSSES_OF_TORCH)
@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (3, 1), (1, 1)])
def test_the_weight_is_broadcast(loss, torch_loss, shape):
    targets, weight = randn(3, 4, seed=3).sigmoid(), randn(*shape, seed=4).abs()
    full = weight.broadcast_to(3, 4)
    assert_equals_torch(
        lambda x: loss(x, targets, weight=weight),
        lambda x: (torch_loss(x, targets, reduction="none") * full).sum() / full.sum(),
        randn(3, 4),
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_a_mask_of_bools_or_integers_is_a_weight(loss):
    outputs, targets = randn(3, 4), torch.rand(3, 4)
    mask = torch.tensor([[True], [False], [True]])
    expected = loss(outputs[::2], targets[::2])
    for weight in (mask, mask.int()):
        masked = loss(outputs, targets, weight=weight)
        torch.testing.assert_close(masked.value, expected.value, **EXACT)
        assert float(masked.weight) == 8


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_weight_or_elements_has_loss_and_gradient_0(loss):
    outputs = randn(3, 4).requires_grad_()
    for mean in (
        loss(outputs, torch.zeros(3, 4), weight=torch.zeros(())),
        loss(outputs[:0], torch.zeros(0, 4)),
        loss(outputs[:0], torch.zeros(0, 4), weight=torch.ones(1)),
    ):
        assert numbers(mean) == (0.0, 0.0)
        (grad,) = torch.autograd.grad(mean.total, outputs)
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_dtype_is_that_of_the_outputs(loss):
    targets = torch.tensor([0, 1])
    for dtype in (torch.float32, F64):
        for converted in (targets, targets.bool(), targets.double()):
            assert is_scalar(loss(randn(2, dtype=dtype), converted), dtype)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("loss", LOSSES)
def test_elements_without_weight_may_be_infinite_or_nan(loss, value):
    weight = torch.tensor([1.0, 0.0, 0.0, 2.0])
    outputs = torch.tensor([0.5, value, 0.5, 0.25], requires_grad=True)
    spoilt = loss(outputs, torch.tensor([1.0, 0.0, value, 0.0]), weight=weight)
    expected = loss(outputs[[0, 3]], torch.tensor([1.0, 0.0]), weight=weight[[0, 3]])
    assert numbers(spoilt) == numbers(expected)
    (grad,), (expected_grad,) = (torch.autograd.grad(mean.total, outputs) for mean in (spoilt, expected))
    assert torch.equal(grad, expected_grad)
    assert grad[1] == 0


def test_a_weight_of_0_has_a_gradient():
    weight = torch.zeros(3, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(mse(randn(3), torch.zeros(3), weight=weight).total, weight)
    assert torch.equal(grad, randn(3).square())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_sum_of_weights_is_not_differentiated(loss):
    weight = torch.ones(3, dtype=F64, requires_grad=True)
    mean = loss(randn(3), torch.zeros(3), weight=weight)
    assert not mean.weight.requires_grad
    (grad,) = torch.autograd.grad(mean.total, weight)
    assert grad.tolist() == pytest.approx([float(loss(x, torch.zeros(()))) for x in randn(3)])


@pytest.mark.parametrize(("scale", "expected"), [(1e4, 0.0), (-1e4, 1e4)])
def test_huge_binary_logits(scale, expected):
    labels = torch.tensor([True, False])
    value, grad = value_and_grad(lambda x: binary_cross_entropy(x, labels).value, torch.tensor([scale, -scale]))
    assert float(value) == expected
    assert torch.isfinite(grad).all()
