"""`signature`, which describes the leaves of a tree, and `require_same`, which compares two trees."""

import pytest
import torch

from ftrain import tree
from ftrain.errors import StructureError


def test_signature_describes_every_leaf():
    values = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "n": [torch.tensor(1), "text", 2.0]}
    assert tree.signature(values) == {"w": "bfloat16[2, 3]", "n.0": "int64[]", "n.1": "str", "n.2": "float"}


def test_trees_that_differ_only_in_values_are_accepted():
    values = {"a": torch.ones(2), "b": [1, None]}
    tree.require_same("f", "x", values, tree.map(lambda leaf: leaf * 2, values))


def test_an_error_lists_every_difference():
    expected = {"same": torch.ones(1), "shape": torch.ones(2), "dtype": torch.ones(2), "gone": torch.ones(3)}
    actual = {
        "same": torch.ones(1),
        "shape": torch.ones(3),
        "dtype": torch.ones(2).double(),
        "more": {"x": torch.ones(4)},
    }
    with pytest.raises(StructureError) as error:
        tree.require_same("Step", "the state", actual, expected)
    first, *lines = str(error.value).split("\n")
    assert first.startswith("Step: the state ")
    assert {line.strip() for line in lines} == {
        "gone: missing, needs float32[3]",
        "more.x: unexpected float32[4]",
        "shape: found float32[3], needs float32[2]",
        "dtype: found float64[2], needs float32[2]",
    }


@pytest.mark.parametrize("count", [tree.MAX_LISTED, tree.MAX_LISTED + 1, 100])
def test_a_long_error_says_how_many_leaves_it_does_not_list(count):
    with pytest.raises(StructureError) as error:
        tree.require_same("Step", "the state", {}, {f"w{i}": torch.ones(1) for i in range(count)})
    lines = str(error.value).split("\n")[1:]
    assert sum("missing" in line for line in lines) == min(count, tree.MAX_LISTED)
    assert (f"  and {count - tree.MAX_LISTED} more" in lines) == (count > tree.MAX_LISTED)


def test_two_leaves_with_the_same_name_are_different_leaves():
    dotted, nested = {"a.b": torch.ones(2)}, {"a": {"b": torch.ones(3)}}
    assert tree.leaf_names(dotted) == tree.leaf_names(nested) == ["a.b"]
    with pytest.raises(StructureError, match=r"a\.b: unexpected float32\[3\]"):
        tree.require_same("Step", "the state", {**dotted, **nested}, dotted)
