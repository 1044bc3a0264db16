"""Fifty steps in float64 beside the optimizers of other libraries; a test is skipped where its library is missing.

What a library does otherwise by its own choice is named in the test that leaves it out.
"""

import os
import pickle
import subprocess
import sys
import textwrap
from importlib.util import find_spec

import pytest
import torch

from ftrain import optim, tree

STEPS, LR, F64 = 50, 0.05, torch.float64
TIGHT = {"rtol": 1e-12, "atol": 1e-14}
ALL = {"decay_mask": lambda name, leaf: True}
SHAPES = {
    "matrix": (4, 3),
    "wide": (2, 5),
    "one": (1, 1),
    "scalar": (),
    "vector": (5,),
    "image": (2, 3, 4, 4),
    "element": (1,),
}


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def make_params(size=1.0):
    return {name: size * randn(shape, index) for index, (name, shape) in enumerate(SHAPES.items())}


def make_grads(step):
    """Of changing size, and zero now and then, so that no two steps are alike."""
    size = 0.0 if step == 3 else 2.0 ** (step % 5 - 2)
    return {name: size * randn(shape, 100 * step + index) for index, (name, shape) in enumerate(SHAPES.items())}


def train(optimizer, size=1.0):
    params, state = make_params(size), optimizer.init(make_params(size))
    for step in range(STEPS):
        params, state = optimizer.update(make_grads(step), state, params, {"lr": optimizer.schedules["lr"](step)})
    return params, state


def train_theirs(make, size=1.0):
    """Train with a class of optimizers, and return it and its parameters by name."""
    leaves = {name: leaf.requires_grad_() for name, leaf in make_params(size).items()}
    theirs = make([*leaves.values()])
    if hasattr(theirs, "train"):
        theirs.train()
    for step in range(STEPS):
        for name, grad in make_grads(step).items():
            leaves[name].grad = grad
        theirs.step()
    return theirs, leaves


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, {name: leaf.detach() for name, leaf in theirs.items()}, **TIGHT)


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed, and it is the reference of this test")


# lion-pytorch


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"weight_decay": 0.3}, {"weight_decay": 0.3}),
        ({"b1": 0.5, "b2": 0.8, "weight_decay": 0.1}, {"betas": (0.5, 0.8), "weight_decay": 0.1}),
    ],
)
def test_lion_equals_lion_pytorch(ours, theirs):
    """But for its option `decoupled_weight_decay`, with which decay does not follow the rate."""
    lion = library("lion_pytorch")
    params, state = train(optim.lion(LR, **ours, **ALL))
    optimizer, leaves = train_theirs(lambda each: lion.Lion(each, lr=LR, **theirs))
    assert_same(params, leaves)
    assert_same(state["mu"], {name: optimizer.state[leaf]["exp_avg"] for name, leaf in leaves.items()})


# schedulefree


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
        (
            {"b1": 0.95, "b2": 0.9, "eps": 1e-2, "weight_decay": 0.3},
            {"betas": (0.95, 0.9), "eps": 1e-2, "weight_decay": 0.3},
        ),
    ],
)
@pytest.mark.parametrize("warmup", [0, 20])
def test_schedule_free_adamw_equals_schedulefree(ours, theirs, warmup, foreach):
    """Its own warm-up is a schedule here: its first rate is one part of as many, and not zero. Its option `r` is 0."""
    schedulefree = library("schedulefree")
    rate = LR if not warmup else lambda k: LR * min(1.0, (k + 1) / warmup)
    params, state = train(optim.schedule_free_adamw(rate, **ours, **ALL))
    optimizer, leaves = train_theirs(
        lambda each: schedulefree.AdamWScheduleFree(each, lr=LR, warmup_steps=warmup, foreach=foreach, **theirs)
    )
    assert_same(params, leaves)
    for mine, name in (("z", "z"), ("nu", "exp_avg_sq")):
        assert_same(state[mine], {key: optimizer.state[leaf][name] for key, leaf in leaves.items()})
    optimizer.eval()
    # Both divide by b1 to find x, in which they round.
    averaged = {name: leaf.detach() for name, leaf in leaves.items()}
    torch.testing.assert_close(optim.schedule_free_params(params, state), averaged, rtol=1e-11, atol=1e-13)


