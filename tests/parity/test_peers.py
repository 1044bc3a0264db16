"""Fifty float64 steps equal those of the same optimizers in other libraries; a test is skipped without its library.

Where a library differs by intention, the test that leaves out the difference says so.
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
from tests.parity.fifty_steps import STEPS, TIGHT, make_grads, randn

LR = 0.05
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


def make_params(size=1.0):
    return {name: size * randn(shape, index) for index, (name, shape) in enumerate(SHAPES.items())}


def train(optimizer, size=1.0):
    params = make_params(size)
    state = optimizer.init(params)
    for step in range(STEPS):
        rates = {"lr": optimizer.schedules["lr"](step)}
        params, state = optimizer.update(make_grads(params, step), state, params, rates)
    return params, state


def train_theirs(make, size=1.0):
    """Train with the torch optimizer `make(parameters)`; return the optimizer, and the parameters by name."""
    leaves = {name: leaf.requires_grad_() for name, leaf in make_params(size).items()}
    theirs = make([*leaves.values()])
    # Optimizers of schedulefree have a training and an evaluation mode.
    if hasattr(theirs, "train"):
        theirs.train()
    for step in range(STEPS):
        for name, grad in make_grads(leaves, step).items():
            leaves[name].grad = grad
        theirs.step()
    return theirs, leaves


def assert_equals_theirs(ours, theirs):
    torch.testing.assert_close(ours, {name: leaf.detach() for name, leaf in theirs.items()}, **TIGHT)


def library(name):
    """Return the imported library, or skip the test."""
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
    """Without its option `decoupled_weight_decay`, with which the decay does not depend on the rate."""
    lion = library("lion_pytorch")
    params, state = train(optim.lion(LR, **ours, **ALL))
    optimizer, leaves = train_theirs(lambda params: lion.Lion(params, lr=LR, **theirs))
    assert_equals_theirs(params, leaves)
    assert_equals_theirs(state["mu"], {name: optimizer.state[leaf]["exp_avg"] for name, leaf in leaves.items()})


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
    """Its option `warmup_steps` is a schedule here, which starts at 1 / warmup of the rate. Its option `r` is 0."""
    schedulefree = library("schedulefree")
    rate = LR if not warmup else lambda k: LR * min(1.0, (k + 1) / warmup)
    params, state = train(optim.schedule_free_adamw(rate, **ours, **ALL))
    optimizer, leaves = train_theirs(
        lambda params: schedulefree.AdamWScheduleFree(params, lr=LR, warmup_steps=warmup, foreach=foreach, **theirs)
    )
    assert_equals_theirs(params, leaves)
    for key, their_key in (("z", "z"), ("nu", "exp_avg_sq")):
        assert_equals_theirs(state[key], {name: optimizer.state[leaf][their_key] for name, leaf in leaves.items()})
    optimizer.eval()
    # Both divide by b1 to compute x, which rounds.
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
    """The relative steps of the paper, without weight decay.

    Transformers multiplies decay by the relative step, torch and ftrain by the rate. It also adds 1e-30 to
    squared gradients, where torch and ftrain replace smaller ones by 1e-30; that is too little to be seen here.
    """
    module = library("transformers.optimization")
    params, state = train(optim.adafactor(1e-2, **{"eps": (1e-30, 1e-3), **ours}, **ALL))
    options = {"scale_parameter": True, "relative_step": True, "warmup_init": False, **theirs}
    optimizer, leaves = train_theirs(lambda params: module.Adafactor(params, lr=None, **options))
    assert_equals_theirs(params, leaves)
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
def test_adafactor_equals_transformers_with_a_fixed_rate(decay, size):
    """The fixed rate is not scaled by the size of the parameters.

    Ours is 1e-6 times the larger of epsilon_2 and their root mean square: with 1e3 for epsilon_2 it is always 1e-3.
    """
    module = library("transformers.optimization")
    params, _ = train(optim.adafactor(1e-6, eps=(1e-15, 1e3), weight_decay=1e3 * decay, **ALL), size)
    options = {"scale_parameter": False, "relative_step": False, "weight_decay": decay}
    _, leaves = train_theirs(lambda params: module.Adafactor(params, lr=1e-3, **options), size)
    assert_equals_theirs(params, leaves)


# optax

OPTAX = {
    "lamb": ("lamb", optim.lamb),
    "lion": ("lion", optim.lion),
    "schedule_free_adamw": ("contrib.schedule_free_adamw", optim.schedule_free_adamw),
}
CASES = [{"weight_decay": 0.0}, {"weight_decay": 0.1, "b1": 0.8, "b2": 0.9}]
# A process of its own: JAX starts threads, and a process with threads must not fork, which other tests do.
SCRIPT = textwrap.dedent(
    """
    import functools, operator, pickle, sys
    import jax, optax

    jax.config.update("jax_enable_x64", True)
    start, grads, rate, runs = pickle.load(sys.stdin.buffer)
    results = []
    for path, options in runs:
        optimizer = functools.reduce(getattr, path.split("."), optax)(rate, **options)
        params = jax.tree.map(jax.numpy.asarray, start)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for grad in grads:
            changes, state = update(grad, state, params)
            params = optax.apply_updates(params, changes)
        results.append(jax.device_get(params))
    sys.stdout.buffer.write(pickle.dumps(results))
    """
)


@pytest.fixture(scope="module")
def from_optax():
    """Return the parameters after the steps of optax, by optimizer and number of the case."""
    # `find_spec` does not import them: see the comment at `SCRIPT`.
    if not all(map(find_spec, ("jax", "optax"))):
        pytest.skip("optax is not installed, and it is the reference of this test")
    runs = [(path, options) for path, _ in OPTAX.values() for options in CASES]
    start = make_params()
    grads = [make_grads(start, step) for step in range(STEPS)]
    start, grads = tree.map(torch.Tensor.numpy, (start, grads))
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=pickle.dumps((start, grads, LR, runs)),
        capture_output=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 0, process.stderr.decode()[-2000:]
    results = iter(pickle.loads(process.stdout))
    return {(name, case): next(results) for name in OPTAX for case in range(len(CASES))}


# `test_adaptive.py` compares all three with their formulas, and JAX takes long to start.
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", OPTAX)
def test_lamb_lion_and_schedule_free_equal_optax(name, case, from_optax):
    params, _ = train(OPTAX[name][1](LR, **CASES[case], **ALL))
    theirs = {key: torch.as_tensor(leaf) for key, leaf in from_optax[name, case].items()}
    assert_equals_theirs(params, theirs)
