"""`reader`, `Flattener` and `tensor_guard` accept the trees and tensors that a full comparison accepts."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import _torch, tree
from ftrain.errors import ConsumedError
from ftrain.tree.fast_flatten import Flattener, reader
from ftrain.types import Mean, TrainState, consume
from tests.tree.strategies import Pair, assert_same_objects

TREES = st.recursive(
    st.integers(0, 9) | st.none(),
    lambda children: st.one_of(
        st.dictionaries(st.sampled_from("abcde"), children, max_size=4),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Pair, children, children),
        st.dictionaries(st.sampled_from("abc"), children, max_size=2).map(OrderedDict),
        st.builds(
            lambda params, opt_state: TrainState(None, params, opt_state, None, {}, {}, None), children, children
        ),
    ),
    max_leaves=12,
)


@given(TREES, TREES)
def test_a_reader_reads_the_leaves_of_its_structure_and_of_no_other(first, second):
    leaves, spec = tree.flatten(first)
    read = reader(spec)
    assert read(first) == leaves
    second_leaves, second_spec = tree.flatten(second)
    if second_spec == spec:
        assert read(second) == second_leaves
    else:
        # It may return a list with a node in the place of a leaf: the caller checks the types.
        assert read(second) is None or any(not isinstance(leaf, int) for leaf in read(second))


@given(st.lists(TREES, min_size=1, max_size=6), st.data())
def test_a_flattener_returns_what_flatten_returns_whatever_tree_came_before(nodes, data):
    flatten = Flattener()
    for node in nodes:
        # Only leaves that are tensors take the fast path.
        values = data.draw(st.sampled_from([node, tree.map(torch.tensor, node)]))
        expected_leaves, expected_spec = tree.flatten(values)
        leaves, spec = flatten(values)
        assert spec == expected_spec
        assert_same_objects(leaves, expected_leaves)


def test_a_flattener_notices_a_list_in_the_place_of_a_tensor():
    flatten = Flattener()
    flat, nested = {"a": torch.ones(1), "b": torch.ones(1)}, {"a": [torch.ones(1)], "b": torch.ones(1)}
    for values in (flat, flat, nested, flat):
        leaves, spec = flatten(values)
        assert (len(leaves), spec) == (2, tree.flatten(values)[1])


def test_a_reader_reads_a_dict_of_its_keys_in_any_order():
    read = reader(tree.flatten({"a": 1, "b": 2})[1])
    assert read({"b": 4, "a": 3}) == [3, 4]


@pytest.mark.parametrize(
    "values",
    [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 2}, [1, 2], OrderedDict(a=1, b=2)],
    ids=["missing key", "unexpected key", "another key", "list", "ordered dict"],
)
def test_a_reader_of_a_dict_reads_no_other_container(values):
    read = reader(tree.flatten({"a": 1, "b": 2})[1])
    assert read(values) is None


def test_a_reader_compares_the_static_values_of_a_node():
    weighted, plain = Mean(1, 2), Mean(1, 2, plain=True)
    read = reader(tree.flatten({"loss": weighted})[1])
    assert read({"loss": weighted}) == [1, 2]
    assert read({"loss": plain}) is None


def test_a_consumed_state_has_no_leaves_to_read():
    state = TrainState(None, {"w": torch.ones(1)}, None, None, {}, {}, None)
    read, flatten = reader(tree.flatten(state)[1]), Flattener()
    assert read(state) == flatten(state)[0] == [state.params["w"]]
    consume(state)
    assert read(state) is None
    with pytest.raises(ConsumedError):
        flatten(state)


DIFFERENT = {
    "shape": torch.zeros(3, 2),
    "dtype": torch.zeros(2, 3, dtype=torch.float64),
    "stride": torch.zeros(3, 2).T,
    "number of axes": torch.zeros(2, 3, 1),
    "device": torch.zeros(2, 3, device="meta"),
    "requires_grad": torch.zeros(2, 3, requires_grad=True),
    "number": 1.0,
    "dict": {"a": torch.zeros(2, 3)},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_guard_accepts_tensors_that_differ_in_values_and_nothing_else(name):
    accepts = _torch.tensor_guard((torch.zeros(2, 3), torch.zeros(())))
    assert accepts(torch.ones(2, 3), torch.ones(()))
    assert not accepts(DIFFERENT[name], torch.ones(()))
