"""An update a few leaves at a time is the update of all of them, to the bit, whatever the optimizer and the cut."""

import dataclasses
import itertools

import pytest
import torch

import ftrain as ft
from ftrain import optim, tree
from ftrain.errors import ComposeError
from ftrain.optim.partial_update import UpdateSplitter, by_size, require_splittable
from ftrain.types import RNG, Optimizer
from tests.exhaustive import choose
from tests.laws.optimizers import COMBINED, OPTIMIZERS
from tests.laws.test_optimizers import make, make_params
from tests.laws.test_pipelines import assert_equal

each = pytest.mark.parametrize("name", OPTIMIZERS | COMBINED)
CUTS = {
    "leaf by leaf": lambda leaves: [[index] for index in range(len(leaves))],
    "in halves": lambda leaves: [list(range(len(leaves)))[::2], list(range(len(leaves)))[1::2]],
    "backwards": lambda leaves: [[index] for index in reversed(range(len(leaves)))],
    "at once": lambda leaves: [list(range(len(leaves)))],
    "by size": lambda leaves: by_size(leaves, 64),
}


def make_nested(dtype):
    """Leaves of odd sizes, more than a kernel takes at a time, two of one shape, deep in containers."""
    actual = make_params(dtype)
    draw = torch.Generator().manual_seed(7)
    more = [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        for shape in ((37, 5), (61,), (3, 33), *[(20, 17)] * 2)
    ]
    return {**actual, "blocks": [{"weight": more[0], "bias": more[1]}, (more[2],)], "twins": more[3:], "none": None}


def run(optimizer, cut, dtype, *, donate, steps=3):
    params = make_nested(dtype)
    state = optimizer.init(params)
    apart = None if cut is None else UpdateSplitter("test", optimizer, CUTS[cut])
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        grads = tree.map(
            lambda leaf, draw=draw: torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(dtype), params
        )
        hyper = {name: schedule(step) for name, schedule in optimizer.schedules.items()}
        hyper[RNG] = ft.random.key(step)
        if apart is None:
            params, state = optimizer.update(grads, state, params, hyper, donate=donate)
            continue
        before = tree.clone((params, state))
        update = apart.begin(params, state, hyper, donate=donate)
        leaves = tree.leaves(grads)
        for group in update.groups:
            update.update(group, [leaves[place] for place in group.indices])
        new = update.finish()
        if not donate:
            assert_equal((params, state), before)
        params, state = new
    return params, state


# The two that group leaves in unlike ways: one after another, and some together.
cuts = pytest.mark.parametrize("cut", choose(CUTS, ["backwards", "by size"]))


@each
@cuts
def test_no_bit_changes(name, cut):
    for dtype, donate in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        whole = run(make(name, weight_decay=0.1), None, dtype, donate=donate, steps=2)
        assert_equal(run(make(name, weight_decay=0.1), cut, dtype, donate=donate, steps=2), whole)


@pytest.mark.parametrize("name", ["adamw_8bit", "stochastic", "nearest", "nested"])
@cuts
def test_leaves_that_are_longer_than_what_is_taken_together(name, cut, monkeypatch):
    monkeypatch.setattr("ftrain.optim.grouping.BLOCK", 16)
    for dtype in (torch.float32, torch.bfloat16):
        whole = run(make(name, weight_decay=0.1), None, dtype, donate=True)
        assert_equal(run(make(name, weight_decay=0.1), cut, dtype, donate=True), whole)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "stochastic"])
def test_strides_of_axes_of_one_element(name):
    """Those of the first convolution in channels last, say, which is contiguous all the same."""
    make = {"adamw_8bit": optim.adamw_8bit, "stochastic": lambda lr: optim.adamw(lr, state_dtype="bf16")}
    params = {"w": torch.linspace(-1, 1, 36).as_strided((4, 1, 3, 3), (9, 1, 3, 1)), "b": torch.ones(4)}
    actual = []
    for cut in ("at once", "leaf by leaf"):
        optimizer = make.get(name, optim.adamw)(0.1)
        update = UpdateSplitter("test", optimizer, CUTS[cut]).begin(
            params, optimizer.init(params), {"lr": 0.1, RNG: ft.random.key(0)}, donate=False
        )
        for group in update.groups:
            update.update(group, [torch.ones_like(tree.leaves(params)[place]) for place in group.indices])
        actual.append(update.finish())
    assert_equal(actual[0], actual[1])


