"""Operations on each leaf: `where`, `scale`, `add`, `cast` and `clone`."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftrain import tree
from ftrain.errors import StructureError
from tests.tree.strategies import F64, FLOATS, assert_same_objects, assert_trees_equal, tensors, trees


@given(trees(tensors()))
def test_where_chooses_a_whole_tree(values):
    other = tree.map(lambda leaf: leaf + 1, values)
    assert_trees_equal(tree.where(torch.tensor(True), values, other), values)
    assert_trees_equal(tree.where(torch.tensor(False), values, other), other)


def test_where_ignores_nan_and_infinity_of_the_other_tree():
    bad, good = {"a": torch.tensor([math.nan, math.inf])}, {"a": torch.tensor([1.0, 2.0])}
    assert_trees_equal(tree.where(torch.tensor(False), bad, good), good)
    assert_trees_equal(tree.where(torch.tensor(True), good, bad), good)


def test_where_returns_a_leaf_that_both_trees_share():
    leaf = torch.ones(2)
    assert tree.where(torch.tensor(True), {"a": leaf, "n": 3}, {"a": leaf, "n": 3})["a"] is leaf


NUMBERS = st.sampled_from([2.0, -0.5, 0.0])
FACTORS = NUMBERS | st.builds(torch.tensor, NUMBERS, dtype=st.sampled_from(FLOATS))


@given(trees(tensors()), FACTORS)
def test_scale_multiplies_each_leaf_and_keeps_its_dtype(values, factor):
    before = tree.clone(values)
    assert_trees_equal(tree.scale(values, factor), tree.map(lambda leaf: leaf * float(factor), values))
    assert_trees_equal(values, before)


@given(trees(tensors()), FACTORS)
def test_scale_leaves_in_place_writes_what_scale_returns(values, factor):
    leaves = tree.leaves(tree.clone(values))
    assert_same_objects(tree.scale_leaves_(leaves, factor), leaves)
    assert_trees_equal(leaves, tree.leaves(tree.scale(values, factor)))


def test_scale_by_a_wide_tensor_does_not_widen():
    values = {str(dtype): torch.ones(2, dtype=dtype) for dtype in FLOATS}
    scaled = tree.scale(values, torch.tensor(3.0, dtype=F64))
    assert {name: leaf.dtype for name, leaf in scaled.items()} == {str(dtype): dtype for dtype in FLOATS}
    assert all((leaf == 3).all() for leaf in scaled.values())


@given(trees(tensors(dtypes=(F64,))))
def test_add_adds_the_leaves_of_two_trees(values):
    larger = tree.map(lambda leaf: leaf + 1, values)
    assert_trees_equal(tree.add(values, larger), tree.map(lambda leaf: 2 * leaf + 1, values))


@pytest.mark.parametrize("other", [{"a": torch.ones(1), "c": torch.ones(1)}, {"a": torch.ones(1)}, [torch.ones(1)] * 2])
def test_add_refuses_trees_of_different_structures(other):
    with pytest.raises(StructureError, match=r"^add: the trees have the structures .*'b'.* and .* of one structure"):
        tree.add({"a": torch.ones(1), "b": torch.ones(1)}, other)


@pytest.mark.parametrize("factor", [2.5, torch.tensor(2.5)])
def test_scale_keeps_the_dtypes_of_integers_bools_and_complex_numbers(factor):
    values = {"n": torch.tensor([3]), "b": torch.tensor([True]), "z": torch.tensor([2.0 + 4.0j]), "x": torch.ones(1)}
    scaled = tree.scale(values, factor)
    expected = {"n": torch.tensor([7]), "b": torch.tensor([True]), "z": torch.tensor([5.0 + 10.0j])}
    assert_trees_equal(scaled, {**expected, "x": torch.tensor([2.5])})


def test_add_and_scale_of_trees_without_leaves():
    assert tree.add({}, {}) == tree.scale({}, 2.0) == {}
    assert tree.scale_leaves([], torch.tensor(2.0)) == []


@pytest.mark.parametrize("dtype", FLOATS)
def test_cast_converts_floats_only(dtype):
    values = {
        "x": torch.ones(2),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "n": torch.arange(2),
        "b": True,
        "s": "text",
    }
    converted = tree.cast(values, dtype)
    assert (converted["x"].dtype, converted["half"].dtype) == (dtype, dtype)
    assert converted["n"] is values["n"]
    assert (converted["b"], converted["s"]) == (True, "text")


@given(trees(tensors() | st.integers()))
def test_a_clone_has_equal_leaves_in_other_memory(values):
    copied = tree.clone(values)
    assert_trees_equal(copied, values)
    for copy, original in zip(tree.leaves(copied), tree.leaves(values), strict=True):
        if torch.is_tensor(copy):
            assert copy is not original
            assert copy.numel() == 0 or address(copy) != address(original)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_leaves_that_share_memory_are_separate_in_a_clone():
    base = torch.ones(4)
    copied = tree.clone({"a": base, "b": base, "view": base[:2]})
    assert len({address(leaf) for leaf in copied.values()}) == 3


def test_a_clone_has_memory_for_each_element_in_the_layout_of_the_original():
    copied = tree.clone({"expanded": torch.ones(1).expand(3), "transposed": torch.ones(2, 3).t()})
    copied["expanded"][0] = 5
    assert copied["expanded"].tolist() == [5, 1, 1]
    assert copied["transposed"].stride() == (1, 3)


def test_a_clone_has_plain_tensors_without_a_gradient():
    copied = tree.clone({"tensor": torch.ones(1, requires_grad=True), "parameter": torch.nn.Parameter(torch.ones(1))})
    assert not any(leaf.requires_grad for leaf in copied.values())
    assert type(copied["parameter"]) is torch.Tensor
