"""Optimizers that combine or change other optimizers, compared with references written out in this file."""

import itertools
import math

import pytest
import torch

import ftrain as ft
from ftrain import optim, tree
from ftrain.errors import ComposeError, OptionError, StructureError
from ftrain.tree import name_patterns

F64 = torch.float64


def make_params():
    draw = torch.Generator().manual_seed(3)
    shapes = {"conv": (4, 3, 2, 2), "norm": (4,), "out": (2, 4), "scale": (), "empty": (0, 3)}
    return {name: torch.randn(shape, generator=draw, dtype=F64) for name, shape in shapes.items()}


def quadratic(params, batch):
    """Return a loss whose gradient is `params * batch + 1`."""
    return sum((leaf.square() * batch / 2 + leaf).sum() for leaf in params.values())


def gradient(params, batch):
    """Return the gradient of `quadratic` in the parameters."""
    return {name: leaf * batch + 1 for name, leaf in params.items()}


def batches(steps):
    return [torch.tensor(0.5 + 0.1 * math.sin(k), dtype=F64) for k in range(steps)]


def train(optimizer, steps, *wrappers):
    """Return the state after `steps` steps on `quadratic`."""
    step = ft.compose(ft.train_step(quadratic, optimizer), *wrappers)
    state = step.init(make_params())
    for batch in batches(steps):
        state, _ = step(state, batch)
    return state


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def assert_equal(actual, expected):
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True))


def sgd_by_hand(change):
    """Return the parameters after 5 steps of SGD with rate 0.1 on the gradients that `change` returns."""
    params = make_params()
    for batch in batches(5):
        grads = change(gradient(params, batch))
        params = {name: leaf - 0.1 * grads[name] for name, leaf in params.items()}
    return params


# chain


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


def test_the_sign_of_nan_is_nan():
    signs = optim.sign().apply(torch.tensor([math.nan, math.inf, -2.0, 0.0]), None, None, None)
    torch.testing.assert_close(signs, torch.tensor([math.nan, 1.0, -1.0, 0.0]), equal_nan=True)


def test_project_keeps_the_orthogonal_part_and_the_gradients_of_zero_rows():
    params = {
        "w": torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0)),
        "b": torch.ones(4, dtype=F64),
    }
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
    step = ft.train_step(
        lambda p, batch: 0 * p["a"].sum() + 0 * p["b"].sum(), optim.chain(optim.noise(0.5), optim.sgd(1.0))
    )
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


def test_noise_depends_on_its_schedule_and_the_seed_and_not_on_compilation():
    def schedule(k):
        return 0.0 if k == 0 else 0.1 / k

    def noisy(seed, *wrappers):
        step = ft.compose(ft.train_step(quadratic, optim.chain(optim.noise(schedule), optim.sgd(0.1))), *wrappers)
        state, params_after_steps = step.init(make_params(), seed=seed), []
        for batch in batches(3):
            state, _ = step(state, batch)
            params_after_steps.append(state.params)
        return params_after_steps

    eager = noisy(0)
    without_noise = train(optim.sgd(0.1), 1).params
    assert_close(eager[0], without_noise)
    assert_equal(noisy(0), eager)
    assert not torch.equal(eager[1]["conv"], noisy(1)[1]["conv"])
    compiled = noisy(0, ft.compiled(lowering="whole", backend="eager"))
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-12)


def test_invalid_chains_and_transforms_are_refused():
    sgd = optim.sgd(0.1)
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


# lookahead


