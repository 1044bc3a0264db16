"""Checkpoints: a tree is loaded with the bits that were saved, from files that other programs read.

A tree that cannot be saved is refused with all reasons.
"""

import collections
import json
import os
import signal
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import optree
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import __main__ as command
from ftrain.checkpoint import files, layout, saving
from ftrain.checkpoint.manifest import NAME, signed
from ftrain.errors import CheckpointError, OptionError, StructureError

DTYPES = [
    *[torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128],
    *[torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
    *[torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.bool],
]
Pair = collections.namedtuple("Pair", "first second")


@optree.dataclasses.dataclass(namespace="ftrain")
class Layer:
    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str = optree.dataclasses.field(pytree_node=False)


def bits(tensor):
    return tensor.resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(first, second):
    """Whether two tensors have the same bits; asserts that they have the same dtype, shape and device."""
    assert first.dtype == second.dtype
    assert first.shape == second.shape
    assert first.device == second.device
    return torch.equal(bits(first), bits(second))


def same_trees(first, second):
    """Assert that two trees have the same structure and leaves, to the bit; return True, for use in an assert."""
    first_leaves, first_spec = ft.tree.flatten(first)
    second_leaves, second_spec = ft.tree.flatten(second)
    assert first_spec == second_spec
    for a, b in zip(first_leaves, second_leaves, strict=True):
        if isinstance(a, torch.Tensor):
            assert same(a, b)
        else:
            assert type(a) is type(b)
            # As text, because NaN is not equal to itself.
            assert repr(a) == repr(b)
    return True


def raw(dtype, count=6, seed=0):
    """Return a tensor of random bits, which may be NaN with any payload."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, (count,), generator=generator).bool()
    return torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))


def squares(model, batch):
    return model(batch).square().mean()


def make(*wrappers, module=None):
    step = ft.train_step(ft.from_module(module or net(), squares), ft.optim.adamw(0.1))
    return ft.compose(step, *(wrappers or (ft.ema(0.9), ft.clip(1.0))))


def trained(step=None, count=2):
    step = step or make()
    state = step.init(seed=1)
    for index in range(count):
        state, _ = step(state, torch.randn(3, 4, generator=torch.Generator().manual_seed(index)))
    return state


# Round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=[str(dtype)[6:] for dtype in DTYPES])
def test_every_dtype_and_every_bit_comes_back(dtype, tmp_path):
    tree = {"x": raw(dtype).reshape(2, 3), "scalar": raw(dtype, 1)[0], "empty": raw(dtype)[:0].reshape(0, 3)}
    checkpoint.save(tmp_path / "a", tree)
    assert same_trees(checkpoint.load(tmp_path / "a"), tree)
    assert same_trees(checkpoint.load(tmp_path / "a", like=ft.tree.map(torch.zeros_like, tree)), tree)


def test_a_large_tensor_in_another_order_is_written_row_by_row(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "CHUNK", 40)
    tensor = torch.randn(4, 3, 6).permute(2, 1, 0)
    assert max(map(len, layout.chunks(tensor))) <= 40
    checkpoint.save(tmp_path / "a", {"x": tensor})
    assert same_trees(checkpoint.load(tmp_path / "a"), {"x": tensor})


def test_views_and_strides_and_ties(tmp_path):
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
    assert same_trees(actual, tree)
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
TENSORS = st.builds(raw, st.sampled_from(DTYPES), st.integers(0, 5), st.integers(0, 9))
KEYS = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(), st.booleans())
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
    assert same_trees(checkpoint.load(path), tree)
    assert same_trees(checkpoint.load(path, like=tree), tree)


def test_a_state_comes_back_without_and_with_a_template(tmp_path):
    step = make()
    state = trained(step)
    checkpoint.save(tmp_path / "deep" / "er" / "a", state, step=2, run="me")
    assert same_trees(checkpoint.load(tmp_path / "deep" / "er" / "a"), state)
    actual = checkpoint.load(tmp_path / "deep" / "er" / "a", like=step.init(seed=9))
    batch = torch.randn(3, 4)
    assert same_trees(step(actual, batch)[0], step(state, batch)[0])
    manifest = checkpoint.verify(tmp_path / "deep" / "er" / "a")
    assert (manifest.step, manifest.run) == (2, "me")


def test_named_tuples_need_a_template_to_come_back(tmp_path):
    tree = {"pair": Pair(torch.ones(2), 3)}
    checkpoint.save(tmp_path / "a", tree)
    assert same_trees(checkpoint.load(tmp_path / "a", like={"pair": Pair(torch.zeros(2), 0)}), tree)
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
    assert actual["layers"][0].activation == "relu"
    assert torch.equal(actual["named"]["a"][0], torch.ones(3))
    assert actual["named"]["b"] == []
    with pytest.raises(CheckpointError, match="the tree holds a class Layer, which can only be loaded with like="):
        checkpoint.load(tmp_path / "a")
    with pytest.raises(StructureError, match=r"layers.0: found class Layer, needs dict"):
        checkpoint.load(tmp_path / "a", like={**like, "layers": [{"weight": torch.zeros(2), "bias": None}]})


@pytest.mark.parametrize("version", [0, 3, True, 1.0, "2", None, [1]])
def test_another_version_of_the_format_is_refused(version, tmp_path):
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2)})
    body = json.loads((tmp_path / "a" / NAME).read_text())
    del body["digest"]
    text = json.dumps({**body, "version": version}, indent=1).removesuffix("\n}")
    (tmp_path / "a" / NAME).write_bytes(signed(text.encode()))
    with pytest.raises(CheckpointError, match="this ftrain reads 'ftrain checkpoint', versions 1, 2"):
        checkpoint.load(tmp_path / "a")


# Files that others read


def test_the_model_is_a_plain_safetensors_file_of_dotted_names(tmp_path):
    module = net()
    state = trained(make(module=module))
    checkpoint.save(tmp_path / "a", state)
    actual = load_file(tmp_path / "a" / "params" / "model.safetensors")
    ft.to_module(module, state)
    assert actual.keys() == module.state_dict().keys()
    assert all(same(actual[name], leaf) for name, leaf in module.state_dict().items())
    others = load_file(tmp_path / "a" / "state.safetensors")
    assert same(others["slots.ema.0.weight"], state.slots["ema"]["0.weight"])


def test_two_states_have_a_model_each(tmp_path):
    tree = {"g": trained(), "d": trained(count=1)}
    checkpoint.save(tmp_path / "a", tree)
    names = sorted(path.name for path in (tmp_path / "a" / "params").iterdir())
    assert names == ["d.safetensors", "g.safetensors"]
    assert same_trees(checkpoint.load(tmp_path / "a"), tree)


def test_transformers_reads_the_model_beside_its_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    step = ft.train_step(ft.from_module(model), ft.optim.adamw(0.1))
    tokens = torch.arange(6).reshape(1, 6)
    state, _ = step(step.init(), {"input_ids": tokens, "labels": tokens})
    checkpoint.save(tmp_path / "a", state, texts={"params/config.json": config.to_json_string()})
    actual = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "a" / "params").eval()
    ft.to_module(model, state)
    with torch.no_grad():
        assert torch.equal(actual(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_the_error_of_a_leaf_of_another_shape_or_dtype_says_what_to_do(other, tmp_path):
    checkpoint.save(tmp_path / "a", {"head": {"w": torch.ones(2)}, "body": torch.ones(1)})
    like = {"head": {"w": other}, "body": torch.zeros(1)}
    for partial in (False, True):
        with pytest.raises(
            StructureError, match=r"without like= and convert, ft\.tree\.map\(.*rename={its path: 'unused'}"
        ):
            checkpoint.load(tmp_path / "a", like=like, partial=partial)
    actual = checkpoint.load(tmp_path / "a", like=like, partial=True, rename={"head.w": "unused"})
    assert same_trees(actual, {"head": {"w": other}, "body": torch.ones(1)})
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


def test_the_first_differences_are_listed_and_the_others_counted(tmp_path):
    checkpoint.save(tmp_path / "a", {f"w{number}": torch.ones(1) for number in range(300)})
    with pytest.raises(StructureError, match=r"\(300 differences; ") as caught:
        checkpoint.load(tmp_path / "a", like={f"w{number}": torch.ones(2) for number in range(300)})
    assert str(caught.value).splitlines()[-2:] == ["  w19: found float32[1], needs float32[2]", "  and 280 more"]


def test_nothing_is_pickled(tmp_path):
    checkpoint.save(tmp_path / "a", trained())
    names = sorted(str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert names == [NAME, "params/model.safetensors", "state.safetensors"]


# Refusals


def test_leaves_that_cannot_be_saved_are_named_all_at_once(tmp_path):
    tree = {
        "ok": torch.ones(2),
        "bad": [object(), torch.ones(2, device="meta"), torch.ones(2).to_sparse()],
        "numpy": torch.ones(2).numpy(),
        "key": {1.5: 1},
        "module": torch.nn.Sequential(torch.nn.Linear(1, 1)),
    }
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "a", tree)
    for piece in ("bad.0", "bad.1", "meta", "bad.2", "sparse", "numpy", "ndarray", "1.5", "needs its state_dict()"):
        assert piece in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"the manifest of 9 tensors takes .* and 1,000 are read"):
        checkpoint.save(tmp_path / "a", {str(index): torch.ones(1) for index in range(9)})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda path: 10_000)
    with pytest.raises(CheckpointError, match=r"needs .* bytes and 10,000 are free"):
        checkpoint.save(tmp_path / "a", {"x": torch.ones(10_000)})
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_never_written_over(tmp_path):
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tmp_path / "a", {"x": torch.zeros(2)})
    assert checkpoint.load(tmp_path / "a")["x"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["../x", "/x", NAME, "state.safetensors", ".hidden", "a//b", ""])
def test_a_text_with_a_name_that_is_outside_hidden_or_in_use_is_refused(name, tmp_path):
    with pytest.raises(OptionError, match="texts has the name"):
        checkpoint.save(tmp_path / "a", {"x": torch.ones(2)}, texts={name: "text"})
    assert not list(tmp_path.iterdir())


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


def test_partial_loads_the_leaves_that_match_and_rename_maps_their_paths(tmp_path):
    checkpoint.save(tmp_path / "a", {"enc": {"w": torch.ones(2)}, "head": torch.ones(1)})
    like = {"body": {"w": torch.zeros(2)}, "other": torch.zeros(3)}
    actual = checkpoint.load(tmp_path / "a", like=like, partial=True, rename={"enc": "body"})
    assert actual["body"]["w"].tolist() == [1, 1]
    assert actual["other"].tolist() == [0, 0, 0]
    with pytest.raises(StructureError, match=r"(?s)body\.w: found float32\[2\], needs float32\[5\]"):
        checkpoint.load(tmp_path / "a", like={"body": {"w": torch.zeros(5)}}, partial=True, rename={"enc": "body"})
    actual = checkpoint.load(
        tmp_path / "a", like={"x": {"w": torch.zeros(2)}, "head": torch.zeros(1)}, rename={"enc": "x"}
    )
    assert actual["x"]["w"].tolist() == [1, 1]
    with pytest.raises(StructureError, match="other: missing"):
        checkpoint.load(tmp_path / "a", like=like, rename={"enc": "body", "head": "h"})
    with pytest.raises(OptionError, match=r"'encoder'.*enc"):
        checkpoint.load(tmp_path / "a", like=like, partial=True, rename={"encoder": "body"})
    deeper = {"whole": {"enc": {"w": torch.zeros(2)}}, "head": torch.zeros(1)}
    actual = checkpoint.load(tmp_path / "a", like=deeper, rename={"enc": "whole.enc"})
    assert actual["whole"]["enc"]["w"].tolist() == [1, 1]


def test_a_renamed_leaf_replaces_one_that_has_its_new_name(tmp_path):
    for names in ("ab", "ba"):  # In both orders of the leaves.
        checkpoint.save(tmp_path / names, {name: {"w": torch.tensor(float(ord(name)))} for name in names})
        actual = checkpoint.load(
            tmp_path / names, like={"b": {"w": torch.tensor(0.0)}}, partial=True, rename={"a": "b"}
        )
        assert actual["b"]["w"] == ord("a")


def test_a_missing_path_and_an_empty_directory_are_errors_that_name_the_path(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match=str(path)):
            checkpoint.load(path)


def test_a_file_of_torch_and_a_link_to_a_checkpoint_are_no_checkpoints(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "model.pt")
    checkpoint.save(tmp_path / "a", {"w": torch.ones(1)})
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for path in (tmp_path / "model.pt", tmp_path / "link"):
        with pytest.raises(CheckpointError, match=r"torch\.load\) or a link, which is not followed"):
            checkpoint.load(path)


# The command


def test_inspect_verify_and_diff(tmp_path, capsys):
    state = trained()
    other = trained(count=3)
    checkpoint.save(tmp_path / "a", state, step=2)
    checkpoint.save(tmp_path / "b", other, step=3)
    assert command.main(["inspect", str(tmp_path / "a")]) == 0
    output = capsys.readouterr().out
    assert "params.0.weight" in output
    assert "float32[8, 4]  128 B" in output
    assert command.main(["verify", str(tmp_path / "a")]) == 0
    assert command.main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    capsys.readouterr()
    assert command.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    output = capsys.readouterr().out
    assert "params.0.weight: 32 of 32 elements differ" in output
    assert "rng" not in output
    for run, state_of_run in ("first", state), ("second", other):
        with ft.Checkpoints(tmp_path / run, every=1) as checkpoints:
            checkpoints.save(2, {"state": state_of_run}, wait=True)
    assert command.main(["diff", str(tmp_path / "first"), str(tmp_path / "second")]) == 1
    assert "params.0.weight: 32 of 32 elements differ" in capsys.readouterr().out
    file = tmp_path / "a" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert command.main(["verify", str(tmp_path / "a")]) == 1
    assert "state.safetensors" in capsys.readouterr().out
    assert command.main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith(": there is no checkpoint, which is a directory with a MANIFEST.json\n")


def test_inspect_shows_leaves_that_are_not_tensors(tmp_path, capsys):
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2), "n": float("nan")})
    assert command.main(["inspect", str(tmp_path / "a")]) == 0
    output = capsys.readouterr().out
    assert "x  float32[2]  8 B" in output
    assert "n  nan" in output


@pytest.mark.parametrize("command", [["ftrain.checkpoint", "verify"], ["ftrain", "doctor", "cpu"]])
def test_a_command_whose_output_nobody_reads_ends_without_a_traceback(command, tmp_path):
    """As in `command | head -1`, when the reader has ended: the pipe here has no reader from the start."""
    checkpoint.save(tmp_path / "a", {"x": torch.ones(3)})
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [str(tmp_path / "a")] if command[-1] == "verify" else []
    run = [sys.executable, "-m", *command, *arguments]
    process = subprocess.run(run, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (process.returncode, process.stderr) == (-signal.SIGPIPE, "")
