"""A checkpoint is loaded into a tree of another structure with `partial` and `rename`, or its differences listed."""

import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.errors import OptionError, StructureError
from tests.checkpoint.trees import assert_trees_equal


def test_all_differences_of_two_structures_are_listed(tmp_path):
    checkpoint.save(tmp_path / "a", {"a": torch.ones(2), "b": (torch.ones(1), 3), "c": {"d": torch.ones(1)}, "n": 1})
    like = {"a": torch.ones(3), "b": [torch.ones(1), 3.0], "e": torch.ones(1), "n": 1}
    with pytest.raises(StructureError) as caught:
        checkpoint.load(tmp_path / "a", like=like)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(lines) == [
        "a: found float32[2], needs float32[3]",
        "b.1: found int, needs float",
        "b: found tuple, needs list",
        "c.d: unexpected float32[1]",
        "c: unexpected dict",
        "e: missing, needs float32[1]",
    ]


def test_the_first_differences_are_listed_and_the_others_counted(tmp_path):
    checkpoint.save(tmp_path / "a", {f"w{number}": torch.ones(1) for number in range(300)})
    with pytest.raises(StructureError, match=r"\(300 differences; ") as caught:
        checkpoint.load(tmp_path / "a", like={f"w{number}": torch.ones(2) for number in range(300)})
    assert str(caught.value).splitlines()[-2:] == ["  w19: found float32[1], needs float32[2]", "  and 280 more"]


@pytest.mark.parametrize("new_head", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_the_error_of_a_leaf_of_another_shape_or_dtype_says_what_to_do(new_head, tmp_path):
    checkpoint.save(tmp_path / "a", {"head": {"w": torch.ones(2)}, "body": torch.ones(1)})
    like = {"head": {"w": new_head}, "body": torch.zeros(1)}
    for partial in (False, True):
        with pytest.raises(
            StructureError, match=r"without like= and convert, ft\.tree\.map\(.*rename={its path: 'unused'}"
        ):
            checkpoint.load(tmp_path / "a", like=like, partial=partial)
    actual = checkpoint.load(tmp_path / "a", like=like, partial=True, rename={"head.w": "unused"})
    assert_trees_equal(actual, {"head": {"w": new_head}, "body": torch.ones(1)})
    with pytest.raises(StructureError, match=r"\(1 differences; partial=True loads the leaves that it has, rename="):
        checkpoint.load(tmp_path / "a", like={"head": {"w": torch.ones(2)}})


def test_a_state_of_float32_is_converted_to_that_of_another_dtype_as_the_error_says(tmp_path):
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adam(0.1))
    state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
    checkpoint.save(tmp_path / "a", state)
    like = step.init({"w": torch.ones(2, dtype=torch.bfloat16)})
    with pytest.raises(
        StructureError, match=r"ft\.tree\.map\(lambda leaf, other: leaf\.to\(other\.dtype\), loaded, like\)"
    ):
        checkpoint.load(tmp_path / "a", like=like)
    loaded = checkpoint.load(tmp_path / "a")
    converted = ft.tree.map(lambda leaf, other: leaf.to(other.dtype), loaded, like)
    state, _ = step(converted, torch.ones(2, dtype=torch.bfloat16))
    assert int(state.step) == 2


def test_partial_loads_the_leaves_that_match_and_refuses_those_of_another_shape(tmp_path):
    checkpoint.save(tmp_path / "a", {"enc": {"w": torch.ones(2)}, "head": torch.ones(1)})
    like = {"body": {"w": torch.zeros(2)}, "other": torch.zeros(3)}
    actual = checkpoint.load(tmp_path / "a", like=like, partial=True, rename={"enc": "body"})
    assert_trees_equal(actual, {"body": {"w": torch.ones(2)}, "other": torch.zeros(3)})
    with pytest.raises(StructureError, match=r"(?s)body\.w: found float32\[2\], needs float32\[5\]"):
        checkpoint.load(tmp_path / "a", like={"body": {"w": torch.zeros(5)}}, partial=True, rename={"enc": "body"})


def test_rename_maps_the_paths_of_a_checkpoint_to_those_of_like(tmp_path):
    checkpoint.save(tmp_path / "a", {"enc": {"w": torch.ones(2)}, "head": torch.ones(1)})
    for like, rename in (
        ({"x": {"w": torch.zeros(2)}, "head": torch.zeros(1)}, {"enc": "x"}),
        ({"whole": {"enc": {"w": torch.zeros(2)}}, "head": torch.zeros(1)}, {"enc": "whole.enc"}),
    ):
        actual = checkpoint.load(tmp_path / "a", like=like, rename=rename)
        assert_trees_equal(actual, ft.tree.map(torch.ones_like, like))
    like = {"body": {"w": torch.zeros(2)}, "other": torch.zeros(3)}
    with pytest.raises(StructureError, match="other: missing"):
        checkpoint.load(tmp_path / "a", like=like, rename={"enc": "body", "head": "h"})
    with pytest.raises(OptionError, match=r"'encoder'.*enc"):
        checkpoint.load(tmp_path / "a", like=like, partial=True, rename={"encoder": "body"})


@pytest.mark.parametrize("rename", [{"a": "c", "b": "c"}, {"b": "x"}])
def test_two_leaves_that_get_one_name_are_refused(rename, tmp_path):
    # The second rename leaves a.w alone, which is there twice: one value would be loaded in both places.
    tree = {"a": {"w": torch.zeros(1)}, "a.w": torch.ones(1), "b": {"w": torch.full((1,), 2.0)}}
    checkpoint.save(tmp_path / "a", tree)
    like = {"a": {"w": torch.zeros(1)}, "a.w": torch.zeros(1), "c": {"w": torch.zeros(1)}, "x": {"w": torch.zeros(1)}}
    with pytest.raises(OptionError, match=r"two leaves of the checkpoint are called [ac]\.w; give them two names"):
        checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename)


def test_renamed_containers_are_joined(tmp_path):
    checkpoint.save(tmp_path / "a", {"a": {"v": torch.ones(1), "w": None}, "b": {"v": None, "w": torch.zeros(1)}})
    like = {"c": {"v": torch.zeros(1), "w": torch.ones(1)}}
    actual = checkpoint.load(tmp_path / "a", like=like, rename={"a": "c", "b": "c"})
    assert_trees_equal(actual, {"c": {"v": torch.ones(1), "w": torch.zeros(1)}})


def test_a_renamed_leaf_replaces_one_that_has_its_new_name(tmp_path):
    for names in ("ab", "ba"):  # In both orders of the leaves.
        checkpoint.save(tmp_path / names, {name: {"w": torch.tensor(float(ord(name)))} for name in names})
        like = {"b": {"w": torch.tensor(0.0)}}
        actual = checkpoint.load(tmp_path / names, like=like, partial=True, rename={"a": "b"})
        assert actual["b"]["w"] == ord("a")
