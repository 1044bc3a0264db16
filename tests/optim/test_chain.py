"""`chain`: transformations of gradients before an optimizer, compared with SGD by hand."""

import itertools
import math

import pytest
import torch

import ftrain as ft
from ftrain import optim
from ftrain.errors import ComposeError, OptionError, StructureError
from tests.optim.quadratic import F64, assert_close, assert_equal, batches, gradient, make_params, quadratic, train


def sgd_by_hand(change):
    """Return the parameters after 5 steps of SGD with rate 0.1 on the gradients that `change` returns."""
    params = make_params()
    for batch in batches(5):
        grads = change(gradient(params, batch))
        params = {name: leaf - 0.1 * grads[name] for name, leaf in params.items()}
    return params


def test_centralize_subtracts_the_mean_of_each_output():
    def change(grads):
        conv = grads["conv"] - grads["conv"].mean((1, 2, 3), keepdim=True)
        return {**grads, "conv": conv, "out": grads["out"] - grads["out"].mean(1, keepdim=True)}

    assert_close(train(optim.chain(optim.centralize(), optim.sgd(0.1)), 5).params, sgd_by_hand(change))


def test_centralize_with_a_mask_changes_only_the_gradients_that_match():
    def change(grads):
        return {**grads, "out": grads["out"] - grads["out"].mean(1, keepdim=True)}

    assert_close(train(optim.chain(optim.centralize(["o*"]), optim.sgd(0.1)), 5).params, sgd_by_hand(change))


def test_sign_before_sgd_is_sign_sgd():
    def change(grads):
        return {name: grad.sign() for name, grad in grads.items()}

    assert_close(train(optim.chain(optim.sign(), optim.sgd(0.1)), 5).params, sgd_by_hand(change))


def test_the_sign_of_nan_is_nan():
    signs = optim.sign().apply(torch.tensor([math.nan, math.inf, -2.0, 0.0]), None, None, None)
    torch.testing.assert_close(signs, torch.tensor([math.nan, 1.0, -1.0, 0.0]), equal_nan=True)


def test_project_keeps_the_orthogonal_part_and_the_gradients_of_zero_rows():
    params = {"w": torch.randn(3, 4, dtype=F64), "b": torch.ones(4, dtype=F64)}
    params["w"][1] = 0
    grads = {"w": torch.arange(12.0, dtype=F64).reshape(3, 4), "b": torch.ones(4, dtype=F64)}
    optimizer = optim.chain(optim.project(), optim.sgd(1.0))
    moved, _ = optimizer.update(grads, optimizer.init(params), params, {"lr": 1.0})
    update = params["w"] - moved["w"]
    assert_close((update * params["w"]).sum(1), torch.zeros(3, dtype=F64))
    assert_close(update[1], grads["w"][1])
    row = params["w"][0] / params["w"][0].norm()
    assert_close(update[0], grads["w"][0] - (grads["w"][0] @ row) * row)
    assert_close(params["b"] - moved["b"], grads["b"])


def test_transformations_apply_in_order():
    def change(grads):
        return {name: (grad - grad.mean()).sign() if name == "norm" else grad.sign() for name, grad in grads.items()}

    def subtract_mean(grad, leaf, value, key):
        return grad - grad.mean()

    centre = optim.GradientTransform(subtract_mean, ["norm"], "centre()")
    centred_first = optim.chain(centre, optim.sign(), optim.sgd(0.1))
    signed_first = optim.chain(optim.sign(), centre, optim.sgd(0.1))
    expected = sgd_by_hand(change)
    assert_close(train(centred_first, 5).params, expected)
    assert not torch.allclose(train(signed_first, 5).params["norm"], expected["norm"])
    assert centred_first.text.startswith("chain(centre(), sign(), sgd(")


def test_noise_has_its_standard_deviation_and_is_independent_between_steps_and_leaves():
    zeros = {"a": torch.zeros(200, 100), "b": torch.zeros(200, 100)}

    def zero_loss(params, batch):
        return 0 * params["a"].sum() + 0 * params["b"].sum()

    step = ft.train_step(zero_loss, optim.chain(optim.noise(0.5), optim.sgd(1.0)))
    first, metrics = step(step.init(zeros), torch.ones(()))
    second, _ = step(first, torch.ones(()))
    assert metrics["noise"] == 0.5
    draws = [-first.params["a"], -first.params["b"], first.params["a"] - second.params["a"]]
    # The bounds of the means are five standard errors of a mean of 20,000 numbers.
    for draw in draws:
        assert abs(float(draw.mean())) < 5 * 0.5 / 20_000**0.5
        assert float(draw.std()) == pytest.approx(0.5, rel=0.03)
    for a, b in itertools.combinations(draws, 2):
        assert abs(float((a * b).mean())) < 5 * 0.25 / 20_000**0.5


def train_with_noise(seed, *wrappers):
    """Return the parameters after each of 3 steps, the first of which has no noise."""
    optimizer = optim.chain(optim.noise(lambda k: 0.0 if k == 0 else 0.1 / k), optim.sgd(0.1))
    step = ft.compose(ft.train_step(quadratic, optimizer), *wrappers)
    state, params_after_steps = step.init(make_params(), seed=seed), []
    for batch in batches(3):
        state, _ = step(state, batch)
        params_after_steps.append(state.params)
    return params_after_steps


