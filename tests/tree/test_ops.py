"""Trees: flattening, names of leaves, maps, norms, and the errors for trees of different structures."""

import math
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ftrain import tree
from ftrain.errors import StructureError
from ftrain.types import Mean

F64 = torch.float64
FLOATS = [F64, torch.float32, torch.bfloat16, torch.float16]
Pair = namedtuple("Pair", "first second")

names = st.text("abcw_", min_size=1, max_size=3)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensors(draw, dtypes=(F64, torch.float32)):
    shape = draw(shapes)
    values = draw(st.lists(st.integers(-8, 8), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=draw(st.sampled_from(dtypes))).reshape(shape)


def trees(leaves):
    """Nestings of every container that people use, with empty ones and None."""
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


def same(one, other):
    """Equal structure and equal leaves: tensors by dtype and value, others by identity or value."""
    (ours, spec), (theirs, expected) = tree.flatten(one), tree.flatten(other)
    return spec == expected and all(
        a.dtype == b.dtype and torch.equal(a, b) if torch.is_tensor(a) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )


# Structure


@given(trees(tensors() | st.integers()))
def test_unflatten_inverts_flatten(values):
    leaves, spec = tree.flatten(values)
    rebuilt = tree.unflatten(spec, leaves)
    again, spec_again = tree.flatten(rebuilt)
    assert spec == spec_again
    assert type(rebuilt) is type(values)
    assert all(a is b for a, b in zip(leaves, again, strict=True))
    assert all(a is b for a, b in zip(leaves, tree.leaves(values), strict=True))


@given(trees(st.integers()))
def test_leaf_names_are_unique_and_find_their_leaf(values):
    actual = tree.leaf_names(values)
    assert len(actual) == len(set(actual)) == len(tree.leaves(values))
    for name, leaf in zip(actual, tree.leaves(values), strict=True):
        place = values
        for part in name.split(".") if name else []:
            place = place[part] if isinstance(place, dict) else place[int(part)]
        assert place is leaf


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


def test_dicts_are_taken_in_the_order_of_their_keys():
    assert tree.leaves({"b": 1, "a": 2}) == [2, 1] == tree.leaves({"a": 2, "b": 1})
    assert tree.map(lambda a, b: (a, b), {"b": 1, "a": 2}, {"a": 20, "b": 10}) == {"a": (2, 20), "b": (1, 10)}


def test_map_of_trees_that_differ_is_an_error():
    with pytest.raises(ValueError, match="key"):
        tree.map(lambda a, b: a, {"a": 1}, {"b": 1})


def test_map_named():
    assert tree.map_named(lambda name, leaf: f"{name}={leaf}", {"a": [1, 2]}) == {"a": ["a.0=1", "a.1=2"]}


@given(trees(tensors() | st.integers()), st.data())
def test_overlay_inverts_split(values, data):
    actual = tree.leaf_names(values)
    chosen = set(data.draw(st.lists(st.sampled_from(actual)))) if actual else set()
    asked = []

    def keep(name, leaf):
        asked.append(name)
        return name in chosen

    kept, others = tree.split(values, keep)
    assert asked == actual
    assert tree.leaf_names(kept) == [name for name in actual if name in chosen]
    assert tree.leaf_names(others) == [name for name in actual if name not in chosen]
    for whole in (tree.overlay(kept, others), tree.overlay(others, kept)):
        assert same(whole, values)
        assert all(a is b for a, b in zip(tree.leaves(whole), tree.leaves(values), strict=True))


def test_overlay_prefers_the_first():
    assert tree.overlay({"a": 1, "b": None}, {"a": 10, "b": 20}) == {"a": 1, "b": 20}


# Leaf by leaf


@given(trees(tensors()))
def test_where_chooses_a_whole_tree(values):
    other = tree.map(lambda leaf: leaf + 1, values)
    assert same(tree.where(torch.tensor(True), values, other), values)
    assert same(tree.where(torch.tensor(False), values, other), other)


def test_where_ignores_nan_and_infinity_of_the_other_tree():
    bad, good = {"a": torch.tensor([math.nan, math.inf])}, {"a": torch.tensor([1.0, 2.0])}
    assert same(tree.where(torch.tensor(False), bad, good), good)


def test_where_returns_leaves_that_are_the_same_object_as_they_are():
    leaf = torch.ones(2)
    assert tree.where(torch.tensor(True), {"a": leaf, "n": 3}, {"a": leaf, "n": 3})["a"] is leaf


def scaling(factor, dtype):
    return factor if dtype is None else torch.tensor(factor, dtype=dtype)


@given(trees(tensors()), st.sampled_from([2.0, -0.5, 0.0]), st.sampled_from([None, *FLOATS]))
def test_scale_keeps_dtypes(values, factor, dtype):
    before = tree.clone(values)
    scaled = tree.scale(values, scaling(factor, dtype))
    assert same(scaled, tree.map(lambda leaf: leaf * factor, values))
    assert same(values, before)
    written = tree.leaves(tree.clone(values))
    assert all(a is b for a, b in zip(tree.scale_leaves_(written, scaling(factor, dtype)), written, strict=True))
    assert same(written, tree.leaves(scaled))


def test_scale_by_a_wide_tensor_does_not_widen():
    values = {str(dtype): torch.ones(2, dtype=dtype) for dtype in FLOATS}
    scaled = tree.scale(values, torch.tensor(3.0, dtype=F64))
    assert {name: leaf.dtype for name, leaf in scaled.items()} == {str(dtype): dtype for dtype in FLOATS}
    assert all((leaf == 3).all() for leaf in scaled.values())


@given(trees(tensors(dtypes=(F64,))))
def test_add(values):
    assert same(tree.add(values, values), tree.scale(values, 2.0))


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
    actual = tree.cast(values, dtype)
    assert (actual["x"].dtype, actual["half"].dtype) == (dtype, dtype)
    assert actual["n"] is values["n"]
    assert (actual["b"], actual["s"]) == (True, "text")


@given(trees(tensors() | st.integers()))
def test_clone_equals_and_shares_nothing(values):
    copied = tree.clone(values)
    assert same(copied, values)
    for one, other in zip(tree.leaves(copied), tree.leaves(values), strict=True):
        if torch.is_tensor(one):
            assert one is not other
            assert one.numel() == 0 or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_clone_separates_and_detaches():
    base = torch.ones(4, requires_grad=True)
    actual = tree.clone(
        {"a": base, "b": base, "view": base[:2], "wide": torch.ones(1).expand(3), "t": torch.ones(2, 3).t()}
    )
    storages = {leaf.untyped_storage().data_ptr() for leaf in actual.values()}
    assert len(storages) == 5
    assert not any(leaf.requires_grad for leaf in actual.values())
    assert type(tree.clone(torch.nn.Parameter(torch.ones(1)))) is torch.Tensor
    # Memory of its own for each element, in the layout of the original.
    actual["wide"][0] = 5
    assert actual["wide"].tolist() == [5, 1, 1]
    assert actual["t"].stride() == (1, 3)


# Norms


@given(trees(tensors()))
def test_global_norm_equals_torch(values):
    actual, leaves = tree.global_norm(values), tree.leaves(values)
    exact = math.sqrt(sum(float(leaf.double().square().sum()) for leaf in leaves))
    assert actual.shape == ()
    assert float(actual) == pytest.approx(exact, rel=1e-6)
    assume(leaves)
    torch.testing.assert_close(actual.double(), torch.nn.utils.get_total_norm(leaves).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_global_norm_is_bitwise_torchs(dtype):
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=draw, dtype=dtype) for shape in [(), (7,), (5, 9), (0, 3), (2, 3, 4)]]
    leaves += [
        torch.randn(6, 4, generator=draw, dtype=dtype).t(),
        torch.randn((), generator=draw, dtype=dtype).expand(9),
    ]
    assert torch.equal(tree.global_norm(leaves), torch.nn.utils.get_total_norm(leaves))


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([3e150, 4e150], F64, 5e150),
        ([3e18, 4e18], torch.float32, 5e18),
        ([3e-160, 4e-160], F64, 5e-160),
        # As torch does, and clipping to a multiple of 0 with it.
        ([1e200, 1e200], F64, math.inf),
        ([1e30, 1e30], torch.float32, math.inf),
    ],
)
def test_global_norm_of_huge_and_tiny_values(values, dtype, expected):
    leaves = [torch.tensor([value], dtype=dtype) for value in values]
    actual = tree.global_norm(leaves)
    assert float(actual) == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-3)
    assert torch.equal(actual, torch.nn.utils.get_total_norm(leaves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_global_norm_sums_half_precision_in_float32(dtype):
    # 300 ** 2 is beyond float16, and 257 ones are beyond bfloat16's digits.
    actual = tree.global_norm({"big": torch.full((4,), 300.0, dtype=dtype), "ones": torch.ones(257, dtype=dtype)})
    assert actual.dtype == torch.float32
    assert float(actual) == pytest.approx(math.sqrt(4 * float(torch.tensor(300.0, dtype=dtype)) ** 2 + 257), rel=1e-6)


def test_global_norm_of_several_dtypes_is_taken_in_the_widest():
    actual = tree.global_norm([torch.tensor(3.0, dtype=torch.float16), torch.tensor(4e100, dtype=F64)])
    assert actual.dtype == F64
    assert float(actual) == pytest.approx(4e100, rel=1e-12)


@pytest.mark.parametrize("empty", [{}, None, [], {"a": torch.zeros(0)}, [torch.zeros(0, 3), torch.zeros(3, 0)]])
def test_norms_of_trees_without_elements(empty):
    assert torch.equal(tree.global_norm(empty), torch.tensor(0.0))
    assert torch.equal(tree.all_finite(empty), torch.tensor(True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_global_norm_of_values_that_are_not_finite(bad):
    actual = float(tree.global_norm([torch.ones(3), torch.tensor([1.0, bad])]))
    assert math.isnan(actual) if math.isnan(bad) else actual == math.inf


HUGE = {F64: 1.7e308, torch.float32: 3.4e38, torch.bfloat16: 3.3e38, torch.float16: 65504.0}


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_finite_of_huge_values(dtype):
    leaves = [torch.full((1000,), sign * HUGE[dtype], dtype=dtype) for sign in (1, -1)]
    assert torch.isfinite(leaves[0]).all()
    assert torch.equal(tree.all_finite(leaves), torch.tensor(True))
    mixed = [*leaves, torch.ones(3), torch.ones((), dtype=F64), torch.zeros(0)]
    assert torch.equal(tree.all_finite(mixed), torch.tensor(True))


@given(st.data())
def test_all_finite_finds_one_bad_element_anywhere(data):
    bad = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    sizes = data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4))
    assume(any(sizes))
    leaves = [torch.full((size,), 3.0, dtype=data.draw(st.sampled_from(FLOATS))) for size in sizes]
    assert bool(tree.all_finite(leaves))
    where = data.draw(st.sampled_from([i for i, size in enumerate(sizes) if size]))
    leaves[where][data.draw(st.integers(0, sizes[where] - 1))] = bad
    actual = tree.all_finite(leaves)
    assert (actual.shape, actual.dtype) == ((), torch.bool)
    assert not actual


def test_all_finite_of_mixed_nan_and_infinity():
    # Neither may hide the other, in whichever order a maximum meets them.
    assert not tree.all_finite([torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, -math.inf])])
    assert not tree.all_finite([torch.tensor([1.0, math.nan, 2.0])])


