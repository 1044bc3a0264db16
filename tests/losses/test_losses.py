"""Every loss adds up over pieces of a batch, is computed in float32 at least, and is one graph for any batch."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from ftrain.losses import accuracy, binary_cross_entropy, cross_entropy, mse
from ftrain.types import Mean
from tests.losses.cases import CLASSES, EXACT, F64, class_weights, is_scalar, randn, random_labels, value_and_grad


@st.composite
def losses_and_slices(draw):
    """Return a loss of a slice of a batch, the outputs of the batch, and slices that make up the batch."""
    size, seed = draw(st.integers(0, 12)), draw(st.integers(0, 10**6))
    labels = random_labels(size, 3, seed=seed)
    targets = torch.rand(size, 3, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=F64)
    weight = draw(st.sampled_from([None, targets > 0.4, targets + 0.1]))
    options = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.3])),
        "weight": draw(st.sampled_from([None, class_weights()])),
    }

    def weight_of(rows):
        return None if weight is None else weight[rows]

    losses = {
        "cross_entropy": lambda rows, x: cross_entropy(x[rows], labels[rows], **options),
        "binary_cross_entropy": lambda rows, x: binary_cross_entropy(x[rows], targets[rows], weight=weight_of(rows)),
        "mse": lambda rows, x: mse(x[rows], targets[rows], weight=weight_of(rows)),
        # The second Mean, of weight 0, gives the accuracy a gradient of 0.
        "accuracy": lambda rows, x: accuracy(x[rows], labels[rows]).pooled(
            Mean(0.0 * x.sum(), torch.zeros((), dtype=F64))
        ),
    }
    loss = losses[draw(st.sampled_from(sorted(losses)))]
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=5)))
    slices = [slice(start, stop) for start, stop in itertools.pairwise([0, *cuts, size])]
    return loss, randn(size, 3, CLASSES, seed=seed), slices


@settings(max_examples=150)
@given(losses_and_slices())
def test_the_losses_of_pieces_add_up_to_the_loss_of_the_batch(case):
    loss, outputs, slices = case
    outputs.requires_grad_()
    whole = loss(slice(None), outputs)
    pooled = functools.reduce(Mean.pooled, [loss(rows, outputs) for rows in slices])
    torch.testing.assert_close(pooled.total, whole.total, **EXACT)
    torch.testing.assert_close(pooled.weight, whole.weight, **EXACT)
    grad, expected_grad = (torch.autograd.grad(mean.total, outputs)[0] for mean in (pooled, whole))
    torch.testing.assert_close(grad, expected_grad, **EXACT)


def test_the_pooled_mean_is_not_the_mean_of_means():
    logits, labels = randn(4, CLASSES), torch.tensor([0, 2, 3, 1])
    of_three, of_one = cross_entropy(logits[:3], labels[:3]), cross_entropy(logits[3:], labels[3:])
    torch.testing.assert_close(of_three.pooled(of_one).value, cross_entropy(logits, labels).value, **EXACT)
    assert abs(float(of_three.pooled(of_one)) - (float(of_three) + float(of_one)) / 2) > 1e-3


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (cross_entropy, torch.arange(64)),
        (accuracy, torch.arange(64)),
        (mse, randn(64, 1000)),
        (binary_cross_entropy, torch.full((64, 1000), 0.5)),
    ],
    ids=["cross_entropy", "accuracy", "mse", "binary_cross_entropy"],
)
def test_the_loss_of_outputs_in_16_bits_is_computed_in_float32(loss, targets, dtype):
    outputs = randn(64, 1000, dtype=dtype) * 5
    mean = loss(outputs, targets)
    assert is_scalar(mean, torch.float32)
    torch.testing.assert_close(mean.value.double(), loss(outputs.double(), targets).value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_logits_in_16_bits_is_rounded_once(dtype):
    logits, labels = randn(64, 1000, dtype=dtype) * 5, torch.arange(64)
    _, grad = value_and_grad(lambda x: cross_entropy(x, labels).value, logits)
    _, exact = value_and_grad(lambda x: cross_entropy(x, labels).value, logits.double())
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_autocast_does_not_lower_the_dtype():
    logits, labels = randn(8, CLASSES, dtype=torch.float32), random_labels(8)
    expected = cross_entropy(logits, labels)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = cross_entropy(logits, labels)
    assert torch.equal(under_autocast.value, expected.value)


TRACED = {
    "cross_entropy": cross_entropy,
    "smoothed": lambda x, y: cross_entropy(x, y, label_smoothing=0.1, weight=class_weights()),
    "binary_cross_entropy": lambda x, y: binary_cross_entropy(x, x.detach().sigmoid()),
    "weighted_mse": lambda x, y: mse(x, torch.zeros_like(x), weight=(y >= 0).unsqueeze(-1)),
    "accuracy": accuracy,
}
"""Name -> function of logits and labels."""


def total_and_weight(name, logits, labels):
    loss = TRACED[name](logits, labels)
    return loss.total, loss.weight


@pytest.mark.parametrize("name", TRACED)
def test_a_loss_reads_no_value_on_the_host(name):
    # With fake tensors, reading a value is an error.
    program = functools.partial(total_and_weight, name)
    graph = make_fx(program, tracing_mode="fake")(randn(4, 3, CLASSES), random_labels(4, 3))
    inputs = randn(4, 3, CLASSES, seed=8), random_labels(4, 3, seed=9)
    for actual, expected in zip(graph(*inputs), program(*inputs), strict=True):
        torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("name", TRACED)
def test_one_compiled_graph_serves_batches_of_any_length(name):
    program = functools.partial(total_and_weight, name)
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (4, 6):
        logits, labels = randn(size, 3, CLASSES).requires_grad_(), random_labels(size, 3)
        total, weight = compiled(logits, labels)
        expected_total, expected_weight = program(logits, labels)
        torch.testing.assert_close(total, expected_total, **EXACT)
        torch.testing.assert_close(weight, expected_weight, **EXACT)
        assert total.requires_grad == expected_total.requires_grad
        if total.requires_grad:
            grad, expected_grad = (torch.autograd.grad(value, logits)[0] for value in (total, expected_total))
            torch.testing.assert_close(grad, expected_grad, **EXACT)


@pytest.mark.parametrize("name", TRACED)
def test_vmap_over_examples_equals_a_loop(name):
    def program(logits, labels):
        total, weight = total_and_weight(name, logits, labels)
        return total, weight.expand(())

    logits, labels = randn(4, 3, CLASSES), random_labels(4, 3)
    total, weight = torch.func.vmap(program)(logits, labels)
    totals, weights = zip(*map(program, logits, labels), strict=True)
    torch.testing.assert_close(total, torch.stack(totals), **EXACT)
    torch.testing.assert_close(weight, torch.stack(weights), **EXACT)
