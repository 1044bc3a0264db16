"""Optimizers made of others, against references written out here."""

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
    """Whose gradient is the parameters times the batch, plus one."""
    return sum((leaf.square() * batch / 2 + leaf).sum() for leaf in params.values())


def gradient(params, batch):
    return {name: leaf * batch + 1 for name, leaf in params.items()}


def train(optimizer, steps, *wrappers, params=None):
    step = ft.compose(ft.train_step(quadratic, optimizer), *wrappers)
    state = step.init(make_params() if params is None else params)
    for k in range(steps):
        state, _ = step(state, torch.tensor(0.5 + 0.1 * math.sin(k), dtype=F64))
    return state


def batches(steps):
    return [torch.tensor(0.5 + 0.1 * math.sin(k), dtype=F64) for k in range(steps)]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def by_hand(change, steps=5, lr=0.1):
    """SGD on changed gradients."""
    params = make_params()
    for batch in batches(steps):
        grads = change(gradient(params, batch), params)
        params = {name: leaf - lr * grads[name] for name, leaf in params.items()}
    return params


# chain


def test_centralize_takes_the_mean_off_each_output():
    def change(grads, params):
        conv = grads["conv"] - grads["conv"].mean((1, 2, 3), keepdim=True)
        return {**grads, "conv": conv, "out": grads["out"] - grads["out"].mean(1, keepdim=True)}

    assert_close(train(optim.chain(optim.centralize(), optim.sgd(0.1)), 5).params, by_hand(change))


def test_centralize_of_a_pattern_leaves_the_rest():
    def change(grads, params):
        return {**grads, "out": grads["out"] - grads["out"].mean(1, keepdim=True)}

    assert_close(train(optim.chain(optim.centralize(["o*"]), optim.sgd(0.1)), 5).params, by_hand(change))


def test_sign_before_sgd_is_sign_sgd():
    def change(grads, params):
        return {name: grad.sign() for name, grad in grads.items()}

    assert_close(train(optim.chain(optim.sign(), optim.sgd(0.1)), 5).params, by_hand(change))


@pytest.mark.parametrize("make", [optim.adamw, optim.sgd, optim.lion], ids=lambda make: make.__name__)
def test_a_gradient_of_another_shape_is_refused(make):
    """A fused kernel took memory beyond its end for the rest of the gradient."""
    mean = optim.GradientTransform(lambda grad, *_: grad.mean(0, keepdim=True), lambda name, leaf: True, "mean()")
    with pytest.raises(StructureError, match=r"gradient of conv is float64\[1, 3, 2, 2\], .* float64\[4, 3, 2, 2\]"):
        train(optim.chain(mean, make(0.1)), 1)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=F64)], ids=["eager", "graph"])
@pytest.mark.parametrize("make", [optim.adamw, optim.sgd, optim.rmsprop], ids=lambda make: make.__name__)
def test_a_gradient_of_another_dtype_is_refused(make, rate):
    """As of one in 16 bits times a mask in 32; some kernels computed in the wider one, and others failed."""
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


def test_project_keeps_what_is_orthogonal_and_copes_with_zero_rows():
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
    def change(grads, params):
        return {name: (grad - grad.mean()).sign() if name == "norm" else grad.sign() for name, grad in grads.items()}

    only = {"mask": ["norm"]}

    def centralize_all(grad, leaf, value, key):
        return grad - grad.mean()

    mine = optim.GradientTransform(centralize_all, ["norm"], "mine()")
    assert_close(train(optim.chain(mine, optim.sign(), optim.sgd(0.1)), 5).params, by_hand(change))
    other = train(optim.chain(optim.sign(), mine, optim.sgd(0.1)), 5).params
    assert not torch.allclose(other["norm"], by_hand(change)["norm"])
    assert optim.chain(mine, optim.sign(**only), optim.sgd(0.1)).text.startswith("chain(mine(), sign(), sgd(")


def test_noise_has_its_spread_and_differs_by_step_and_leaf():
    zero = {"a": torch.zeros(200, 100), "b": torch.zeros(200, 100)}
    step = ft.train_step(
        lambda p, batch: 0 * p["a"].sum() + 0 * p["b"].sum(), optim.chain(optim.noise(0.5), optim.sgd(1.0))
    )
    first, metrics = step(step.init(zero), torch.ones(()))
    second, _ = step(first, torch.ones(()))
    assert metrics["noise"] == 0.5
    drawn = [-first.params["a"], -first.params["b"], first.params["a"] - second.params["a"]]
    for each in drawn:
        assert abs(float(each.mean())) < 5 * 0.5 / 20_000**0.5
        assert float(each.std()) == pytest.approx(0.5, rel=0.03)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((drawn[one] * drawn[other]).mean())) < 5 * 0.25 / 20_000**0.5


