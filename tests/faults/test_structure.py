"""Trees that have changed since they were saved: one error lists every path, and the tree in `like` is not changed."""

import random
import re

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import load, matching, save
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.reading import load_checkpoint
from ftrain.errors import CheckpointError, StructureError
from ftrain.training.replay import replay
from tests.faults.figures import tally, times
from tests.faults.problem import batch, failing, make, squares
from tests.faults.specimens import everything, have_same_bits, state

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64


def random_tree(draw, depth=0):
    """Return a random tree of dicts, lists, tuples and tensors."""
    node_type = draw.choice(["dict", "dict", "list", "tuple", "leaf", "leaf"] if depth else ["dict"])
    if node_type == "leaf" or depth > 3:
        shape = [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
        return torch.full(shape, draw.randint(0, 9)).to(draw.choice(DTYPES))
    children = [random_tree(draw, depth + 1) for _ in range(draw.randint(2, 4))]
    if node_type == "dict":
        return {f"n{i}": child for i, child in enumerate(children)}
    return children if node_type == "list" else tuple(children)


# Each change returns a changed tree, and the paths that the error must list, each with a part of its line.


def nodes(tree, at=()):
    """Yield the path and the node for all nodes of a tree."""
    yield at, tree
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, child in children:
        yield from nodes(child, (*at, key))


def with_node(tree, at, new):
    """Return the tree with another node at a path."""
    if not at:
        return new
    key, rest = at[0], at[1:]
    if isinstance(tree, dict):
        return {name: with_node(child, rest, new) if name == key else child for name, child in tree.items()}
    return type(tree)(with_node(child, rest, new) if number == key else child for number, child in enumerate(tree))


def dotted(at):
    return ".".join(map(str, at)) or "the tree"


def below(at, tree):
    """Return the dotted paths of a node and of all nodes in it."""
    return [dotted(path) for path, _ in nodes(tree, at)]


def dtype_and_shape(leaf):
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def dropped(tree, at, node):
    """Remove a node from a dict."""
    *above, key = at
    kept = {name: child for name, child in get(tree, above).items() if name != key}
    return with_node(tree, tuple(above), kept), dict.fromkeys(below(at, node), "unexpected")


def added(tree, at, node):
    more = {"more": torch.zeros(2), "most": [torch.zeros(1)]}
    lines = dict.fromkeys([path for name in more for path in below((*at, name), more[name])], "missing")
    return with_node(tree, at, {**node, **more}), lines


def renamed(tree, at, node):
    *above, key = at
    new = {f"{key}x" if name == key else name: child for name, child in get(tree, above).items()}
    lines = dict.fromkeys(below(at, node), "unexpected")
    lines |= dict.fromkeys(below((*above, f"{key}x"), node), "missing")
    return with_node(tree, tuple(above), new), lines


def reshaped(tree, at, node):
    new = torch.zeros([*node.shape, 2], dtype=node.dtype)
    return with_node(tree, at, new), {dotted(at): f"found {dtype_and_shape(node)}, needs {dtype_and_shape(new)}"}


def retyped(tree, at, node):
    new = torch.zeros(node.shape, dtype=next(dtype for dtype in DTYPES if dtype != node.dtype))
    return with_node(tree, at, new), {dotted(at): f"found {dtype_and_shape(node)}, needs {dtype_and_shape(new)}"}


def another_container(tree, at, node):
    """Change a dict to a tuple, a tuple to a list, or a list to a tuple; the paths in a dict change too."""
    if isinstance(node, dict):
        new = tuple(node.values())
        lines = dict.fromkeys(below(at, node), "unexpected") | dict.fromkeys(below(at, new), "missing")
        return with_node(tree, at, new), {**lines, dotted(at): "found dict, needs tuple"}
    new = list(node) if isinstance(node, tuple) else tuple(node)
    return with_node(tree, at, new), {dotted(at): f"found {type(node).__name__}, needs {type(new).__name__}"}


def replaced_by_a_number(tree, at, node):
    return with_node(tree, at, 3), {dotted(at): f"found {dtype_and_shape(node)}, needs int"}


def replaced_by_none(tree, at, node):
    """Replace a leaf or a container by None."""
    lines = dict.fromkeys(below(at, node), "unexpected")
    actual = dtype_and_shape(node) if isinstance(node, torch.Tensor) else type(node).__name__
    return with_node(tree, at, None), {**lines, dotted(at): f"found {actual}, needs None"}


def get(tree, at):
    for key in at:
        tree = tree[key]
    return tree


LEAF, DICT, INSIDE_DICT, CONTAINER, ANY = range(5)
CHANGES = {
    "drop": (dropped, INSIDE_DICT),
    "add": (added, DICT),
    "rename": (renamed, INSIDE_DICT),
    "reshape": (reshaped, LEAF),
    "dtype": (retyped, LEAF),
    "container": (another_container, CONTAINER),
    "scalar": (replaced_by_a_number, LEAF),
    "none": (replaced_by_none, ANY),
}


def suits(tree, at, node, requirement):
    return {
        LEAF: isinstance(node, torch.Tensor),
        DICT: isinstance(node, dict),
        INSIDE_DICT: bool(at) and isinstance(get(tree, at[:-1]), dict) and len(get(tree, at[:-1])) > 1,
        CONTAINER: bool(at) and not isinstance(node, torch.Tensor),
        ANY: bool(at),
    }[requirement]


def candidates(tree, name):
    """Return (path, node) for the nodes of a tree that a change can be applied to."""
    return [(path, node) for path, node in nodes(tree) if suits(tree, path, node, CHANGES[name][1])]


def changed(tree, draw, name, num_others):
    """Make a change, and `num_others` more at other nodes; return the tree and the lines that the error must have."""
    like, lines, changed_paths = tree, {}, []
    for number in range(1 + num_others):
        change = name if not number else draw.choice([*CHANGES])
        unchanged = [
            (path, node)
            for path, node in candidates(tree, change)
            if not any(path[: len(other)] == other[: len(path)] or path[:-1] == other[:-1] for other in changed_paths)
        ]
        if unchanged:
            path, node = draw.choice(unchanged)
            like, new_lines = CHANGES[change][0](like, path, node)
            lines |= new_lines
            changed_paths.append(path)
    return like, lines


def listed(error):
    """Return the lines of an error by path."""
    return dict(re.findall(r"^  (.+?): (.+)$", str(error), re.MULTILINE))


def checkpoint_like(path, like):
    return load_checkpoint(path, None, {"state": like}, Ranks("load"), on_host=False, accept=None)


@pytest.mark.parametrize("name", CHANGES)
def test_a_tree_that_has_changed_is_one_error_with_every_path(name, tmp_path, monkeypatch):
    monkeypatch.setattr(matching, "MAX_LINES", 10_000)
    draw = random.Random(name)
    with tally(f"structure: {name}") as tries:
        for number in range(times(40, 6)):
            tries.runs += 1
            tree = random_tree(draw)
            while not candidates(tree, name):
                tree = random_tree(draw)
            save(tmp_path / str(number), {"state": tree})
            like, lines = changed(tree, draw, name, draw.choice([0, 0, 1, 3]))
            before = ft.tree.clone(like)
            memory = [leaf.data_ptr() for leaf in ft.tree.leaves(like) if isinstance(leaf, torch.Tensor)]
            for read, prefix in (
                (lambda path, like: load(path, like={"state": like}), "state"),
                (checkpoint_like, None),
            ):
                try:
                    read(tmp_path / str(number), like)
                except StructureError as error:
                    actual = listed(error)
                else:
                    actual = {}
                expected = {_within(prefix, path): text for path, text in lines.items()}
                is_right = lines and actual.keys() == expected.keys()
                if not is_right or any(text not in actual[path] for path, text in expected.items()):
                    tries.failures.append((number, actual, expected))
            after = [leaf.data_ptr() for leaf in ft.tree.leaves(like) if isinstance(leaf, torch.Tensor)]
            if not have_same_bits(like, before) or memory != after:
                tries.failures.append((number, "touched"))


def _within(prefix, path):
    if prefix is None:
        return path
    return prefix if path == "the tree" else f"{prefix}.{path}"


def test_a_run_of_another_optimizer_leaves_the_state_as_it_was(tmp_path):
    """The error of `latest`, which `fit` calls, lists the missing and the unexpected leaves."""
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": state(), "run": everything()})
    start = state(0)
    other = ft.tree.clone(start)
    other = ft.types.replace(other, opt_state={"momentum": other.params}, params={"w": torch.zeros(4)})
    before = ft.tree.clone(other)
    with pytest.raises(StructureError) as caught:
        ft.Checkpoints(tmp_path, every=1).latest({"state": other})
    listed_lines = listed(caught.value)
    assert {"opt_state.count", "opt_state.mu.w", "opt_state.momentum.w", "params.w", "params.b"} <= listed_lines.keys()
    assert listed_lines["params.w"].startswith("found float32[3], needs float32[4]")
    assert have_same_bits(other, before)


@pytest.mark.parametrize("more", [{}, {"run": {"note": "mine"}}, {"run": None}], ids=["alone", "of ours", "none"])
def test_fit_does_not_resume_from_a_checkpoint_that_it_has_not_saved(more, tmp_path):
    step = make(squares, ft.ema(0.9))
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": state(), **more})
    start = ft.tree.clone(state(0))
    options = {"steps": 3, "checkpoints": ft.Checkpoints(tmp_path, every=1), "progress": False}
    with failing(CheckpointError, "step-000000000001", "not saved by ftrain.fit"):
        ft.fit(step, start, [batch()], **options)
    with failing(CheckpointError, "step-000000000001", "not saved by ftrain.fit"):
        replay(step, start, [batch()], options["checkpoints"], at=3)


def test_a_different_structure_is_an_error_and_not_a_reason_to_load_an_older_checkpoint(tmp_path):
    """An older checkpoint that fits by chance would silently undo the newer ones."""
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": {"w": torch.zeros(2)}})
        checkpoints.save(2, {"state": {"w": torch.zeros(3)}})
    with pytest.raises(StructureError, match="needs float32"):
        ft.Checkpoints(tmp_path, every=1).latest({"state": {"w": torch.ones(2)}})


def test_damage_to_a_tensor_leaves_the_tree_as_it_was(tmp_path):
    """The last of several tensors is damaged; the others are intact."""
    tree = {f"w{i}": torch.full((300, 300), float(i)) for i in range(5)}
    save(tmp_path / "a", tree)
    data = bytearray((tmp_path / "a" / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a" / "state.safetensors").write_bytes(data)
    like = ft.tree.map(torch.zeros_like, tree)
    with pytest.raises(CheckpointError, match="w4"):
        load(tmp_path / "a", like=like)
    assert all(not leaf.any() for leaf in ft.tree.leaves(like))