def test_noise_follows_its_schedule_and_the_seed():
    actual = train_with_noise(seed=0)
    assert_close(actual[0], train(optim.sgd(0.1), 1).params)
    assert_equal(train_with_noise(seed=0), actual)
    assert not torch.equal(train_with_noise(seed=1)[1]["conv"], actual[1]["conv"])


def test_noise_is_the_same_in_a_compiled_step():
    compiled = train_with_noise(0, ft.compiled(lowering="whole", backend="eager"))
    torch.testing.assert_close(compiled, train_with_noise(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [optim.adamw, optim.sgd, optim.lion], ids=lambda make: make.__name__)
def test_a_gradient_of_another_shape_is_refused(make):
    """Without the check, a fused kernel reads memory beyond the end of the gradient."""
    mean = optim.GradientTransform(lambda grad, *_: grad.mean(0, keepdim=True), lambda name, leaf: True, "mean()")
    with pytest.raises(StructureError, match=r"gradient of conv is float64\[1, 3, 2, 2\], .* float64\[4, 3, 2, 2\]"):
        train(optim.chain(mean, make(0.1)), 1)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=F64)], ids=["eager", "graph"])
@pytest.mark.parametrize("make", [optim.adamw, optim.sgd, optim.rmsprop], ids=lambda make: make.__name__)
def test_a_gradient_of_another_dtype_is_refused(make, rate):
    """For instance bfloat16 times a float32 mask. Without the check, some kernels compute in float32; others fail."""
    masked = optim.GradientTransform(lambda grad, *_: grad * torch.ones(3), lambda name, leaf: True, "masked()")
    optimizer, params = optim.chain(masked, make(0.1)), {"w": torch.ones(3).bfloat16()}
    with pytest.raises(StructureError, match=r"gradient of w is float32\[3\], needs .* bfloat16\[3\]; correct the"):
        optimizer.update(params, optimizer.init(params), params, {"lr": rate})


def test_a_transform_that_returns_a_number_is_refused():
    zero = optim.chain(optim.GradientTransform(lambda grad, *_: 0.0, optim.everything, "zero()"), optim.sgd(0.1))
    with pytest.raises(StructureError, match=r"gradient of w is float, needs the shape and dtype of .* float32\[2\]"):
        zero.update({"w": torch.ones(2)}, {}, {"w": torch.ones(2)}, {"lr": 0.1})


@pytest.mark.parametrize(
    "wrappers",
    [[], [ft.donated()], [ft.compiled(backend="aot_eager", lowering="whole")]],
    ids=["eager", "donated", "compiled"],
)
def test_a_transformation_that_writes_to_its_gradient_is_refused(wrappers):
    """Both parameters have the same gradient tensor, so a write to one would change the other."""

    def loss(params, batch):
        return ((params["a"] + params["b"]) * batch).sum()

    double = optim.GradientTransform(lambda grad, leaf, value, key: grad.mul_(2), ["a"], "double")
    step = ft.compose(ft.train_step(loss, optim.chain(double, optim.sgd(0.1))), *wrappers)
    with pytest.raises(ComposeError, match=r"chain: double writes to its gradient or .* return another tensor"):
        step(step.init({"a": torch.ones(2), "b": torch.ones(2)}), torch.ones(2))


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (lambda grad, leaf, value, key: leaf.mul_(2), "other writes to its gradient or parameter, .* another tensor"),
        (lambda grad, leaf, value, key: None, "other returns None; needs the new gradient"),
    ],
    ids=["parameter", "none"],
)
def test_a_transformation_that_writes_to_its_parameter_or_returns_none_is_refused(apply, message):
    optimizer = optim.chain(optim.GradientTransform(apply, ["a"], "other"), optim.sgd(0.1))
    step = ft.train_step(lambda params, batch: (params["a"] * batch).sum(), optimizer)
    with pytest.raises(ComposeError, match=f"chain: {message}"):
        step(step.init({"a": torch.ones(2)}), torch.ones(2))


def test_invalid_chains_and_transforms_are_refused():
    sgd = optim.sgd(0.1)
    one = ft.schedules.constant(1.0)
    several = optim.GradientTransform(lambda grad, leaf, value, key: grad, ["*"], "several", {"a": one, "b": one})
    with pytest.raises(ComposeError, match=r"chain: several has the schedules a, b; needs at most one"):
        optim.chain(several, sgd)
    with pytest.raises(ComposeError, match=r"chain: the last part is sign\(\); needs an optimizer"):
        optim.chain(sgd, optim.sign())
    with pytest.raises(ComposeError, match=r"chain: the last part is None"):
        optim.chain()
    with pytest.raises(ComposeError, match=r"chain: found sgd\(.*\) before the optimizer"):
        optim.chain(sgd, sgd)
    with pytest.raises(ComposeError, match=r"chain: found clip\(.*\) .* around the step: ft.compose\(step, "):
        optim.chain(ft.clip(1.0), sgd)
    with pytest.raises(ComposeError, match="scheduled value called noise"):
        optim.chain(optim.noise(0.1), optim.noise(0.2), sgd)
    with pytest.raises(OptionError, match="noise: stddev is -1"):
        optim.noise(-1)
    with pytest.raises(
        OptionError, match=r"centralize: mask names 'nome\.\*', and no parameter matches; there are norm"
    ):
        train(optim.chain(optim.centralize(["nome.*"]), sgd), 0)
    with pytest.raises(OptionError, match=r"sign: mask is 'norm', needs a list of patterns, \['norm'\],"):
        optim.sign("norm")