# transformers


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"d": 2.0}, {"clip_threshold": 2.0}),
        ({"beta2_decay": -0.5, "eps": (1e-30, 0.1)}, {"decay_rate": -0.5, "eps": (1e-30, 0.1)}),
    ],
)
def test_adafactor_equals_transformers_with_relative_steps(ours, theirs):
    """The paper's relative steps, without decay: it decays by the step that it takes, and torch and we by the rate.

    To squares it adds what torch and we take as the least of them, 1e-30: so small that it does not show.
    """
    module = library("transformers.optimization")
    params, state = train(optim.adafactor(1e-2, **{"eps": (1e-30, 1e-3), **ours}, **ALL))
    options = {"scale_parameter": True, "relative_step": True, "warmup_init": False, **theirs}
    optimizer, leaves = train_theirs(lambda each: module.Adafactor(each, lr=None, **options))
    assert_same(params, leaves)
    for name, leaf in leaves.items():
        peer_state = optimizer.state[leaf]
        row, column = state["row"][name], state["column"][name]
        if leaf.ndim > 1:
            torch.testing.assert_close(row.squeeze(-1), peer_state["exp_avg_sq_row"], **TIGHT)
            torch.testing.assert_close(column.squeeze(-2), peer_state["exp_avg_sq_col"], **TIGHT)
        else:
            torch.testing.assert_close(row, peer_state["exp_avg_sq"], **TIGHT)


@pytest.mark.parametrize("size", [0.2, 50.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor_equals_that_of_the_trainer(decay, size):
    """Its steps have the length of the rate, so epsilon_2 is larger than the root mean square of any parameter."""
    module = library("transformers.optimization")
    params, _ = train(optim.adafactor(1e-6, eps=(1e-15, 1e3), weight_decay=1e3 * decay, **ALL), size)
    options = {"scale_parameter": False, "relative_step": False, "weight_decay": decay}
    _, leaves = train_theirs(lambda each: module.Adafactor(each, lr=1e-3, **options), size)
    assert_same(params, leaves)


# optax

OPTAX = {
    "lamb": ("lamb", optim.lamb),
    "lion": ("lion", optim.lion),
    "schedule_free_adamw": ("contrib.schedule_free_adamw", optim.schedule_free_adamw),
}
CASES = [{"weight_decay": 0.0}, {"weight_decay": 0.1, "b1": 0.8, "b2": 0.9}]
# In a process of its own, since the threads of JAX forbid others to fork.
SCRIPT = textwrap.dedent(
    """
    import functools, operator, pickle, sys
    import jax, optax

    jax.config.update("jax_enable_x64", True)
    start, grads, rate, jobs = pickle.load(sys.stdin.buffer)
    results = []
    for path, options in jobs:
        optimizer = functools.reduce(getattr, path.split("."), optax)(rate, **options)
        params = jax.tree.map(jax.numpy.asarray, start)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for grad in grads:
            moved, state = update(grad, state, params)
            params = optax.apply_updates(params, moved)
        results.append(jax.tree.map(lambda leaf: jax.device_get(leaf), params))
    sys.stdout.buffer.write(pickle.dumps(results))
    """
)


@pytest.fixture(scope="module")
def from_optax():
    """Return the parameters after the steps of optax, by optimizer and number of the case."""
    # Not imported in this process: see above.
    if not all(map(find_spec, ("jax", "optax"))):
        pytest.skip("optax is not installed, and it is the reference of this test")
    jobs = [(path, options) for path, _ in OPTAX.values() for options in CASES]
    params_and_grads = tree.map(torch.Tensor.numpy, (make_params(), [make_grads(step) for step in range(STEPS)]))
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=pickle.dumps((*params_and_grads, LR, jobs)),
        capture_output=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 0, process.stderr.decode()[-2000:]
    results = iter(pickle.loads(process.stdout))
    return {(name, case): next(results) for name in OPTAX for case in range(len(CASES))}


# `test_adaptive.py` has all three written out, and JAX takes long to start.
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", OPTAX)
def test_lamb_lion_and_schedule_free_equal_optax(name, case, from_optax):
    params, _ = train(OPTAX[name][1](LR, **CASES[case], **ALL))
    theirs = {key: torch.as_tensor(leaf) for key, leaf in from_optax[name, case].items()}
    assert_same(params, theirs)
