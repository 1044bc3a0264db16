"""`cross_entropy` equals that of torch, also for huge logits and for labels that do not count."""

import math

import pytest
import torch
from torch.nn import functional as F

from ftrain.losses import accuracy, cross_entropy
from tests.losses.cases import (
    CLASSES,
    EXACT,
    F64,
    assert_equals_torch,
    class_weights,
    is_scalar,
    numbers,
    randn,
    random_labels,
    value_and_grad,
)


@pytest.mark.parametrize("shape", [(17,), (4, 6), (2, 3, 4)])
@pytest.mark.parametrize("ignore_index", [-100, 0, 2, 255])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weight", [None, class_weights()])
def test_value_and_gradient_are_those_of_torch(shape, ignore_index, smoothing, weight):
    labels = random_labels(*shape, ignore_index=ignore_index)
    options = {"ignore_index": ignore_index, "label_smoothing": smoothing, "weight": weight}
    assert_equals_torch(
        lambda x: cross_entropy(x, labels, **options),
        lambda x: F.cross_entropy(x.movedim(-1, 1), labels, **options),
        randn(*shape, CLASSES),
    )


def test_label_smoothing_and_class_weights_by_hand():
    logits, labels, w, s = randn(6, CLASSES), torch.tensor([0, 1, 2, 3, 4, -100]), class_weights(), 0.1
    logp = logits.log_softmax(-1)
    of_labels = sum(w[i] * logp[i, i] for i in range(5))
    of_all_classes = sum((w * logp[i]).sum() for i in range(5))
    loss = cross_entropy(logits, labels, label_smoothing=s, weight=w)
    torch.testing.assert_close(loss.total, -(1 - s) * of_labels - s / CLASSES * of_all_classes, **EXACT)
    assert float(loss.weight) == float(w.sum()) == 6.5


def test_the_weight_is_the_number_of_labels_that_are_not_ignored():
    labels = torch.tensor([[0, -100, 2], [-100, -100, 4]])
    loss = cross_entropy(randn(2, 3, CLASSES), labels)
    assert is_scalar(loss, F64)
    assert float(loss.weight) == 3


def test_one_example_with_and_without_a_batch_axis():
    logits, label = randn(CLASSES), torch.tensor(2)
    for loss in (cross_entropy(logits, label), cross_entropy(logits[None], label[None])):
        torch.testing.assert_close(loss.value, -logits.log_softmax(-1)[2], **EXACT)
        assert is_scalar(loss, F64)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_labels_may_have_any_integer_dtype(dtype):
    logits, labels = randn(7, CLASSES), random_labels(7, ignore_index=3)
    narrow = cross_entropy(logits, labels.to(dtype), ignore_index=3)
    assert torch.equal(narrow.value, cross_entropy(logits, labels, ignore_index=3).value)


def test_narrow_labels_do_not_wrap_around_to_ignore_index():
    # The bits of 156 in uint8 are those of -100 in int8.
    logits, labels = randn(1, 200), torch.tensor([156], dtype=torch.uint8)
    assert float(cross_entropy(logits, labels).weight) == 1
    assert float(accuracy(logits, labels).weight) == 1


def test_inputs_need_not_be_contiguous():
    logits, labels = randn(CLASSES, 6, 4).permute(2, 1, 0), random_labels(6, 4).T
    expected = cross_entropy(logits.contiguous(), labels.contiguous())
    assert torch.equal(cross_entropy(logits, labels).total, expected.total)


def test_class_weights_get_no_gradient():
    weight = class_weights().requires_grad_()
    loss = cross_entropy(randn(4, CLASSES).requires_grad_(), random_labels(4), weight=weight)
    assert not loss.weight.requires_grad
    loss.total.backward()
    assert weight.grad is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, class_weights()])
def test_a_batch_whose_labels_are_all_ignored_has_loss_and_gradient_0(smoothing, weight):
    logits = randn(3, 4, CLASSES).requires_grad_()
    loss = cross_entropy(logits, torch.full((3, 4), -100), label_smoothing=smoothing, weight=weight)
    assert numbers(loss) == (0.0, 0.0)
    (grad,) = torch.autograd.grad(loss.total, logits)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, class_weights()])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_an_empty_batch_has_loss_0_and_a_gradient(smoothing, weight, shape):
    logits = torch.zeros(*shape, CLASSES, dtype=F64, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(shape, dtype=torch.int64), label_smoothing=smoothing, weight=weight)
    assert numbers(loss) == (0.0, 0.0)
    assert torch.autograd.grad(loss.total, logits)[0].shape == logits.shape


# At +1e4 one label of five is wrong and costs 1e4. At -1e4 four labels are right and cost 1e4 each, and the four
# classes beside the one with the low logit share the probability: log 4 for every row.
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("scale", "expected"), [(1e4, 1e4), (-1e4, 4e4 + 5 * math.log(4))])
def test_huge_logits(dtype, scale, expected):
    logits, labels = torch.eye(CLASSES, dtype=dtype) * scale, torch.tensor([1, 1, 2, 3, 4])
    total, grad = value_and_grad(lambda x: cross_entropy(x, labels).total, logits)
    assert float(total) == pytest.approx(expected, rel=1e-6)
    assert torch.isfinite(grad).all()


def test_a_logit_of_minus_infinity_rules_a_class_out():
    logits = randn(6, CLASSES)
    masked = logits.clone()
    masked[:, 3:] = -torch.inf
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    value, grad = value_and_grad(lambda x: cross_entropy(x, labels).value, masked)
    expected, expected_grad = value_and_grad(lambda x: cross_entropy(x, labels).value, logits[:, :3])
    torch.testing.assert_close(value, expected, **EXACT)
    torch.testing.assert_close(grad[:, :3], expected_grad, **EXACT)
    assert torch.equal(grad[:, 3:], torch.zeros(6, 2, dtype=F64))


def test_a_label_that_is_ruled_out_costs_infinity():
    logits = torch.tensor([[0.0, -torch.inf]])
    assert float(cross_entropy(logits, torch.tensor([1]))) == float("inf")