@pytest.mark.parametrize(
    ("wrappers", "k", "alpha"),
    [
        # A graph has k and alpha as constants. Their values are tested eagerly, so one compiled case is enough.
        pytest.param(wrappers, k, alpha, id=f"{k}-{alpha}-{name}", marks=pytest.mark.exhaustive if exhaustive else [])
        for k, alpha in ((5, 0.5), (1, 0.3), (7, 1.0), (3, 0.0))
        for name, wrappers, exhaustive in (
            ("eager", (), False),
            ("donated", (ft.donated(),), False),
            ("compiled", (ft.compiled(backend="eager"),), k != 5),
        )
    ],
)
def test_lookahead_equals_the_algorithm_of_the_paper(k, alpha, wrappers):
    """Zhang et al. 2019, arXiv:1907.08610."""
    slow = [leaf.clone() for leaf in make_params().values()]
    fast = [leaf.clone().requires_grad_() for leaf in slow]
    inner = torch.optim.Adam(fast, lr=0.05)
    for number, batch in enumerate(batches(50), start=1):
        for leaf in fast:
            leaf.grad = leaf.detach() * batch + 1
        inner.step()
        if number % k == 0:
            with torch.no_grad():
                for slow_leaf, fast_leaf in zip(slow, fast, strict=True):
                    slow_leaf += alpha * (fast_leaf - slow_leaf)
                    fast_leaf.copy_(slow_leaf)
    state = train(optim.lookahead(optim.adam(0.05), k, alpha), 50, *wrappers)
    for actual, expected in ((state.params, fast), (state.opt_state["slow"], slow)):
        torch.testing.assert_close(list(actual.values()), [leaf.detach() for leaf in expected], rtol=1e-9, atol=1e-12)


def test_the_metric_lookahead_is_1_in_the_steps_that_move_the_slow_parameters():
    step = ft.train_step(quadratic, optim.lookahead(optim.sgd(0.1), 2))
    state, metrics = step(step.init(make_params()), torch.ones((), dtype=F64))
    assert metrics["lookahead"] == 0
    assert step(state, torch.ones((), dtype=F64))[1]["lookahead"] == 1


def test_invalid_lookaheads_are_refused():
    with pytest.raises(ComposeError, match="is a lookahead already"):
        optim.lookahead(optim.lookahead(optim.sgd(0.1)))
    with pytest.raises(OptionError, match="lookahead: k is 0"):
        optim.lookahead(optim.sgd(0.1), 0)
    with pytest.raises(OptionError, match=r"lookahead: alpha is 1\.5, needs a number in \[0, 1\]"):
        optim.lookahead(optim.sgd(0.1), 2, 1.5)
    with pytest.raises(ComposeError, match=r"lookahead: the optimizer is 0\.1"):
        optim.lookahead(0.1)


# adjustable


def test_factors_multiply_the_schedule_and_change_without_recompilation():
    schedule = ft.schedules.linear(0.2, 0.1, 10)
    step = ft.compose(
        ft.train_step(quadratic, optim.adjustable(optim.sgd(schedule))), ft.compiled(backend="eager", max_graphs=1)
    )
    state, params = step.init(make_params()), make_params()
    for k, batch in enumerate(batches(6)):
        factor = 1.0 if k < 2 else 0.5**k
        state = optim.adjust(state, {"lr": factor})
        state, metrics = step(state, batch)
        assert metrics["lr"] == schedule(k) * factor
        params = {
            name: leaf - schedule(k) * factor * grad
            for (name, leaf), grad in zip(params.items(), gradient(params, batch).values(), strict=True)
        }
    assert_close(state.params, params)


@pytest.mark.parametrize(
    "wrappers", [[], [ft.donated()], [ft.compiled(backend="aot_eager", lowering="whole")]], ids=str
)
def test_a_transformation_that_writes_to_its_gradient_is_refused(wrappers):
    """Both parameters have the same gradient tensor, so a write to one would change the other."""
    double = optim.GradientTransform(lambda grad, leaf, value, key: grad.mul_(2), ["a"], "double")
    step = ft.train_step(lambda p, batch: ((p["a"] + p["b"]) * batch).sum(), optim.chain(double, optim.sgd(0.1)))
    step = ft.compose(step, *wrappers)
    with pytest.raises(ComposeError, match=r"chain: double writes to its gradient, .* return another tensor"):
        step(step.init({"a": torch.ones(2), "b": torch.ones(2)}), torch.ones(2))