# Descriptions


def test_describe_and_signature():
    values = {"w": torch.ones(2, 3, dtype=torch.bfloat16), "n": [torch.tensor(1), "text", 2.0]}
    assert tree.signature(values) == {"w": "bfloat16[2, 3]", "n.0": "int64[]", "n.1": "str", "n.2": "float"}


def test_require_same_accepts():
    values = {"a": torch.ones(2), "b": [1, None]}
    tree.require_same("f", "x", values, tree.map(lambda leaf: leaf * 2, values))


def test_require_same_lists_every_difference():
    expected = {"same": torch.ones(1), "shape": torch.ones(2), "dtype": torch.ones(2), "gone": torch.ones(3)}
    actual = {
        "same": torch.ones(1),
        "shape": torch.ones(3),
        "dtype": torch.ones(2).double(),
        "more": {"x": torch.ones(4)},
    }
    with pytest.raises(StructureError) as caught:
        tree.require_same("Step", "the state", actual, expected)
    head, *lines = str(caught.value).split("\n")
    assert head.startswith("Step: the state ")
    assert {line.strip() for line in lines} == {
        "gone: missing, needs float32[3]",
        "more.x: unexpected float32[4]",
        "shape: found float32[3], needs float32[2]",
        "dtype: found float64[2], needs float32[2]",
    }


