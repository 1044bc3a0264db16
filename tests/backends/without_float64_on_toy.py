"""Checks of training on the device of `toy.py` where it has no float64, as Apple's GPUs; `on_toy.py` runs them."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import backends
from ftrain.errors import DeviceError
from tests.backends.toy_problem import assert_near, batches, check_adder, device_types, make, plain_run, squares, train

CHECKS = {}
check = check_adder(CHECKS)


@contextlib.contextmanager
def without_float64(name, module, *, fused=False):
    """Context in which any operation on a tensor of float64 is an error, as on Apple's GPUs."""
    record = backends.get(name)
    module.float64 = False
    try:
        backends.register(dataclasses.replace(record, fused_optimizers=fused, float64=False))
        yield
    finally:
        module.float64 = True
        backends.register(record)


@check
def without_float64_a_double_is_an_error(name, module):
    """Without this, the checks below would prove nothing."""
    with without_float64(name, module):
        with pytest.raises(TypeError, match="no float64"):
            torch.ones(2, device=name).double()
        with pytest.raises(TypeError, match="no float64"):
            torch.ones(2).double().to(name)


@check
def without_float64_it_trains_by_fused_kernels(name, module):
    with without_float64(name, module, fused=True):
        _, losses = train(name, ft.accumulate(2))
    assert_near(losses, plain_run("cpu", 2)[1])


OPTIMIZERS = {
    "sgd": lambda lr: ft.optim.sgd(lr, momentum=0.9, dampening=0.5),
    "adam": lambda lr: ft.optim.adam(lr, amsgrad=True, weight_decay=0.1),
    "adamw": ft.optim.adamw,
    "adamw_b1_0": lambda lr: ft.optim.adamw(lr, b1=0.0),
    "adamw_bf16": lambda lr: ft.optim.adamw(lr, state_dtype="bf16"),
    "adamw_8bit": lambda lr: ft.optim.adamw_8bit(lr, min_size=1),
    "adafactor": ft.optim.adafactor,
    "adagrad": lambda lr: ft.optim.adagrad(lr, lr_decay=0.1),
    "lamb": ft.optim.lamb,
    "lion": ft.optim.lion,
    "muon": ft.optim.muon,
    "nadam": ft.optim.nadam,
    "radam": lambda lr: ft.optim.lookahead(ft.optim.radam(lr), k=2),
    "rmsprop": lambda lr: ft.optim.rmsprop(lr, momentum=0.5, centered=True),
}


@check
def without_float64_every_formula_is_that_of_the_cpu(name, module):
    """In float32 within rounding, over enough steps that RAdam rectifies; numbers in float64 stay on the host.

    In one step each optimizer has its own two matrices, and a vector, which Muon does not take.
    """
    params, rate = {}, ft.schedules.warmup_cosine(1e-2, 3, 30)
    for label in OPTIMIZERS:
        draw = torch.Generator().manual_seed(0)
        shapes = {"up": (16, 32), "bias": (32,), "down": (32, 16)}
        params[label] = {leaf: torch.randn(shape, generator=draw) / 4 for leaf, shape in shapes.items()}
    del params["muon"]["bias"]

    def loss(params, batch):
        outputs = (torch.tanh(batch @ p["up"] + p.get("bias", 0.0)) @ p["down"] for p in params.values())
        return sum(output.square().mean() for output in outputs)

    def run(device, optimizers):
        optimizer = ft.optim.partition(optimizers, lambda path, leaf: path.split(".")[0])
        step = ft.compose(ft.train_step(loss, ft.optim.adjustable(optimizer)), ft.swa(2))
        start = {label: params[label] for label in optimizers}
        return ft.fit(step, step.init(start, device=device), batches(7), progress=False)[0]

    optimizers = {label: make(rate) for label, make in OPTIMIZERS.items()}
    expected = run("cpu", optimizers)
    with without_float64(name, module):
        actual = run(name, optimizers)
    for label in OPTIMIZERS:
        assert_near(actual.params[label], expected.params[label], rtol=1e-4, atol=1e-5)
    refused = {"sgd": ft.optim.schedule_free_adamw(rate)}
    with without_float64(name, module), pytest.raises(DeviceError, match=r"schedule_free_adamw.*Toy has none"):
        run(name, refused)