def test_adjust_takes_patterns_and_leaves_its_state_unchanged():
    parts = {"a": optim.sgd(0.1), "b": optim.adamw(0.1)}
    optimizer = optim.adjustable(optim.partition(parts, {"a": ["conv", "out"]}))
    step = ft.train_step(quadratic, optimizer)
    state = step.init(make_params())
    changed = optim.adjust(state, {"*/lr": 0.5, "b/lr": 0.25})
    assert {name: float(value) for name, value in changed.opt_state["factors"].items()} == {"a/lr": 0.5, "b/lr": 0.25}
    assert {float(value) for value in state.opt_state["factors"].values()} == {1.0}
    assert optim.adjust(changed, {"a/lr": 0.5}) is changed
    assert step(changed, torch.ones((), dtype=F64))[1]["a/lr"] == 0.05


@pytest.mark.parametrize("name", ["lookahead", "all/lookahead"])
def test_a_pattern_of_adjust_does_not_change_when_lookahead_is_due(name):
    optimizer = optim.lookahead(optim.sgd(0.1), 2)
    if "/" in name:
        optimizer = optim.partition({"all": optimizer}, lambda name, leaf: "all")
    step = ft.train_step(quadratic, optim.adjustable(optimizer))
    state = optim.adjust(step.init(make_params()), {"*": 0.0})
    for due in (0.0, 1.0):
        state, metrics = step(state, torch.ones((), dtype=F64))
        assert metrics[name] == due
        assert metrics[name.replace("lookahead", "lr")] == 0.0
    with pytest.raises(OptionError, match=r"no scheduled value is called '.*lookahead'; there are (all/)?lr$"):
        optim.adjust(state, {name: 0.0})


def test_adjust_refuses_unknown_names_bad_factors_and_other_states():
    plain = ft.train_step(quadratic, optim.sgd(0.1))
    step = ft.train_step(quadratic, optim.adjustable(optim.sgd(0.1)))
    state = step.init(make_params())
    with pytest.raises(StructureError, match="adjust: the optimizer of the state is not adjustable"):
        optim.adjust(plain.init(make_params()), {"lr": 0.5})
    with pytest.raises(OptionError, match=r"no scheduled value is called 'rate'; there are lr"):
        optim.adjust(state, {"rate": 0.5})
    for factor in (math.nan, math.inf, "1", True, None):
        with pytest.raises(OptionError, match="adjust: the factor of lr is"):
            optim.adjust(state, {"lr": factor})
    with pytest.raises(OptionError, match=r"adjust: factors is 0\.5; needs name -> factor"):
        optim.adjust(state, 0.5)
    with pytest.raises(StructureError, match="adjust: the state is dict; needs the TrainState"):
        optim.adjust(state.opt_state, {"lr": 0.5})
    with pytest.raises(OptionError, match=r"adjust: the factor of lr is -1\.0"):
        optim.adjust(state, {"lr": -1.0})


@pytest.mark.parametrize(
    "combine",
    [
        lambda optimizer: optim.partition({"a": optimizer}, lambda name, leaf: "a"),
        optim.chain,
        optim.lookahead,
        optim.adjustable,
    ],
    ids=["partition", "chain", "lookahead", "adjustable"],
)
def test_an_adjustable_optimizer_within_another_is_refused(combine):
    with pytest.raises(ComposeError, match="adjustable goes around the whole optimizer, once"):
        combine(optim.adjustable(optim.sgd(0.1)))


# partition and masks


def test_partition_by_patterns_equals_partition_by_a_function():
    parts = {"a": optim.sgd(0.1, momentum=0.9), "b": optim.adamw(0.02)}
    expected = train(optim.partition(parts, lambda name, leaf: "a" if name in ("conv", "out") else "b"), 5)
    for labels in (
        {"a": ["conv", "o*"]},
        {"b": ["norm", "scale", "empty"]},
        {"a": ["c*", "out"], "b": lambda name, leaf: name in ("norm", "scale", "empty")},
    ):
        assert_equal(train(optim.partition(parts, labels), 5), expected)


def test_each_optimizer_of_a_partition_follows_its_own_schedule():
    parts = {"a": optim.sgd(ft.schedules.linear(0.1, 0.0, 5)), "b": optim.sgd(ft.schedules.constant(0.3))}
    step = ft.train_step(quadratic, optim.partition(parts, {"a": ["conv"]}))
    state, params = step.init(make_params()), make_params()
    for k, batch in enumerate(batches(5)):
        state, metrics = step(state, batch)
        rates = {"a/lr": 0.1 * (1 - k / 5), "b/lr": 0.3}
        assert {name: metrics[name] for name in rates} == pytest.approx(rates)
        grads = gradient(params, batch)
        params = {
            name: leaf - rates["a/lr" if name == "conv" else "b/lr"] * grads[name] for name, leaf in params.items()
        }
    assert_close(state.params, params)


