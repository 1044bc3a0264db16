"""A function that is recomputed in the backward pass has the same gradients, and the same arguments and context."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import ftrain as ft
from tests.bits import assert_same_bits
from tests.transforms.remat.recomputing import SIZE, catching, random_leaf, recomputing


def differentiating(x, w):
    """Takes a gradient itself."""
    hidden = torch.tanh(x @ w)
    (slope,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
    return hidden * slope


def nested(x, w):
    inner = recomputing(catching)
    return inner(torch.sigmoid(inner(x, w)), w).exp()


def in_place(x, w):
    """Writes over its results, but not over its arguments."""
    return (x @ w).sin_().mul_(2).exp()


def linear(x, w):
    """Saves nothing for its gradient."""
    return x + 2 * w


functions = pytest.mark.parametrize("function", [catching, differentiating, nested, in_place, linear])


def gradients_of_order(order, function, inputs):
    results = [function(*inputs)]
    for _ in range(order):
        total = sum(result.sin().sum() for result in results)
        results = torch.autograd.grad(total, inputs, create_graph=True)
    return results


@pytest.mark.parametrize("order", [1, 2, 3])
@functions
def test_gradients_of_every_order_are_the_same(function, order):
    inputs = random_leaf(), random_leaf()
    actual = gradients_of_order(order, recomputing(function), inputs)
    assert_same_bits(actual, gradients_of_order(order, function, inputs))


@functions
def test_every_further_backward_pass_gives_the_same_gradients(function):
    inputs = random_leaf(), random_leaf()
    total, expected = recomputing(function)(*inputs).sum(), torch.autograd.grad(function(*inputs).sum(), inputs)
    for _ in range(3):
        assert_same_bits(torch.autograd.grad(total, inputs, retain_graph=True), expected)
    # The gradient of one argument alone needs fewer of the saved tensors.
    for argument, gradient in zip(inputs, expected, strict=True):
        assert_same_bits(torch.autograd.grad(total, argument, retain_graph=True), (gradient,))


class ReadsSavedTwice(torch.autograd.Function):
    """Reads its saved tensors twice in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos(), x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[1].cos()) / 2


def test_saved_tensors_may_be_read_twice_in_a_backward_pass():
    x = random_leaf()
    actual = torch.autograd.grad(recomputing(ReadsSavedTwice.apply)(x).sum(), x)
    assert_same_bits(actual, torch.autograd.grad(ReadsSavedTwice.apply(x).sum(), x))


def test_the_second_run_has_the_arguments_of_the_first():
    runs = []

    def function(none, x, text, tree, *, scale, collected):
        runs.append((none, x, text, tree, scale, [*collected]))
        collected.append(x)
        return x * tree["w"] * scale

    x, w, collected = random_leaf(), random_leaf(), ["first"]
    scale = torch.full((SIZE, SIZE), 2.0, dtype=torch.float64)
    value = recomputing(function)(None, x, "text", {"z": 1, "w": w}, scale=scale, collected=collected)
    assert_same_bits(torch.autograd.grad(value.sum(), (x, w)), (2 * w, 2 * x))
    first, second = runs
    for first_argument, second_argument in zip(first, second, strict=True):
        assert ft.tree.signature(second_argument) == ft.tree.signature(first_argument)
    _, second_x, _, second_tree, second_scale, _ = second
    assert torch.equal(second_x, x)
    # A dict keeps its order, and a tensor whether it requires a gradient.
    assert [*second_tree] == ["z", "w"]
    assert second_x.requires_grad
    assert second_tree["w"].requires_grad
    assert not second_scale.requires_grad
    # What the second run appends goes to a copy of the list.
    assert collected == ["first", x]


@pytest.mark.parametrize("around", ["nothing", "a block", "hooks"])
def test_a_tensor_that_is_passed_twice_is_one_tensor_in_the_second_run(around):
    were_identical = []

    def function(q, k, tree):
        were_identical.append(q is k is tree["v"])
        return q.sin() * k.exp() * tree["v"]

    def run(x):
        return recomputing(function)(x, x, tree={"v": x}) * 2

    if around == "a block":
        run = recomputing(run)

    def keep(tensor):
        return tensor

    # Not a leaf: the second run gets a detached copy.
    x = random_leaf() * 1
    with torch.autograd.graph.saved_tensors_hooks(keep, keep) if around == "hooks" else nullcontext():
        value = run(x)
    value.sum().backward()
    assert were_identical == [True, True]


@pytest.fixture
def _nan_in_new_memory():
    """With deterministic algorithms, torch fills memory with NaN before an operation writes it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_nan_in_new_memory")
def test_a_tensor_that_is_filled_after_autograd_has_saved_it_is_filled_in_the_second_run():
    """RReLU fills the noise that it multiplies by when autograd has saved it."""

    def function(x):
        torch.manual_seed(0)
        return F.rrelu(x, training=True) + 1

    x = random_leaf()
    expected = torch.autograd.grad(function(x).sum(), x)
    assert not expected[0].isnan().any()
    assert_same_bits(torch.autograd.grad(recomputing(function)(x).sum(), x), expected)


def test_the_second_run_has_the_autocast_and_the_default_device_of_the_first():
    settings = []

    def function(x, w):
        product = x @ w
        settings.append((product.dtype, torch.empty(0).device.type))
        return product.float().exp()

    x, w = torch.randn(2, SIZE, SIZE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        value = recomputing(function)(x, w)
    value.sum().backward()
    assert settings == [(torch.bfloat16, "meta")] * 2

    settings.clear()
    value = recomputing(function)(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        value.sum().backward()
    assert settings == [(torch.float32, "cpu")] * 2


def test_hooks_on_arguments_are_called_once():
    def function(x):
        x.register_hook(lambda grad: grad * 0.5)
        return x.sin().exp()

    x = random_leaf()
    actual = torch.autograd.grad(recomputing(function)(x * 1).sum(), x)
    assert_same_bits(actual, torch.autograd.grad(function(x * 1).sum(), x))


def test_hooks_around_a_block_may_be_any_callable():
    class Keep:
        def __call__(self, tensor):
            return tensor

    x = random_leaf()
    with torch.autograd.graph.saved_tensors_hooks(functools.partial(Keep()), Keep()):
        value = recomputing(torch.sin)(x)
    assert_same_bits(torch.autograd.grad(value.sum(), x), (x.detach().cos(),))


# At the first use of forward mode, torch compiles its own formulas with a deprecated function.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_without_a_backward_pass():
    x, tangent = random_leaf().detach(), random_leaf().detach()
    expected = torch.func.jvp(torch.sin, (x,), (tangent,))
    assert_same_bits(torch.func.jvp(recomputing(torch.sin), (x,), (tangent,)), expected)