@pytest.mark.parametrize("count", [tree.MAX_LISTED, tree.MAX_LISTED + 1, 100])
def test_require_same_says_how_many_it_leaves_out(count):
    with pytest.raises(StructureError) as caught:
        tree.require_same("Step", "the state", {}, {f"w{i}": torch.ones(1) for i in range(count)})
    lines = str(caught.value).split("\n")[1:]
    assert sum("missing" in line for line in lines) == min(count, tree.MAX_LISTED)
    assert (f"  and {count - tree.MAX_LISTED} more" in lines) == (count > tree.MAX_LISTED)


def test_require_same_tells_apart_names_that_print_alike():
    """`{"a.b": x}` and `{"a": {"b": x}}` have leaves of one name; together they are two."""
    both = {"a.b": torch.ones(2), "a": {"b": torch.ones(3)}}
    one = {"a.b": torch.ones(2)}
    with pytest.raises(StructureError):
        tree.require_same("Step", "the state", both, one)


def test_batch_length():
    assert tree.batch_length({"scale": torch.tensor(1.0), "x": torch.ones(5, 2), "z": torch.ones(7)}) == 5
    assert tree.batch_length([torch.tensor(1.0), "text"]) is None
    assert tree.batch_length(None) is None


def test_device_of_and_to():
    host = torch.ones(1).device
    assert tree.device_of({"a": torch.ones(1)}) == tree.device_of({}) == tree.device_of({"a": 1}) == host
    meta = tree.to({"a": torch.ones(2), "n": 3}, "meta")
    assert (meta["a"].is_meta, meta["n"]) == (True, 3)
    assert tree.device_of(meta) == torch.device("meta")


class Graph:
    """As a batch of PyTorch Geometric, or of transformers' collators: it moves itself, and returns itself."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


def test_an_object_that_moves_itself_is_moved_and_not_changed():
    graph = Graph(torch.ones(2))
    meta = tree.to([graph, {"name": "a", "graph": graph}], "meta")
    assert (meta[0].x.is_meta, meta[1]["graph"].x.is_meta, meta[1]["name"]) == (True, True, "a")
    assert not graph.x.is_meta


def test_a_packed_sequence_keeps_its_sizes_on_the_host():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    meta = tree.to({"p": packed}, "meta")["p"]
    assert (meta.data.is_meta, meta.batch_sizes.is_meta, meta.sorted_indices.is_meta) == (True, False, True)
