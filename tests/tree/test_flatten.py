"""Flattening, the order and the names of leaves, maps, `split` and `overlay`."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain import tree
from ftrain.types import Mean
from tests.tree.strategies import Pair, assert_same_objects, assert_trees_equal, tensors, trees


@given(trees(tensors() | st.integers()))
def test_unflatten_inverts_flatten(values):
    leaves, spec = tree.flatten(values)
    rebuilt = tree.unflatten(spec, leaves)
    assert type(rebuilt) is type(values)
    assert tree.flatten(rebuilt)[1] == spec
    assert_same_objects(leaves, tree.leaves(values))
    assert_same_objects(tree.leaves(rebuilt), leaves)


@given(trees(st.integers()))
def test_leaf_names_are_unique_and_are_the_paths_to_their_leaves(values):
    names = tree.leaf_names(values)
    assert len(set(names)) == len(names)
    for name, leaf in zip(names, tree.leaves(values), strict=True):
        node = values
        for entry in name.split(".") if name else []:
            node = node[entry] if isinstance(node, dict) else node[int(entry)]
        assert node is leaf


def test_leaf_names_of_every_container():
    values = {"d": OrderedDict(b=1, a=2), "l": [3, (4,)], "n": Pair(5, None), "m": Mean(6, 7), 0: 8}
    assert dict(zip(tree.leaf_names(values), tree.leaves(values), strict=True)) == {
        "d.b": 1,
        "d.a": 2,
        "l.0": 3,
        "l.1.0": 4,
        "n.0": 5,
        "m.total": 6,
        "m.weight": 7,
        "0": 8,
    }
    assert tree.leaf_names(1) == [""]
    assert tree.leaf_names({}) == tree.leaf_names(None) == []


def test_leaves_of_a_dict_are_in_the_order_of_its_keys():
    assert tree.leaves({"b": 1, "a": 2}) == tree.leaves({"a": 2, "b": 1}) == [2, 1]


def test_map_pairs_the_leaves_of_two_dicts_by_their_keys():
    assert tree.map(lambda *leaves: leaves, {"b": 1, "a": 2}, {"a": 20, "b": 10}) == {"a": (2, 20), "b": (1, 10)}


def test_map_of_trees_of_different_structure_is_an_error():
    with pytest.raises(ValueError, match="key"):
        tree.map(lambda *leaves: leaves, {"a": 1}, {"b": 1})


def test_map_named_calls_its_function_with_the_name_and_the_leaf():
    assert tree.map_named(lambda name, leaf: f"{name}={leaf}", {"a": [1, 2]}) == {"a": ["a.0=1", "a.1=2"]}


@given(trees(tensors() | st.integers()), st.data())
def test_overlay_inverts_split(values, data):
    names = tree.leaf_names(values)
    chosen = set(data.draw(st.lists(st.sampled_from(names)))) if names else set()
    names_of_calls = []

    def keep(name, leaf):
        names_of_calls.append(name)
        return name in chosen

    kept, others = tree.split(values, keep)
    assert names_of_calls == names
    assert tree.leaf_names(kept) == [name for name in names if name in chosen]
    assert tree.leaf_names(others) == [name for name in names if name not in chosen]
    for whole in (tree.overlay(kept, others), tree.overlay(others, kept)):
        assert_trees_equal(whole, values)
        assert_same_objects(tree.leaves(whole), tree.leaves(values))


def test_overlay_prefers_the_leaves_of_the_first_tree():
    assert tree.overlay({"a": 1, "b": None}, {"a": 10, "b": 20}) == {"a": 1, "b": 20}
