"""The records of `ftrain.types`: Mean, TrainState and Gradients."""

import copy
import dataclasses
import functools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ftrain as ft
from ftrain import tree
from ftrain.errors import ConsumedError, LossError
from ftrain.types import Gradients, Mean, TrainState, consume
from tests.bits import assert_same_bits

FIELDS = ["step", "params", "frozen", "buffers", "opt_state", "slots", "rng"]


def mean(total, weight, *, plain=False, dtype=torch.float64):
    return Mean(torch.tensor(total, dtype=dtype), torch.tensor(weight, dtype=dtype), plain)


# Mean


pairs = st.tuples(st.integers(-1000, 1000), st.integers(1, 1000))


@given(st.lists(pairs, min_size=1, max_size=6), st.data())
def test_means_add_up_to_the_mean_of_all(parts, data):
    """The numbers are integers, so that a sum is exact in any order."""
    means = [mean(float(total), float(weight)) for total, weight in parts]
    for order in (means, data.draw(st.permutations(means))):
        whole = functools.reduce(Mean.pooled, order)
        assert float(whole.total) == sum(total for total, _ in parts)
        assert float(whole.weight) == sum(weight for _, weight in parts)
        assert float(whole) == sum(total for total, _ in parts) / sum(weight for _, weight in parts)


@pytest.mark.parametrize("total", [0.0, -0.0])
def test_a_mean_without_weight_has_the_value_nan(total):
    assert math.isnan(float(mean(total, 0.0)))
    assert math.isnan(mean(total, 0.0).value)


@pytest.mark.parametrize(
    "compute",
    [
        lambda first, second: first + second,
        lambda first, second: sum([first, second]),
        lambda first, second: first - second,
        lambda first, second: 0.5 * first,
        lambda first, second: first / 2,
        lambda first, second: torch.tensor(1.0) + first,
    ],
    ids=["add", "sum", "subtract", "multiply", "divide", "add to a tensor"],
)
def test_arithmetic_with_means_is_an_error_that_says_what_to_write(compute):
    with pytest.raises(LossError, match=r"a\.value \+ c \* b\.value.*a\.pooled\(b\)"):
        compute(mean(6.0, 3.0), mean(2.0, 1.0))


def test_pooling_with_a_mean_without_weight_changes_nothing():
    assert float(mean(6.0, 3.0).pooled(mean(0.0, 0.0))) == 2.0


@pytest.mark.parametrize("weight", [torch.tensor(4), torch.tensor(4.0), torch.tensor(4, dtype=torch.int32)], ids=str)
def test_value_has_the_dtype_of_the_total(weight):
    value = Mean(torch.tensor(2.0, dtype=torch.float64), weight).value
    assert (value.shape, value.dtype, float(value)) == ((), torch.float64, 0.5)


def test_value_is_differentiable_in_the_total():
    total = torch.tensor(3.0, requires_grad=True)
    (grad,) = torch.autograd.grad(Mean(total, torch.tensor(4.0)).value, total)
    assert float(grad) == 0.25


def test_a_mean_converts_to_a_float_and_formats_as_one():
    third = mean(1.0, 3.0)
    assert float(third) == 1 / 3
    assert f"{third:.3f}" == "0.333"
    assert f"{third:.2e}|{third:>8.1f}|{third}" == "3.33e-01|     0.3|" + str(1 / 3)
    assert format(mean(0.0, 0.0), ".1f") == "nan"


@pytest.mark.parametrize(("is_first_plain", "is_second_plain"), [(True, True), (True, False), (False, True)])
def test_a_pooled_mean_is_plain_if_both_means_are(is_first_plain, is_second_plain):
    whole = mean(1.0, 1.0, plain=is_first_plain).pooled(mean(1.0, 1.0, plain=is_second_plain))
    assert whole.plain == (is_first_plain and is_second_plain)


def test_mean_is_a_tree_of_total_and_weight():
    leaves, spec = tree.flatten(mean(1.0, 2.0, plain=True))
    assert [float(leaf) for leaf in leaves] == [1.0, 2.0]
    back = tree.unflatten(spec, [10.0, 20.0])
    assert (back.total, back.weight, back.plain) == (10.0, 20.0, True)
    assert tree.flatten(mean(1.0, 2.0))[1] != spec
    assert tree.leaf_names({"m": mean(1.0, 2.0)}) == ["m.total", "m.weight"]


def test_records_are_frozen():
    for record, name in ((mean(1.0, 1.0), "total"), (make_state(), "params")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)


# TrainState


def make_step(*wrappers):
    optimizer = ft.optim.adamw(0.1)
    return ft.compose(ft.train_step(lambda p, b: (p["w"] * b).square().sum() + p["b"].sum(), optimizer), *wrappers)


PARAMS = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
BATCH = torch.tensor([0.5, -1.0])


def make_state(*wrappers):
    return make_step(*wrappers).init(PARAMS, seed=3, buffers={"seen": torch.tensor(0)})


def test_a_state_has_these_fields_of_which_the_step_and_the_key_are_int64():
    assert [field.name for field in dataclasses.fields(TrainState)] == FIELDS
    state = make_state()
    assert (state.step.dtype, state.step.shape) == (torch.int64, ())
    assert (state.rng.dtype, state.rng.shape) == (torch.int64, (2,))