@check
def without_float64_compiled_steps_get_their_rates(name, module):
    """Three of them, an odd number of float32; and dropout of stock modules, from the key."""

    def run(device, **options):
        torch.manual_seed(0)
        optimizers = {
            label: ft.optim.sgd(ft.schedules.warmup_cosine(peak, 3, 30), momentum=0.9)
            for label, peak in (("0", 1e-2), ("2", 3e-3), ("3", 1e-3))
        }
        optimizer = ft.optim.partition(optimizers, lambda path, leaf: path.split(".")[0])
        # A small model, because compiling takes long.
        model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 16))
        step = ft.train_step(ft.from_module(model, squares), optimizer)
        step = ft.compose(step, ft.compiled(donate=True, **options))
        state, history = ft.fit(step, step.init(device=device), batches(), progress=False)
        assert "whole" in repr(step), repr(step)
        return state, history

    expected, expected_history = run("cpu", backend="eager")
    with without_float64(name, module):
        state, history = run(name)
    rates = [column for column in expected_history[0] if column.startswith("lr") or column.endswith("/lr")]
    assert len(rates) == 3, expected_history[0]
    assert all(history[column] == expected_history[column] for column in rates)
    assert_near(history["loss"], expected_history["loss"])
    assert_near(state.params, expected.params, rtol=1e-4, atol=1e-5)


@check
def without_float64_a_split_step_and_mixed_precision_train(name, module):
    torch.manual_seed(0)
    # A small model, because compiling takes long.
    loss_fn = ft.from_module(nn.Linear(16, 16), squares)
    bare = ft.train_step(loss_fn, ft.optim.sgd(ft.schedules.warmup_cosine(1e-2, 3, 30)))
    _, expected = ft.fit(bare, bare.init(), batches(), progress=False)
    split = ft.compose(bare, ft.compiled(lowering="split"))
    with without_float64(name, module):
        _, history = ft.fit(split, split.init(device=name), batches(), progress=False)
    assert_near(history["loss"], expected["loss"])
    for step in (
        make(ft.with_amp("fp16", watch=True), ft.accumulate(2)),
        make(ft.with_amp("bf16"), ft.remat(blocks=["up"])),
    ):
        with without_float64(name, module):
            state, history = ft.fit(step, step.init(device=name), batches(), progress=False)
        assert_near(history["loss"], plain_run("cpu")[1], rtol=0.3, atol=0.1)
        assert device_types(state) == {name}
    assert history["lr"] == [step.optimizer.schedules["lr"](k) for k in range(5)]


@check
def without_float64_an_evaluation_is_as_exact(name, module):
    """Of one batch with a large total and many with small ones, which float32 would lose."""

    def loss(params, batch):
        return ft.Mean((params["w"] * batch["x"]).sum(), batch["n"]), {"plain": batch["x"].mean()}

    data = [{"x": torch.full((3,), value), "n": torch.tensor(3.0)} for value in (2.0**24, *[0.3] * 40, 1e-3, -0.77)]

    def evaluated(device, data, **options):
        state = ft.train_step(loss, ft.optim.sgd(0.1)).init({"w": torch.ones(3)}, device=device)
        return ft.evaluate(ft.eval_step(loss), state, data, **options)

    expected = evaluated("cpu", data)
    with without_float64(name, module):
        actual = evaluated(name, data)
        narrow = evaluated(name, data[1:], dtype="bf16", on_oom="split")
    exact = float(torch.stack([batch["x"][0] for batch in data]).double().mean())
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert actual["plain"] == pytest.approx(expected["plain"], rel=1e-12)
    assert actual["loss"] == pytest.approx(exact, rel=1e-12)
    # In bfloat16: the mean of 40 batches of 0.3, and one each of 1e-3 and -0.77.
    assert abs(narrow["loss"] - 0.27) < 0.01, narrow


@check
def without_float64_draws_are_those_of_the_cpu_within_rounding(name, module):
    key = ft.random.key(3)
    draws = {
        "normal": lambda key: ft.random.normal(key, (1001,)),
        "exponential": lambda key: ft.random.exponential(key, (1001,)),
        "uniform": lambda key: ft.random.uniform(key, (1001,), low=-2.0, high=3.0),
        "unit": lambda key: ft.random.uniform(key, (1001,)),
        "half": lambda key: ft.random.normal(key, (11,), dtype=torch.bfloat16).float(),
        "bernoulli": lambda key: ft.random.bernoulli(key, 0.3, (1001,)).float(),
        "permutation": lambda key: ft.random.permutation(key, 100).float(),
        "dropout": lambda key: ft.random.dropout(key, torch.ones(33, device=key.device), 0.3),
    }
    bitwise = set()
    for label, draw in draws.items():
        expected = draw(key)
        with without_float64(name, module):
            actual = draw(key.to(name))
        assert_near(actual, expected, rtol=1e-5, atol=2e-6)
        assert label != "uniform" or float(actual.max()) < 3.0 <= float(actual.max()) + 0.01
        if torch.equal(actual.cpu(), expected):
            bitwise.add(label)
    assert bitwise >= {"unit", "bernoulli", "permutation", "dropout"}
