"""SGD, AdamW, schedules and partitions in whole steps, with gradients of autograd, equal loops with `torch.optim`."""

import itertools

import pytest
import torch

import ftrain as ft
from ftrain import tree
from tests.exhaustive import exhaustive, exhaustive_rows
from tests.parity.fifty_steps import F64, STEPS, TIGHT
from tests.parity.sgd_and_adamw import (
    ADAMW,
    SGD,
    assert_equals_theirs,
    generator,
    make_grads,
    make_optimizer,
    make_params,
    make_theirs,
    set_grads,
    train_theirs,
    trainable_leaves,
)

WRAPPERS = {
    "eager": lambda: (),
    "compiled-donated": lambda: (ft.compiled(backend="eager", donate=True),),
}
# Compilation takes half a second, and the tests of the laws compare compiled steps with eager ones; so only few here.
wrapped = pytest.mark.parametrize("wrapper", ["eager", *exhaustive(["compiled-donated"])])


def inner_product(params, batch):
    """Return a loss whose gradient has the bits of the batch."""
    products = [(leaf * grad).sum() for leaf, grad in zip(tree.leaves(params), tree.leaves(batch), strict=True)]
    return torch.stack(products).sum()


def train_step(optimizer, wrapper, loss=inner_product, params=None, batches=None, steps=STEPS):
    """Train through a `Step`, and return its last state and the rates it reported."""
    step = ft.compose(ft.train_step(loss, optimizer), *WRAPPERS[wrapper]())
    state = step.init(make_params() if params is None else params)
    rates = []
    for k in range(steps):
        state, metrics = step(state, make_grads(k) if batches is None else batches[k])
        rates.append({name: value for name, value in metrics.items() if name.endswith("lr")})
    return state, rates


@pytest.mark.parametrize(
    ("family", "turned", "wrapper"),
    [
        *itertools.product(["sgd", "adamw"], [False, True], ["eager"]),
        ("sgd", False, "compiled-donated"),
        ("adamw", True, "compiled-donated"),
        *exhaustive_rows([("sgd", True, "compiled-donated"), ("adamw", False, "compiled-donated")]),
    ],
)
def test_step_equals_torch(family, turned, wrapper):
    case = "nesterov-decay" if family == "sgd" else "decay"
    state, _ = train_step(make_optimizer(family, case), wrapper, params=make_params(turned=turned))
    theirs, _ = train_theirs(family, case)
    assert_equals_theirs(state.params, theirs)


@wrapped
@pytest.mark.parametrize("family", ["sgd", "adamw"])
def test_gradients_that_are_one_expanded_tensor(family, wrapper):
    """Autograd gives both operands of a sum the same gradient: an expanded 0-d tensor."""

    def loss(params, batch):
        return ((params["a"] + params["b"]).sum() - batch) ** 2 + params["c"].t().sum()

    case = "nesterov-decay" if family == "sgd" else "decay"
    draw = generator(2)
    shapes = {"a": (3, 4), "b": (3, 4), "c": (2, 5)}
    params = {name: torch.randn(shape, generator=draw, dtype=F64) for name, shape in shapes.items()}
    batches = [torch.randn((), generator=draw, dtype=F64) for _ in range(STEPS)]
    # A small rate: the loss, the square of a sum over 24 elements, diverges with a large one.
    optimizer = ft.optim.sgd(1e-3, **SGD[case]) if family == "sgd" else ft.optim.adamw(1e-3, **ADAMW[case])
    state, _ = train_step(optimizer, wrapper, loss, params, batches)

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    theirs = make_theirs(family, case, list(leaves.values()))
    for group in theirs.param_groups:
        group["lr"] = 1e-3
    for batch in batches:
        theirs.zero_grad()
        loss(leaves, batch).backward()
        theirs.step()
    torch.testing.assert_close(state.params, {name: leaf.detach() for name, leaf in leaves.items()}, **TIGHT)


# Schedules