def test_a_state_is_a_tree_of_its_fields():
    state = make_state(ft.ema(0.9))
    assert tree.leaf_names(state) == [
        "step",
        "params.b",
        "params.w",
        "buffers.seen",
        "opt_state.count",
        "opt_state.mu.b",
        "opt_state.mu.w",
        "opt_state.nu.b",
        "opt_state.nu.w",
        "slots.ema.b",
        "slots.ema.w",
        "rng",
    ]
    doubled = tree.map(lambda leaf: leaf * 2, state)
    assert isinstance(doubled, TrainState)
    assert torch.equal(doubled.params["w"], 2 * PARAMS["w"])


@pytest.mark.parametrize("name", ["paramz", "optimizer", "_hidden", "__setstate_", "shape"])
def test_unknown_names_are_attribute_errors(name):
    state = make_state()
    with pytest.raises(AttributeError, match=f"'TrainState' object has no attribute '{name}'"):
        getattr(state, name)
    assert not hasattr(state, name)
    assert getattr(state, name, 5) == 5
    consume(state)
    assert not hasattr(state, name)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "replace": dataclasses.replace,
    "clone": tree.clone,
    "map": lambda state: tree.map(lambda leaf: leaf, state),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_states_that_train_on(name):
    step = make_step(ft.ema(0.9))
    state, _ = step(make_state(ft.ema(0.9)), BATCH)
    copied = COPIES[name](state)
    assert isinstance(copied, TrainState)
    assert copied is not state
    assert_same_bits(copied, state)
    assert_same_bits(step(copied, BATCH)[0], step(state, BATCH)[0])


@pytest.mark.parametrize("name", ["copy", "deepcopy", "pickle", "clone"])
def test_copies_survive_donation(name):
    state = make_state()
    expected = tree.clone(state)
    copied = COPIES[name](state)
    make_step(ft.donated())(state, BATCH)
    assert_same_bits(copied, expected)
    with pytest.raises(ConsumedError):
        _ = state.params


def test_replace_keeps_the_other_fields_and_refuses_unknown_ones():
    state = make_state()
    changed = dataclasses.replace(state, params={"w": torch.zeros(2), "b": torch.zeros(1)}, slots={})
    assert float(changed.params["w"].sum()) == 0
    assert changed.opt_state is state.opt_state
    with pytest.raises(TypeError, match="unknown"):
        dataclasses.replace(state, unknown=1)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_consumed_state_is_an_error_that_says_what_to_do(name):
    state = make_state()
    consume(state)
    with pytest.raises(ConsumedError, match=rf"TrainState\.{name}: .*donated.*ft\.tree\.clone"):
        getattr(state, name)
    # Not an AttributeError, which hasattr and getattr with a default would swallow.
    with pytest.raises(ConsumedError):
        hasattr(state, name)
    with pytest.raises(ConsumedError):
        getattr(state, name, None)


USES = {
    "leaves": tree.leaves,
    "flatten": tree.flatten,
    "map": lambda state: tree.map(lambda leaf: leaf, state),
    "clone": tree.clone,
    "names": tree.leaf_names,
    "device": tree.device_of,
    "replace": lambda state: dataclasses.replace(state, step=torch.tensor(0)),
    "asdict": dataclasses.asdict,
    "step": lambda state: make_step()(state, BATCH),
    "donated": lambda state: make_step(ft.donated())(state, BATCH),
    "compiled": lambda state: make_step(ft.compiled(backend="eager"))(state, BATCH),
    "fit": lambda state: ft.fit(make_step(), state, [BATCH], progress=False),
    "evaluate": lambda state: ft.evaluate(ft.eval_step(lambda p, b: p["w"].sum()), state, [BATCH]),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_consumed_state_is_an_error(use):
    state = make_state()
    consume(state)
    with pytest.raises(ConsumedError):
        USES[use](state)


def test_a_state_prints_on_one_line_also_when_it_is_consumed():
    state = make_state()
    assert repr(state).startswith("TrainState(step=")
    assert "\n" not in repr(state)
    consume(state)
    assert repr(state) == "TrainState(consumed)"


def test_a_copy_of_a_consumed_state_is_consumed():
    state = make_state()
    consume(state)
    for name in ("copy", "deepcopy", "pickle"):
        with pytest.raises(ConsumedError):
            _ = COPIES[name](state).params


def test_states_compare_by_identity_and_hash():
    state = make_state()
    assert state == state
    assert state != copy.copy(state)
    assert len({state, state}) == 1


# The other records


def test_gradients_are_a_tree_of_their_fields():
    gradients = Gradients({"w": torch.ones(2)}, mean(1.0, 2.0), {"m": mean(3.0, 4.0)}, {"b": torch.ones(1)})
    names = ["grads.w", "loss.total", "loss.weight", "metrics.m.total", "metrics.m.weight", "buffers.b"]
    assert tree.leaf_names(gradients) == names
    assert tree.leaf_names(dataclasses.replace(gradients, finite=torch.tensor(True))) == [*names, "finite"]
    assert isinstance(tree.clone(gradients), Gradients)
