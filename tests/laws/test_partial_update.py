"""An update group by group has the same bits as the update of all parameters, for any optimizer and grouping."""

import dataclasses
import itertools

import pytest
import torch

import ftrain as ft
from ftrain import optim, tree
from ftrain.errors import ComposeError
from ftrain.optim.partial_update import UpdateSplitter, by_size, require_splittable
from ftrain.types import RNG, Optimizer
from tests.bits import assert_same_bits
from tests.exhaustive import choose
from tests.laws.optimizer_steps import make, make_params
from tests.laws.optimizers import COMBINED, OPTIMIZERS

GROUPINGS = {
    "leaf by leaf": lambda leaves: [[index] for index in range(len(leaves))],
    "in halves": lambda leaves: [list(range(len(leaves)))[::2], list(range(len(leaves)))[1::2]],
    "backwards": lambda leaves: [[index] for index in reversed(range(len(leaves)))],
    "at once": lambda leaves: [list(range(len(leaves)))],
    "by size": lambda leaves: by_size(leaves, 64),
}
"""Name -> function of the leaves, which returns the indices of each group."""


def make_nested(dtype):
    """Return parameters in nested containers: leaves of odd sizes, two of one shape, and some larger than a block."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        **make_params(dtype),
        "blocks": [{"weight": draw(37, 5), "bias": draw(61)}, (draw(3, 33),)],
        "twins": [draw(20, 17), draw(20, 17)],
        "none": None,
    }


def splitter_of_leaves(optimizer):
    """Return the splitter of an update leaf by leaf."""
    return UpdateSplitter("test", optimizer, GROUPINGS["leaf by leaf"])


def update_in_groups(splitter, grads, params, opt_state, hyper, *, donate=False):
    """Return the parameters and the state of the optimizer after an update group by group."""
    update = splitter.begin(params, opt_state, hyper, donate=donate)
    leaves = tree.leaves(grads)
    for group in update.groups:
        update.update(group, [leaves[index] for index in group.indices])
    return update.finish()


def make_grads(params, step, dtype):
    generator = torch.Generator().manual_seed(step)
    return tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(dtype), params)


def run(optimizer, grouping, dtype, *, donate, steps=3):
    """Return the parameters and the state of the optimizer after some updates: of all at once if `grouping` is None."""
    params = make_nested(dtype)
    state = optimizer.init(params)
    splitter = None if grouping is None else UpdateSplitter("test", optimizer, GROUPINGS[grouping])
    for step in range(steps):
        grads = make_grads(params, step, dtype)
        hyper = {name: schedule(step) for name, schedule in optimizer.schedules.items()}
        hyper[RNG] = ft.random.key(step)
        if splitter is None:
            params, state = optimizer.update(grads, state, params, hyper, donate=donate)
            continue
        before = tree.clone((params, state))
        updated = update_in_groups(splitter, grads, params, state, hyper, donate=donate)
        if not donate:
            assert_same_bits((params, state), before)
        params, state = updated
    return params, state


# The two that differ most: one leaf at a time, and several at a time.
groupings = pytest.mark.parametrize("grouping", choose(GROUPINGS, ["backwards", "by size"]))


@pytest.mark.parametrize("name", OPTIMIZERS | COMBINED)
@groupings
def test_no_bit_changes(name, grouping):
    for dtype, donate in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        whole = run(make(name, weight_decay=0.1), None, dtype, donate=donate, steps=2)
        assert_same_bits(run(make(name, weight_decay=0.1), grouping, dtype, donate=donate, steps=2), whole)


@pytest.mark.parametrize("name", ["adamw_8bit", "stochastic", "nearest", "nested"])
@groupings
def test_no_bit_changes_where_leaves_are_larger_than_a_block(name, grouping, monkeypatch):
    monkeypatch.setattr("ftrain.optim.grouping.BLOCK", 16)
    for dtype in (torch.float32, torch.bfloat16):
        whole = run(make(name, weight_decay=0.1), None, dtype, donate=True)
        assert_same_bits(run(make(name, weight_decay=0.1), grouping, dtype, donate=True), whole)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "stochastic"])
def test_no_bit_changes_for_unusual_strides_of_an_axis_of_length_one(name):
    """The first convolution of a channels-last model with one channel has such strides, and is contiguous."""
    factories = {
        "adamw": optim.adamw,
        "adamw_8bit": optim.adamw_8bit,
        "stochastic": lambda lr: optim.adamw(lr, state_dtype="bf16"),
    }
    params = {"w": torch.linspace(-1, 1, 36).as_strided((4, 1, 3, 3), (9, 1, 3, 1)), "b": torch.ones(4)}
    grads = tree.map(torch.ones_like, params)
    updated = []
    for grouping in ("at once", "leaf by leaf"):
        optimizer = factories[name](0.1)
        splitter = UpdateSplitter("test", optimizer, GROUPINGS[grouping])
        hyper = {"lr": 0.1, RNG: ft.random.key(0)}
        updated.append(update_in_groups(splitter, grads, params, optimizer.init(params), hyper))
    assert_same_bits(updated[0], updated[1])


def test_no_group_uses_a_fused_kernel_if_one_parameter_of_the_tree_cannot():
    params = {"dense": torch.linspace(-1, 1, 99), "strided": torch.linspace(-1, 1, 64)[::2]}
    grads = tree.map(torch.sin, params)
    optimizer = optim.adamw(0.1)
    state, hyper = optimizer.init(params), {"lr": 0.1}
    whole = optimizer.update(grads, state, params, hyper)
    splitter = splitter_of_leaves(optimizer)
    assert_same_bits(update_in_groups(splitter, grads, params, state, hyper), whole)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "nested", "lookahead"])
def test_plans_are_made_in_the_first_update_alone(name, monkeypatch):
    plans = []
    make_plan = optim.grouping.Planner.plan

    def plan(*args):
        plans.append(make_plan(*args))
        return plans[-1]

    monkeypatch.setattr(optim.grouping.Planner, "plan", plan)
    run(make(name), "leaf by leaf", torch.float32, donate=True, steps=1)
    plans_of_one_step = len(plans)
    plans.clear()
    run(make(name), "leaf by leaf", torch.float32, donate=True, steps=4)
    assert len(plans) == plans_of_one_step


def test_a_decay_mask_gets_the_names_in_the_whole_tree():
    names = set()

    def mask(name, leaf):
        names.add(name)
        return name == "blocks.0.weight"

    params = {"blocks": [{"weight": torch.ones(2), "bias": torch.ones(2)}], "w": torch.ones(2)}
    optimizer = optim.sgd(1.0, weight_decay=0.5, decay_mask=mask)
    splitter = splitter_of_leaves(optimizer)
    grads = tree.map(torch.zeros_like, params)
    new, _ = update_in_groups(splitter, grads, params, optimizer.init(params), {"lr": 1.0})
    assert names == {"blocks.0.bias", "blocks.0.weight", "w"}
    assert new["blocks"][0]["weight"].tolist() == [0.5, 0.5]
    assert new["w"].tolist() == [1.0, 1.0]


def homemade():
    """Return an optimizer without `split`, which changes nothing."""
    return Optimizer(
        lambda params: (), lambda grads, state, params, hyper, donate=False: (params, state), {}, "homemade"
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        homemade(),
        optim.lookahead(homemade()),
        optim.chain(optim.sign(), homemade()),
        optim.adjustable(homemade()),
        optim.partition({"a": homemade(), "b": optim.sgd(0.1)}, {"a": ["w"]}),
    ],
    ids=["alone", "lookahead", "chain", "adjustable", "partition"],
)
def test_an_optimizer_that_cannot_be_split_is_refused(optimizer):
    assert optimizer.split is None
    with pytest.raises(ComposeError, match=r"test: .*homemade.* cannot update some parameters without the others"):
        require_splittable("test", optimizer)


def test_two_leaves_of_the_state_with_one_name_are_refused():
    """The label "a" with the moment of "momentum.x" reads like the label "a.momentum" with the moment of "x"."""
    params = {"momentum.x": torch.ones(1), "x": torch.ones(1)}
    optimizer = optim.partition(
        {"a": optim.sgd(0.1, momentum=0.9), "a.momentum": optim.sgd(0.1, momentum=0.9)},
        {"a": ["momentum.x"], "a.momentum": ["x"]},
    )
    with pytest.raises(
        ComposeError, match=r"test: two leaves of the optimizer's state are called a\.momentum\.momentum\.x; rename one"
    ):
        splitter_of_leaves(optimizer).begin(params, optimizer.init(params), {}, donate=False)


def test_a_split_whose_states_have_other_names_is_refused():
    def split(params, groups):
        return [dataclasses.replace(optim.adamw(0.1), init=lambda params: {"own": torch.zeros(1)}) for _ in groups]

    params = {"w": torch.ones(1)}
    optimizer = dataclasses.replace(optim.adamw(0.1), split=split)
    with pytest.raises(ComposeError, match=r"test: the state of adamw.* for w has the leaf own, which the state of"):
        splitter_of_leaves(optimizer).begin(params, optimizer.init(params), {}, donate=False)


def test_two_parameters_with_one_name_are_refused():
    params = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}
    optimizer = optim.adamw(0.1)
    with pytest.raises(ComposeError, match=r"test: two parameters are called a\.b; rename one"):
        splitter_of_leaves(optimizer).begin(params, optimizer.init(params), {"lr": 0.1}, donate=False)


@pytest.mark.parametrize("name", ["adamw", "nested", "lookahead"])
def test_the_optimizer_of_a_group_cannot_be_split_again(name):
    """Its random numbers and kernels depend on the whole tree, which it does not know."""
    optimizer = make(name)
    params = {"a": torch.ones(2, 2), "b": torch.ones(2)}
    assert [part.split for part in optimizer.split(params, [[0], [1]])] == [None, None]
