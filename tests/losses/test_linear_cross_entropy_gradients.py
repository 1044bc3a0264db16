"""Which gradients `linear_cross_entropy` computes, and how often; the derivatives that it refuses."""

import itertools

import pytest
import torch

from ftrain.errors import LossError
from ftrain.losses import chunked, linear_cross_entropy
from ftrain.losses.chunked import losses_and_gradients
from tests.losses.cases import randn
from tests.losses.linear_cases import WIDTH, assert_all_close, layer, loss_of_logits, random_labels


@pytest.fixture
def needs_of_calls(monkeypatch):
    """Return a list that gets, at each call of the operation, for which inputs it must compute gradients."""
    recorded = []

    def record(*args):
        recorded.append(args[-1])
        return losses_and_gradients(*args)

    monkeypatch.setattr(chunked, "losses_and_gradients", record)
    return recorded


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3))[1:])
def test_only_the_gradients_of_inputs_that_require_them_are_computed(needs, needs_of_calls):
    inputs = [tensor.requires_grad_(need) for tensor, need in zip((randn(9, WIDTH), *layer()), needs, strict=True)]
    hidden, weight, bias = inputs
    requiring, labels = [tensor for tensor in inputs if tensor.requires_grad], random_labels(9)
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=4)
    grads = torch.autograd.grad(loss.total, requiring)
    assert needs_of_calls == [list(needs)]
    expected = loss_of_logits(hidden, weight, labels, bias=bias)
    assert_all_close(grads, torch.autograd.grad(expected.total, requiring))


def test_no_gradients_are_computed_in_an_evaluation(needs_of_calls):
    hidden, weight, labels = randn(9, WIDTH), layer()[0].requires_grad_(), random_labels(9)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    linear_cross_entropy(hidden, weight.detach(), labels)
    assert needs_of_calls == [[False] * 3] * 2
    assert not loss.total.requires_grad
    assert_all_close((loss.total,), (loss_of_logits(hidden, weight.detach(), labels).total,))


def test_gradients_are_returned_without_a_copy(monkeypatch):
    computed = []

    def record(*args):
        computed.extend(losses_and_gradients(*args))
        return computed

    monkeypatch.setattr(chunked, "losses_and_gradients", record)
    hidden, weight, bias = (tensor.requires_grad_() for tensor in (randn(9, WIDTH), *layer()))
    loss = linear_cross_entropy(hidden, weight, random_labels(9), bias=bias)
    grads = torch.autograd.grad(loss.value, (hidden, weight, bias))
    assert [grad.data_ptr() for grad in grads] == [grad.data_ptr() for grad in computed[1:]]


def test_a_second_backward_pass_gives_the_same_gradients(needs_of_calls):
    hidden, weight = randn(9, WIDTH).requires_grad_(), layer()[0].requires_grad_()
    total = linear_cross_entropy(hidden, weight, random_labels(9)).total * 3
    first = [grad.clone() for grad in torch.autograd.grad(total, (hidden, weight), retain_graph=True)]
    assert len(needs_of_calls) == 1
    assert_all_close(torch.autograd.grad(total, (hidden, weight)), first, rtol=0, atol=0)


def test_a_second_derivative_is_refused():
    hidden = randn(9, WIDTH).requires_grad_()
    total = linear_cross_entropy(hidden, layer()[0], random_labels(9)).total
    with pytest.raises(LossError, match=r"^linear_cross_entropy: .*create_graph.*use cross_entropy"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_transforms_of_torch_func_are_refused():
    weight, labels = layer()[0], random_labels(9)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda hidden: linear_cross_entropy(hidden, weight, labels).total)(randn(9, WIDTH))


# torch compiles its rules for forward mode with torch.jit.script when it first needs them.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_derivative_in_forward_mode_is_refused():
    # Without this error torch would return 0.
    hidden, weight, labels = randn(9, WIDTH), layer()[0], random_labels(9)
    with pytest.raises(LossError, match=r"^linear_cross_entropy: .*forward-mode.*use cross_entropy"):
        torch.func.jvp(lambda x: linear_cross_entropy(x, weight, labels).total, (hidden,), (hidden,))