@pytest.mark.parametrize(
    ("family", "wrapper"),
    [
        ("sgd", "eager"),
        ("adamw", "eager"),
        ("adamw", "compiled-donated"),
        *exhaustive_rows([("sgd", "compiled-donated")]),
    ],
)
def test_schedule_drives_the_rate_as_lambda_lr_does(family, wrapper):
    schedule = ft.schedules.warmup_cosine(0.1, warmup=10, total=40, end=0.01)
    case = "momentum-decay" if family == "sgd" else "decay"
    state, rates = train_step(make_optimizer(family, case, schedule), wrapper)

    leaves = trainable_leaves(make_params())
    theirs = make_theirs(family, case, leaves)
    for group in theirs.param_groups:
        group["lr"] = 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(theirs, [schedule] * 2)
    # LambdaLR multiplies the initial rate; its constructor must have recorded the 1.0 and not the LR of make_theirs.
    assert [group["initial_lr"] for group in theirs.param_groups] == [1.0, 1.0]
    for k in range(STEPS):
        set_grads(leaves, make_grads(k))
        assert rates[k] == {"lr": schedule(k)} == {"lr": theirs.param_groups[0]["lr"]}
        theirs.step()
        scheduler.step()
    assert_equals_theirs(state.params, leaves)


def test_rate_of_update_k_is_schedule_of_k():
    step = ft.train_step(lambda params, batch: params.sum(), ft.optim.sgd(lambda k: [1.0, 10.0, 100.0][k]))
    state = step.init(torch.zeros((), dtype=F64))
    for k, expected in enumerate([-1.0, -11.0, -111.0]):
        state, metrics = step(state, None)
        assert float(state.params) == expected
        assert metrics["lr"] == 10.0**k


# Partition


def group_of(name, leaf):
    return "body" if name.startswith(("nested", "matrix")) else "rest"


def leaves_of_group(leaves, group):
    names = tree.leaf_names(make_params())
    return [leaf for name, leaf in zip(names, leaves, strict=True) if group_of(name, leaf) == group]


@wrapped
def test_partition_equals_param_groups(wrapper):
    """Two AdamW with different rates and decays equal one AdamW of torch with two parameter groups."""
    everything = {"decay_mask": lambda name, leaf: True}
    optimizer = ft.optim.partition(
        {
            "body": ft.optim.adamw(0.01, weight_decay=0.2, **everything),
            "rest": ft.optim.adamw(0.1, b2=0.95, **everything),
        },
        group_of,
    )
    state, rates = train_step(optimizer, wrapper)
    assert rates == [{"body/lr": 0.01, "rest/lr": 0.1}] * STEPS

    leaves = trainable_leaves(make_params())
    theirs = torch.optim.AdamW(
        [
            {"params": leaves_of_group(leaves, "body"), "lr": 0.01, "weight_decay": 0.2},
            {"params": leaves_of_group(leaves, "rest"), "lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0},
        ]
    )
    for k in range(STEPS):
        set_grads(leaves, make_grads(k))
        theirs.step()
    assert_equals_theirs(state.params, leaves)


@pytest.mark.parametrize("wrapper", ["eager", "compiled-donated"])
def test_partition_equals_two_optimizers(wrapper):
    """SGD with a schedule, and AdamW."""
    schedule = ft.schedules.warmup_cosine(0.1, warmup=5, total=STEPS)
    optimizer = ft.optim.partition(
        {"body": ft.optim.sgd(schedule, momentum=0.9, nesterov=True), "rest": ft.optim.adamw(0.02)}, group_of
    )
    state, rates = train_step(optimizer, wrapper)
    assert rates == [{"body/lr": schedule(k), "rest/lr": 0.02} for k in range(STEPS)]

    leaves = trainable_leaves(make_params())
    body = torch.optim.SGD(leaves_of_group(leaves, "body"), lr=1.0, momentum=0.9, nesterov=True)
    rest = torch.optim.AdamW(leaves_of_group(leaves, "rest"), lr=0.02, weight_decay=0.0)
    for k in range(STEPS):
        set_grads(leaves, make_grads(k))
        body.param_groups[0]["lr"] = schedule(k)
        body.step()
        rest.step()
    assert_equals_theirs(state.params, leaves)
