"""A tree is loaded with the structure and the bits that were saved."""

import collections
import json

import hypothesis
import hypothesis.strategies as st
import optree
import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import layout
from ftrain.checkpoint.manifest import NAME
from ftrain.errors import CheckpointError, StructureError
from tests.checkpoint.trained_nets import make, trained
from tests.checkpoint.trees import DTYPES, assert_trees_equal, random_bits

Pair = collections.namedtuple("Pair", "first second")


@optree.dataclasses.dataclass(namespace="ftrain")
class Layer:
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str = optree.dataclasses.field(pytree_node=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype)[6:] for dtype in DTYPES])
def test_every_dtype_and_every_bit_comes_back(dtype, tmp_path):
    matrix = random_bits(dtype).reshape(2, 3)
    tree = {"matrix": matrix, "scalar": matrix[0, 0].clone(), "empty": matrix[:0].clone()}
    checkpoint.save(tmp_path / "a", tree)
    assert_trees_equal(checkpoint.load(tmp_path / "a"), tree)
    assert_trees_equal(checkpoint.load(tmp_path / "a", like=ft.tree.map(torch.zeros_like, tree)), tree)


def test_a_large_tensor_in_another_order_is_written_row_by_row(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "CHUNK", 40)
    tensor = torch.randn(4, 3, 6).permute(2, 1, 0)
    assert max(map(len, layout.chunks(tensor))) <= 40
    checkpoint.save(tmp_path / "a", {"x": tensor})
    assert_trees_equal(checkpoint.load(tmp_path / "a"), {"x": tensor})


def test_views_come_back_contiguous_or_with_permuted_axes_and_ties_as_one_tensor(tmp_path):
    base, complex_ = torch.randn(4, 6), torch.randn(5, dtype=torch.complex64)
    tree = {
        "transposed": base.T,
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one channel": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        "strided": base[::2, 1::2],
        "single": base[:1, 0],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "conj": complex_.conj(),
        "plain": complex_,
        "neg": complex_.conj().imag,
        "one": base,
        "tied": base,
        "part": base[1:3],
        "grad": nn.Parameter(torch.randn(2)),
        "__metadata__": torch.ones(2),
        "a": {"b.c": torch.ones(1), "b": {"c": torch.zeros(1)}},
    }
    checkpoint.save(tmp_path / "a", tree)
    actual = checkpoint.load(tmp_path / "a")
    assert list(actual) == list(tree)
    assert_trees_equal(actual, tree)
    assert actual["one"] is actual["tied"]
    for name in ("transposed", "channels", "one channel"):
        assert actual[name].stride() == tree[name].stride()
    assert all(actual[name].is_contiguous() for name in ("strided", "expanded", "part"))
    assert not any(leaf.requires_grad or leaf.is_conj() or leaf.is_neg() for leaf in ft.tree.leaves(actual))
    manifest = json.loads((tmp_path / "a" / NAME).read_text())
    assert len(manifest["tensors"]) == len(ft.tree.leaves(tree)) - 1


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
)

TENSORS = st.builds(random_bits, st.sampled_from(DTYPES), st.integers(0, 5), st.integers(0, 9))

TREES = st.recursive(
    st.one_of(SCALARS, TENSORS),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), child, max_size=3),
        st.dictionaries(st.integers(), child, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@hypothesis.given(tree=TREES)
def test_any_tree_comes_back(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "a"
    checkpoint.save(path, tree)
    assert_trees_equal(checkpoint.load(path), tree)
    assert_trees_equal(checkpoint.load(path, like=tree), tree)


def test_a_state_comes_back_without_and_with_a_template(tmp_path):
    step, path = make(), tmp_path / "new" / "folders" / "a"
    state = trained(step)
    checkpoint.save(path, state, step=2, run="me")
    assert_trees_equal(checkpoint.load(path), state)
    loaded = checkpoint.load(path, like=step.init(seed=9))
    batch = torch.randn(3, 4)
    (actual, _), (expected, _) = step(loaded, batch), step(state, batch)
    assert_trees_equal(actual, expected)
    manifest = checkpoint.verify(path)
    assert (manifest.step, manifest.run) == (2, "me")


def test_named_tuples_need_a_template_to_come_back(tmp_path):
    tree = {"pair": Pair(torch.ones(2), 3)}
    checkpoint.save(tmp_path / "a", tree)
    assert_trees_equal(checkpoint.load(tmp_path / "a", like={"pair": Pair(torch.zeros(2), 0)}), tree)
    with pytest.raises(CheckpointError, match="Pair, which can only be loaded with like="):
        checkpoint.load(tmp_path / "a")


def test_a_named_tuple_is_known_by_its_name_and_fields(tmp_path):
    """Not by its module, so that a class can move. A named tuple `Mean` is not taken for `ft.Mean`."""
    checkpoint.save(tmp_path / "a", {"pair": Pair(torch.ones(2), 3)})
    moved = collections.namedtuple("Pair", "first second", module="elsewhere")
    assert checkpoint.load(tmp_path / "a", like={"pair": moved(torch.zeros(2), 0)})["pair"][1] == 3
    renamed = collections.namedtuple("Couple", "first second")
    with pytest.raises(StructureError, match="pair: found namedtuple Pair, needs namedtuple Couple"):
        checkpoint.load(tmp_path / "a", like={"pair": renamed(torch.zeros(2), 0)})
    mean = collections.namedtuple("Mean", "total weight")(torch.ones(()), torch.ones(()))
    checkpoint.save(tmp_path / "b", mean)
    with pytest.raises(CheckpointError, match="holds a namedtuple Mean"):
        checkpoint.load(tmp_path / "b")
    with pytest.raises(StructureError, match="the tree: found namedtuple Mean, needs Mean"):
        checkpoint.load(tmp_path / "b", like=ft.Mean(*mean))
    assert checkpoint.load(tmp_path / "b", like=mean) == mean


def test_classes_that_optree_takes_for_containers_need_a_template_to_come_back(tmp_path):
    tree = {"layers": [Layer(torch.ones(2), None, "tanh")], "named": collections.defaultdict(list, a=[torch.ones(3)])}
    like = {"layers": [Layer(torch.zeros(2), None, "relu")], "named": collections.defaultdict(list, a=[torch.zeros(3)])}
    checkpoint.save(tmp_path / "a", tree)
    actual = checkpoint.load(tmp_path / "a", like=like)
    assert torch.equal(actual["layers"][0].weight, torch.ones(2))
    assert torch.equal(actual["named"]["a"][0], torch.ones(3))
    # What is no leaf is that of the template: the activation, and the factory of the defaultdict.
    assert actual["layers"][0].activation == "relu"
    assert actual["named"]["b"] == []
    with pytest.raises(CheckpointError, match="the tree holds a class Layer, which can only be loaded with like="):
        checkpoint.load(tmp_path / "a")
    with pytest.raises(StructureError, match=r"layers.0: found class Layer, needs dict"):
        checkpoint.load(tmp_path / "a", like={**like, "layers": [{"weight": torch.zeros(2), "bias": None}]})
