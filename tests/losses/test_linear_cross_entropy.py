"""`linear_cross_entropy` equals the cross entropy of the logits."""

import itertools

import pytest
import torch

import ftrain as ft
from ftrain.losses import linear_cross_entropy
from tests.losses.cases import randn
from tests.losses.linear_cases import (
    CLASS_WEIGHT,
    CLASSES,
    SMOOTHINGS,
    WIDTH,
    assert_all_close,
    layer,
    loss_and_grads,
    loss_of_logits,
    random_labels,
)


def assert_equals_logits(hidden, weight, labels, *, rtol=1e-12, atol=1e-13, **options):
    """Check the loss and its gradients against those of the logits, and return them."""
    actual = loss_and_grads(linear_cross_entropy, hidden, weight, labels, **options)
    expected = loss_and_grads(loss_of_logits, hidden, weight, labels, **options)
    assert_all_close(actual, expected, rtol=rtol, atol=atol)
    return actual


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("class_weight", [None, CLASS_WEIGHT])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_for_any_shape_and_chunk(smoothing, class_weight, biased):
    weight, bias = layer()
    options = {"label_smoothing": smoothing, "class_weight": class_weight, "bias": bias if biased else None}
    shapes, chunks = [(20,), (4, 5), (2, 2, 5)], [None, 1, 3, 20, 100]
    for shape, ignored, chunk in itertools.product(shapes, [-100, 2, 255], chunks):
        labels = random_labels(*shape, ignore_index=ignored)
        assert_equals_logits(randn(*shape, WIDTH), weight, labels, ignore_index=ignored, chunk=chunk, **options)


def test_one_token_with_and_without_a_batch_axis():
    weight, bias = layer()
    assert_equals_logits(randn(WIDTH), weight, torch.tensor(3), bias=bias)
    assert_equals_logits(randn(1, WIDTH), weight, torch.tensor([3]), bias=bias)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("class_weight", [None, CLASS_WEIGHT])
@pytest.mark.parametrize("shape", [(7,), (0,), (0, 3)])
def test_a_batch_without_labels_has_loss_and_gradients_0(smoothing, class_weight, shape):
    weight, bias = layer()
    labels = torch.full(shape, -100)
    options = {"bias": bias, "label_smoothing": smoothing, "class_weight": class_weight, "chunk": 2}
    total, count, *grads = loss_and_grads(linear_cross_entropy, randn(*shape, WIDTH), weight, labels, **options)
    assert (float(total), float(count)) == (0.0, 0.0)
    assert [grad.shape for grad in grads] == [(*shape, WIDTH), weight.shape, bias.shape]
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_logits(dtype, scale):
    identity = torch.eye(CLASSES, dtype=dtype)
    labels = torch.arange(CLASSES).roll(1)
    loss = assert_equals_logits(identity * scale, identity, labels, chunk=4, rtol=1e-5, atol=1e-5)
    assert all(tensor.isfinite().all() for tensor in loss)


def test_a_bias_of_minus_infinity_rules_a_class_out():
    weight, bias = layer()
    bias[8:] = -torch.inf
    assert_equals_logits(randn(9, WIDTH), weight, random_labels(9, classes=8), bias=bias)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_a_row_without_a_label_may_be_infinite_or_nan(chunk, smoothing, value):
    weight, bias = layer()
    hidden, labels = randn(9, WIDTH), random_labels(9, seed=2)
    ignored = labels == -100
    assert 0 < ignored.sum() < 9
    spoilt = hidden.masked_fill(ignored[:, None], value)
    options = {"bias": bias, "label_smoothing": smoothing, "class_weight": CLASS_WEIGHT}
    for labels_of_case in (labels, torch.full_like(labels, -100)):
        actual = loss_and_grads(linear_cross_entropy, spoilt, weight, labels_of_case, chunk=chunk, **options)
        assert_all_close(actual, loss_and_grads(loss_of_logits, hidden, weight, labels_of_case, **options))
        with torch.no_grad():
            loss = linear_cross_entropy(spoilt, weight, labels_of_case, chunk=chunk, **options)
        assert torch.equal(loss.total, actual[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_without_a_label_may_be_nan_under_autocast(dtype):
    weight, _ = layer(torch.float32)
    hidden, labels = randn(9, WIDTH, dtype=torch.float32), random_labels(9, seed=2)
    spoilt = hidden.masked_fill((labels == -100)[:, None], torch.nan)
    with torch.autocast("cpu", dtype):
        actual, expected = (
            loss_and_grads(linear_cross_entropy, rows, weight, labels, chunk=4) for rows in (spoilt, hidden)
        )
    assert_all_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "wrapper", [ft.compiled(lowering="whole", backend="eager"), ft.donated()], ids=lambda wrapper: wrapper.text
)
def test_a_row_without_a_label_may_be_infinite_in_a_step(wrapper):
    weight, _ = layer(torch.float32)
    hidden, labels = randn(9, WIDTH, dtype=torch.float32), random_labels(9, seed=2)
    spoilt = hidden.masked_fill((labels == -100)[:, None], torch.inf)

    def loss(params, batch):
        return linear_cross_entropy(batch * params["scale"], params["weight"], labels)

    def trained_weight(rows):
        step = wrapper(ft.train_step(loss, ft.optim.sgd(0.1)))
        state, _ = step(step.init({"scale": torch.ones(WIDTH), "weight": weight.clone()}), rows)
        return state.params["weight"]

    assert torch.equal(trained_weight(spoilt), trained_weight(hidden))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_labels_may_have_any_integer_dtype(dtype):
    weight, _ = layer()
    hidden, labels = randn(9, WIDTH), random_labels(9, ignore_index=2)
    narrow = linear_cross_entropy(hidden, weight, labels.to(dtype), ignore_index=2)
    assert torch.equal(narrow.value, linear_cross_entropy(hidden, weight, labels, ignore_index=2).value)


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_a_label_out_of_range_is_an_error(label):
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        linear_cross_entropy(randn(2, WIDTH), layer()[0], torch.tensor([0, label]))


def test_inputs_need_not_be_contiguous():
    hidden, weight, labels = randn(WIDTH, 5, 4).permute(2, 1, 0), randn(WIDTH, CLASSES).T, random_labels(5, 4).T
    assert_equals_logits(hidden, weight, labels, chunk=3)


def test_the_losses_of_pieces_add_up_to_the_loss_of_the_batch():
    hidden, labels, (weight, _) = randn(12, WIDTH), random_labels(12), layer()
    whole = linear_cross_entropy(hidden, weight, labels)
    slices = (slice(5), slice(5, 6), slice(6, 12))
    first, second, third = (linear_cross_entropy(hidden[rows], weight, labels[rows]) for rows in slices)
    pooled = first.pooled(second).pooled(third)
    assert_all_close((pooled.total, pooled.weight), (whole.total, whole.weight))