def test_noise_follows_its_schedule_the_key_and_a_compiler():
    def noisy(seed, *wrappers):
        schedule = lambda k: 0.0 if k == 0 else 0.1 / k  # noqa: E731
        step = ft.compose(ft.train_step(quadratic, optim.chain(optim.noise(schedule), optim.sgd(0.1))), *wrappers)
        state, params_after_steps = step.init(make_params(), seed=seed), []
        for batch in batches(3):
            state, _ = step(state, batch)
            params_after_steps.append(state.params)
        return params_after_steps

    plain = train(optim.sgd(0.1), 1).params
    assert_close(noisy(0)[0], plain)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(noisy(0)), tree.leaves(noisy(0)), strict=True))
    assert not torch.equal(noisy(0)[1]["conv"], noisy(1)[1]["conv"])
    captured = noisy(0, ft.compiled(lowering="whole", backend="eager"))
    torch.testing.assert_close(captured, noisy(0), rtol=1e-9, atol=1e-12)


def test_what_cannot_be_chained():
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
        # Of a graph both are constants, as eager steps have shown them to be right.
        pytest.param(wrappers, k, alpha, id=f"{k}-{alpha}-{name}", marks=pytest.mark.exhaustive if more else [])
        for k, alpha in ((5, 0.5), (1, 0.3), (7, 1.0), (3, 0.0))
        for name, wrappers, more in (
            ("eager", (), False),
            ("donated", (ft.donated(),), False),
            ("compiled", (ft.compiled(backend="eager"),), k != 5),
        )
    ],
)
def test_lookahead_against_the_paper(k, alpha, wrappers):
    slow = [leaf.clone() for leaf in make_params().values()]
    fast = [leaf.clone().requires_grad_() for leaf in slow]
    inner = torch.optim.Adam(fast, lr=0.05)
    for number, batch in enumerate(batches(50), start=1):
        for leaf in fast:
            leaf.grad = leaf.detach() * batch + 1
        inner.step()
        if number % k == 0:
            with torch.no_grad():
                for mine, leaf in zip(slow, fast, strict=True):
                    mine += alpha * (leaf - mine)
                    leaf.copy_(mine)
    state = train(optim.lookahead(optim.adam(0.05), k, alpha), 50, *wrappers)
    for actual, expected in ((state.params, fast), (state.opt_state["slow"], slow)):
        torch.testing.assert_close(list(actual.values()), [leaf.detach() for leaf in expected], rtol=1e-9, atol=1e-12)


def test_lookahead_reports_and_refuses():
    step = ft.train_step(quadratic, optim.lookahead(optim.sgd(0.1), 2))
    state, metrics = step(step.init(make_params()), torch.ones((), dtype=F64))
    assert metrics["lookahead"] == 0
    assert step(state, torch.ones((), dtype=F64))[1]["lookahead"] == 1
    with pytest.raises(ComposeError, match="is a lookahead already"):
        optim.lookahead(optim.lookahead(optim.sgd(0.1)))
    with pytest.raises(OptionError, match="lookahead: k is 0"):
        optim.lookahead(optim.sgd(0.1), 0)
    with pytest.raises(OptionError, match=r"lookahead: alpha is 1\.5, needs a number in \[0, 1\]"):
        optim.lookahead(optim.sgd(0.1), 2, 1.5)
    with pytest.raises(ComposeError, match=r"lookahead: the optimizer is 0\.1"):
        optim.lookahead(0.1)


# adjustable


def test_factors_multiply_the_schedule_and_change_without_a_recompile():
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
def test_a_transformation_that_writes_to_its_gradient(wrappers):
    """Here both parameters have one gradient."""
    double = optim.GradientTransform(lambda grad, leaf, value, key: grad.mul_(2), ["a"], "double")
    step = ft.train_step(lambda p, batch: ((p["a"] + p["b"]) * batch).sum(), optim.chain(double, optim.sgd(0.1)))
    step = ft.compose(step, *wrappers)
    with pytest.raises(ComposeError, match=r"chain: double writes to its gradient, .* return another tensor"):
        step(step.init({"a": torch.ones(2), "b": torch.ones(2)}), torch.ones(2))


def test_adjust_is_pure_and_by_pattern():
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
def test_a_pattern_of_adjust_leaves_out_when_lookahead_is_due(name):
    optimizer = optim.lookahead(optim.sgd(0.1), 2)
    if "/" in name:
        optimizer = optim.partition({"all": optimizer}, lambda name, leaf: "all")
    step = ft.train_step(quadratic, optim.adjustable(optimizer))
    state = optim.adjust(step.init(make_params()), {"*": 0.0})
    for due in (0.0, 1.0):
        state, metrics = step(state, torch.ones((), dtype=F64))
        assert (metrics[name], metrics[name.replace("lookahead", "lr")]) == (due, 0.0)
    with pytest.raises(OptionError, match=r"no scheduled value is called '.*lookahead'; there are (all/)?lr$"):
        optim.adjust(state, {name: 0.0})


