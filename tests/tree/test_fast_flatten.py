"""Guards and readers: what the cheap look accepts must be what the thorough one does."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import _torch, tree
from ftrain.errors import ConsumedError
from ftrain.tree.fast_flatten import Flattener, reader
from ftrain.types import Mean, TrainState, consume

Pair = namedtuple("Pair", "a b")

LEAVES = st.integers(0, 9)
TREES = st.recursive(
    LEAVES | st.none(),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abcde"), inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: TrainState(None, *pair, None, {}, {}, None)),
    ),
    max_leaves=12,
)


@given(TREES, TREES)
def test_a_reader_reads_the_leaves_of_its_structure_and_of_no_other(first, second):
    leaves, spec = tree.flatten(first)
    read = reader(spec)
    assert read(first) == leaves
    actual, other = tree.flatten(second)
    if other == spec:
        assert read(second) == actual
    else:
        # What stands in the place of a leaf is for the caller to look at.
        assert read(second) is None or any(not isinstance(leaf, int) for leaf in read(second))


@given(st.lists(TREES, min_size=1, max_size=6), st.data())
def test_a_flattener_flattens(nodes, data):
    """It returns what `tree.flatten` returns, with and without tensors, whatever structure the last tree had."""
    flatten = Flattener()
    for node in nodes:
        values = data.draw(st.sampled_from([node, tree.map(torch.tensor, node)]))
        expected_leaves, expected_spec = tree.flatten(values)
        leaves, spec = flatten(values)
        assert spec == expected_spec
        assert len(leaves) == len(expected_leaves)
        assert all(a is b for a, b in zip(leaves, expected_leaves, strict=True))


def test_a_flattener_sees_a_tree_in_the_place_of_a_leaf():
    flatten = Flattener()
    one, two = {"a": torch.ones(1), "b": torch.ones(1)}, {"a": [torch.ones(1)], "b": torch.ones(1)}
    for each in (one, one, two, one):
        leaves, spec = flatten(each)
        assert (len(leaves), spec) == (2, tree.flatten(each)[1])


def test_a_reader_sees_more_and_fewer_keys():
    read = reader(tree.flatten({"a": 1, "b": 2})[1])
    assert read({"b": 4, "a": 3}) == [3, 4]
    for other in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 2}, [1, 2], OrderedDict(a=1, b=2)):
        assert read(other) is None


def test_a_reader_sees_what_is_not_a_leaf():
    whole, plain = Mean(1, 2), Mean(1, 2, plain=True)
    read = reader(tree.flatten({"loss": whole})[1])
    assert read({"loss": whole}) == [1, 2]
    assert read({"loss": plain}) is None


def test_a_consumed_state_is_refused():
    state = TrainState(None, {"w": torch.ones(1)}, None, None, {}, {}, None)
    read, flatten = reader(tree.flatten(state)[1]), Flattener()
    assert read(state) == flatten(state)[0] == [state.params["w"]]
    consume(state)
    assert read(state) is None
    with pytest.raises(ConsumedError):
        flatten(state)


LIKE = torch.zeros(2, 3), torch.zeros(())
UNLIKE = {
    "shape": torch.zeros(3, 2),
    "dtype": torch.zeros(2, 3, dtype=torch.float64),
    "stride": torch.zeros(3, 2).T,
    "axes": torch.zeros(2, 3, 1),
    "device": torch.zeros(2, 3, device="meta"),
    "gradient": torch.zeros(2, 3, requires_grad=True),
    "no tensor": 1.0,
    "no leaf": {"a": torch.zeros(2, 3)},
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_guard_sees_another(name):
    is_like = _torch.tensor_guard(LIKE)
    assert is_like(torch.ones(2, 3), torch.ones(()))
    assert not is_like(UNLIKE[name], torch.ones(()))