def test_one_leaf_that_fused_kernels_do_not_take_decides_for_all():
    def params():
        return {"dense": torch.linspace(-1, 1, 99), "strided": torch.linspace(-1, 1, 64)[::2]}

    actual = []
    for apart in (False, True):
        optimizer, here = optim.adamw(0.1), params()
        state, grads = optimizer.init(here), tree.map(torch.sin, here)
        if apart:
            update = UpdateSplitter("test", optimizer, CUTS["leaf by leaf"]).begin(
                here, state, {"lr": 0.1}, donate=False
            )
            for group in update.groups:
                update.update(group, [tree.leaves(grads)[place] for place in group.indices])
            actual.append(update.finish())
        else:
            actual.append(optimizer.update(grads, state, here, {"lr": 0.1}))
    assert_equal(actual[0], actual[1])


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "nested", "lookahead"])
def test_plans_are_made_once(name, monkeypatch):
    made = []
    make_plan = optim.grouping.Planner.plan
    monkeypatch.setattr(optim.grouping.Planner, "plan", lambda *args: made.append(1) or make_plan(*args))
    run(make(name), "leaf by leaf", torch.float32, donate=True, steps=1)
    once = len(made)
    made.clear()
    run(make(name), "leaf by leaf", torch.float32, donate=True, steps=4)
    assert len(made) == once


def test_names_and_masks_are_those_of_the_whole_tree():
    seen = set()

    def mask(name, leaf):
        seen.add(name)
        return name == "blocks.0.weight"

    params = {"blocks": [{"weight": torch.ones(2), "bias": torch.ones(2)}], "w": torch.ones(2)}
    optimizer = optim.sgd(1.0, weight_decay=0.5, decay_mask=mask)
    update = UpdateSplitter("test", optimizer, CUTS["leaf by leaf"]).begin(
        params, optimizer.init(params), {"lr": 1.0}, donate=False
    )
    for group in update.groups:
        update.update(group, [torch.zeros(2)])
    new, _ = update.finish()
    assert seen == {"blocks.0.bias", "blocks.0.weight", "w"}
    assert new["blocks"][0]["weight"].tolist() == [0.5, 0.5]
    assert new["w"].tolist() == [1.0, 1.0]


def own():
    return Optimizer(
        lambda params: (), lambda grads, state, params, hyper, donate=False: (params, state), {}, "homemade"
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        own(),
        optim.lookahead(own()),
        optim.chain(optim.sign(), own()),
        optim.adjustable(own()),
        optim.partition({"a": own(), "b": optim.sgd(0.1)}, {"a": ["w"]}),
    ],
    ids=["alone", "lookahead", "chain", "adjustable", "partition"],
)
def test_an_optimizer_that_cannot_be_taken_apart(optimizer):
    assert optimizer.split is None
    with pytest.raises(ComposeError, match=r"test: .*homemade.* cannot update some parameters without the others"):
        require_splittable("test", optimizer)


def test_two_leaves_of_the_state_of_one_name():
    """Labels and parameters are written with dots between them."""
    params = {"momentum.x": torch.ones(1), "x": torch.ones(1)}
    optimizer = optim.partition(
        {"a": optim.sgd(0.1, momentum=0.9), "a.momentum": optim.sgd(0.1, momentum=0.9)},
        {"a": ["momentum.x"], "a.momentum": ["x"]},
    )
    with pytest.raises(
        ComposeError, match=r"test: two leaves of the optimizer's state are called a\.momentum\.momentum\.x; rename one"
    ):
        UpdateSplitter("test", optimizer, CUTS["leaf by leaf"]).begin(params, optimizer.init(params), {}, donate=False)


def test_a_split_that_names_leaves_in_its_own_way():
    def other(params, parts):
        return [dataclasses.replace(optim.adamw(0.1), init=lambda params: {"own": torch.zeros(1)}) for _ in parts]

    params = {"w": torch.ones(1)}
    optimizer = dataclasses.replace(optim.adamw(0.1), split=other)
    with pytest.raises(ComposeError, match=r"test: the state of adamw.* for w has the leaf own, which the state of"):
        UpdateSplitter("test", optimizer, CUTS["leaf by leaf"]).begin(params, optimizer.init(params), {}, donate=False)


def test_two_parameters_of_one_name():
    params = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}
    optimizer = optim.adamw(0.1)
    with pytest.raises(ComposeError, match=r"test: two parameters are called a\.b; rename one"):
        UpdateSplitter("test", optimizer, CUTS["leaf by leaf"]).begin(
            params, optimizer.init(params), {"lr": 0.1}, donate=False
        )


@pytest.mark.parametrize("name", ["adamw", "nested", "lookahead"])
def test_a_part_is_not_split_again(name):
    """Its random numbers and kernels are those of the whole tree, which it does not know."""
    optimizer = make(name)
    params = {"a": torch.ones(2, 2), "b": torch.ones(2)}
    assert [each.split for each in optimizer.split(params, [[0], [1]])] == [None, None]