def test_what_adjust_refuses():
    plain, step = (ft.train_step(quadratic, each) for each in (optim.sgd(0.1), optim.adjustable(optim.sgd(0.1))))
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
    for combined in (
        lambda each: optim.partition({"a": each}, lambda name, leaf: "a"),
        lambda each: optim.chain(each),
        optim.lookahead,
        optim.adjustable,
    ):
        with pytest.raises(ComposeError, match="adjustable goes around the whole optimizer, once"):
            combined(optim.adjustable(optim.sgd(0.1)))


# partition and masks


def test_partition_by_patterns_is_that_by_a_function():
    parts = {"a": optim.sgd(0.1, momentum=0.9), "b": optim.adamw(0.02)}
    expected = train(optim.partition(parts, lambda name, leaf: "a" if name in ("conv", "out") else "b"), 5)
    for labels in (
        {"a": ["conv", "o*"]},
        {"b": ["norm", "scale", "empty"]},
        {"a": ["c*", "out"], "b": lambda n, x: n in ("norm", "scale", "empty")},
    ):
        actual = train(optim.partition(parts, labels), 5)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True))


def test_partition_with_schedules_of_their_own():
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


def test_one_partition_serves_models_of_other_shapes():
    parts = {"matrices": optim.sgd(0.1), "rest": optim.sgd(0.2)}
    optimizer = optim.partition(parts, lambda name, leaf: "matrices" if leaf.ndim == 2 else "rest")
    for shapes in (((2, 2), (3,)), ((3,), (2, 2)), ((2, 2), (3,))):
        params = {name: torch.ones(shape) for name, shape in zip("ab", shapes, strict=True)}
        moved, _ = optimizer.update(params, optimizer.init(params), params, {"matrices/lr": 0.1, "rest/lr": 0.2})
        for leaf in moved.values():
            assert torch.allclose(leaf, torch.full_like(leaf, 0.9 if leaf.ndim == 2 else 0.8))


def test_labels_that_do_not_fit():
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


def test_a_decay_mask_by_patterns_is_that_by_a_function():
    make = lambda mask: optim.adamw(0.1, weight_decay=0.5, decay_mask=mask)  # noqa: E731
    actual, expected = train(make(["conv", "s*"]), 3), train(make(lambda name, leaf: name in ("conv", "scale")), 3)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True))
    other = train(make(optim.matrices), 3)
    assert not torch.equal(actual.params["scale"], other.params["scale"])
    with pytest.raises(OptionError, match=r"adamw: decay_mask names 'weight', and no parameter matches"):
        train(make(["weight"]), 0)
    with pytest.raises(OptionError, match=r"adamw: decay_mask is 'conv', needs a list of patterns"):
        make("conv")
    with pytest.raises(OptionError, match=r"adamw: decay_mask is a function \(params\); needs \(name, leaf\) -> bool"):
        make(lambda params: {"conv": True})
    with pytest.raises(OptionError, match=r"adamw: decay_mask is 3"):
        make(3)


def test_a_mask_of_names_is_not_compared_with_every_leaf(monkeypatch):
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
def test_swa_against_torch(start, every, wrappers):
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
    assert float(ft.averaged(state).params["w"]) == pytest.approx((-3.0 - 7.0) / 2)


def test_a_donated_step_writes_its_averages_in_place():
    step = ft.compose(
        ft.train_step(lambda p, batch: (p["w"] * batch).sum(), optim.sgd(0.1)), ft.swa(), ft.ema(), ft.donated()
    )
    state = step.init({"w": torch.ones(3)})
    before = [leaf.data_ptr() for leaf in (state.slots["swa"]["params"]["w"], state.slots["ema"]["w"])]
    state, _ = step(state, torch.ones(3))
    assert [leaf.data_ptr() for leaf in (state.slots["swa"]["params"]["w"], state.slots["ema"]["w"])] == before


def test_averages_of_16_bits_are_kept_in_32():
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


def test_what_swa_and_averaged_refuse():
    with pytest.raises(OptionError, match="swa: every is 0"):
        ft.swa(every=0)
    with pytest.raises(OptionError, match="swa: start is -1"):
        ft.swa(-1)
    state = train(optim.sgd(0.1), 1, ft.ema(0.5))
    with pytest.raises(StructureError, match="averaged: the state holds no average of 'swa', but one of ema"):
        ft.averaged(state, "swa")
