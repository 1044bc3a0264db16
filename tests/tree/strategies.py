"""Strategies of Hypothesis that draw tensors and trees, and a comparison of trees."""

import math
from collections import namedtuple

import torch
from hypothesis import strategies as st

from ftrain import tree

F64 = torch.float64
FLOATS = [F64, torch.float32, torch.bfloat16, torch.float16]
Pair = namedtuple("Pair", "first second")

names = st.text("abcw_", min_size=1, max_size=3)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw, dtypes=(F64, torch.float32)):
    """Return a tensor of small integers."""
    shape = draw(shapes)
    values = draw(st.lists(st.integers(-8, 8), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=draw(st.sampled_from(dtypes))).reshape(shape)


def trees(leaves):
    """Return a strategy of nested dicts, lists, tuples and named tuples, also empty ones, and None."""
    return st.recursive(
        leaves | st.none(),
        lambda children: (
            st.dictionaries(names, children, max_size=3)
            | st.lists(children, max_size=3)
            | st.tuples(children, children)
            | st.builds(Pair, children, children)
        ),
        max_leaves=6,
    )


def assert_trees_equal(actual, expected):
    """Check that two trees have one structure and equal leaves, tensors also of one dtype."""
    leaves, spec = tree.flatten(actual)
    expected_leaves, expected_spec = tree.flatten(expected)
    assert spec == expected_spec
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        if torch.is_tensor(leaf):
            assert leaf.dtype == expected_leaf.dtype
            assert torch.equal(leaf, expected_leaf)
        else:
            assert leaf == expected_leaf


def assert_same_objects(actual, expected):
    """Check that two lists have the same objects, such as the leaves of two trees."""
    assert len(actual) == len(expected)
    assert all(a is b for a, b in zip(actual, expected, strict=True))