def test_one_partition_updates_models_of_different_shapes():
    parts = {"matrices": optim.sgd(0.1), "rest": optim.sgd(0.2)}
    optimizer = optim.partition(parts, lambda name, leaf: "matrices" if leaf.ndim == 2 else "rest")
    for shapes in (((2, 2), (3,)), ((3,), (2, 2)), ((2, 2), (3,))):
        params = {name: torch.ones(shape) for name, shape in zip("ab", shapes, strict=True)}
        moved, _ = optimizer.update(params, optimizer.init(params), params, {"matrices/lr": 0.1, "rest/lr": 0.2})
        for leaf in moved.values():
            assert torch.allclose(leaf, torch.full_like(leaf, 0.9 if leaf.ndim == 2 else 0.8))


def test_labels_that_do_not_match_the_parameters_or_the_optimizers_are_refused():
    parts = {"a": optim.sgd(0.1), "b": optim.sgd(0.1)}
    params = make_params()
    cases = {
        r"partition: out has the labels a and b; make their patterns disjoint": {"a": ["*"], "b": ["out"]},
        r"partition: norm has no label; add a pattern": {"a": ["conv", "out"], "b": ["scale", "empty"]},
        r"partition: b names 'nrom', and no parameter matches; there are norm, conv": {"b": ["nrom"]},
    }
    for message, labels in cases.items():
        optimizer = optim.partition(parts, labels)
        with pytest.raises(OptionError, match=message):
            optimizer.init(params)
    with pytest.raises(OptionError, match=r"partition: there is no optimizer for c; there are \['a', 'b'\]"):
        optim.partition(parts, {"c": ["*"]})
    with pytest.raises(OptionError, match=r"partition: a, b have no patterns; one label at most"):
        optim.partition(parts, {})
    with pytest.raises(OptionError, match=r"partition: label_fn is \['a'\]"):
        optim.partition(parts, ["a"])
    with pytest.raises(
        OptionError, match=r"partition: label_fn is a function \(params\); needs \(name, leaf\) -> label"
    ):
        optim.partition(parts, lambda params: {"conv": "a"})
    with pytest.raises(ComposeError, match=r"partition: b is 0\.1; needs an optimizer"):
        optim.partition({**parts, "b": 0.1}, {"a": ["*"]})


def decaying(mask):
    return optim.adamw(0.1, weight_decay=0.5, decay_mask=mask)


def test_a_decay_mask_of_patterns_equals_a_function():
    actual = train(decaying(["conv", "s*"]), 3)
    assert_equal(actual, train(decaying(lambda name, leaf: name in ("conv", "scale")), 3))
    by_default = train(decaying(optim.matrices), 3)
    assert not torch.equal(actual.params["scale"], by_default.params["scale"])


def test_invalid_decay_masks_are_refused():
    with pytest.raises(OptionError, match=r"adamw: decay_mask names 'weight', and no parameter matches"):
        train(decaying(["weight"]), 0)
    with pytest.raises(OptionError, match=r"adamw: decay_mask is 'conv', needs a list of patterns"):
        decaying("conv")
    with pytest.raises(OptionError, match=r"adamw: decay_mask is a function \(params\); needs \(name, leaf\) -> bool"):
        decaying(lambda params: {"conv": True})
    with pytest.raises(OptionError, match=r"adamw: decay_mask is 3"):
        decaying(3)


def test_names_without_wildcards_are_not_matched_as_patterns(monkeypatch):
    """A mask may list the name of every leaf, and comparing each name with each leaf takes quadratic time."""
    compared = []
    monkeypatch.setattr(name_patterns, "fnmatchcase", lambda name, pattern: compared.append(name) or name == pattern)
    params = {f"w{i}": torch.ones(()) for i in range(1000)}
    names = [f"w{i}" for i in range(0, 1000, 2)]
    step = ft.train_step(lambda params, batch: sum(params.values()), ft.optim.adamw(0.1), trainable=names)
    state = step.init(params)
    assert compared == []
    assert sum(value is not None for value in state.params.values()) == 500


# swa


@pytest.mark.parametrize(
    "wrappers", [(), (ft.donated(),), (ft.compiled(backend="eager"),)], ids=["eager", "donated", "compiled"]
)
@pytest.mark.parametrize(("start", "every"), [(0, 1), (3, 1), (2, 4), (50, 1)])
def test_swa_equals_the_averaged_model_of_torch(start, every, wrappers):
    module = torch.nn.Linear(3, 2).double()
    averages = torch.optim.swa_utils.AveragedModel(module)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    criterion = lambda model, batch: model(batch).square().mean()  # noqa: E731
    step = ft.compose(ft.train_step(ft.from_module(module, criterion), optim.sgd(0.1)), ft.swa(start, every), *wrappers)
    state = step.init()
    draw = torch.Generator().manual_seed(0)
    for number in range(1, 21):
        batch = torch.randn(4, 3, generator=draw, dtype=F64)
        state, _ = step(state, batch)
        inner.zero_grad()
        criterion(module, batch).backward()
        inner.step()
        if number > start and (number - start) % every == 0:
            averages.update_parameters(module)
    expected = averages.module if int(averages.n_averaged) else module
    actual = ft.averaged(state).params
    torch.testing.assert_close(
        actual, {name: leaf.detach() for name, leaf in expected.named_parameters()}, rtol=1e-9, atol=1e-12
    )


def test_swa_does_not_count_skipped_updates():
    step = ft.compose(
        ft.train_step(lambda p, batch: (p["w"] * batch).sum(), optim.sgd(1.0)), ft.swa(1), ft.skip_nonfinite()
    )
    state = step.init({"w": torch.zeros(1)})
    for batch in (1.0, math.nan, 2.0, math.inf, 4.0):
        state, _ = step(state, torch.tensor(batch))
    assert float(state.slots["swa"]["updates"]) == 3
    # The updates that are not skipped make w -1, -3 and -7, and averaging starts after the first.
    assert float(ft.averaged(state).params["w"]) == pytest.approx((-3.0 - 7.0) / 2)


def test_a_donated_step_writes_its_averages_in_place():
    step = ft.compose(
        ft.train_step(lambda p, batch: (p["w"] * batch).sum(), optim.sgd(0.1)), ft.swa(), ft.ema(), ft.donated()
    )
    state = step.init({"w": torch.ones(3)})

    def addresses(slots):
        return slots["swa"]["params"]["w"].data_ptr(), slots["ema"]["w"].data_ptr()

    before = addresses(state.slots)
    state, _ = step(state, torch.ones(3))
    assert addresses(state.slots) == before


def test_averages_of_bfloat16_parameters_are_kept_in_float32():
    step = ft.compose(ft.train_step(lambda p, batch: (p["w"] * batch).sum(), optim.sgd(1e-2)), ft.swa(), ft.ema(0.9))
    state = step.init({"w": torch.ones(3, dtype=torch.bfloat16)})
    for _ in range(3):
        state, _ = step(state, torch.ones(3, dtype=torch.bfloat16))
    assert state.slots["swa"]["params"]["w"].dtype == torch.float32
    for kind in ("ema", "swa"):
        assert ft.averaged(state, kind).params["w"].dtype == torch.bfloat16
    assert not torch.equal(state.slots["swa"]["params"]["w"], state.slots["ema"]["w"])
    with pytest.raises(StructureError, match="averaged: the state holds two averages"):
        ft.averaged(state)


def test_swa_and_averaged_refuse_bad_arguments_and_missing_averages():
    with pytest.raises(OptionError, match="swa: every is 0"):
        ft.swa(every=0)
    with pytest.raises(OptionError, match="swa: start is -1"):
        ft.swa(-1)
    state = train(optim.sgd(0.1), 1, ft.ema(0.5))
    with pytest.raises(StructureError, match="averaged: the state holds no average of 'swa', but one of ema"):
        ft.averaged(state, "swa")
