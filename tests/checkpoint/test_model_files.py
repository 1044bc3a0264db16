"""The files of a checkpoint: other programs read the model, and nothing is pickled."""

import pytest
import torch
from safetensors.torch import load_file

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint.manifest import NAME
from tests.checkpoint.trained_nets import make, net, trained
from tests.checkpoint.trees import assert_tensors_equal, assert_trees_equal


def test_the_model_is_a_plain_safetensors_file_of_dotted_names(tmp_path):
    module = net()
    state = trained(make(module))
    checkpoint.save(tmp_path / "a", state)
    actual = load_file(tmp_path / "a" / "params" / "model.safetensors")
    ft.to_module(module, state)
    assert actual.keys() == module.state_dict().keys()
    for name, expected in module.state_dict().items():
        assert_tensors_equal(actual[name], expected)
    rest = load_file(tmp_path / "a" / "state.safetensors")
    assert_tensors_equal(rest["slots.ema.0.weight"], state.slots["ema"]["0.weight"])


def test_two_states_have_a_model_each(tmp_path):
    tree = {"g": trained(), "d": trained(steps=1)}
    checkpoint.save(tmp_path / "a", tree)
    names = sorted(path.name for path in (tmp_path / "a" / "params").iterdir())
    assert names == ["d.safetensors", "g.safetensors"]
    assert_trees_equal(checkpoint.load(tmp_path / "a"), tree)


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


def test_nothing_is_pickled(tmp_path):
    checkpoint.save(tmp_path / "a", trained())
    names = sorted(str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert names == [NAME, "params/model.safetensors", "state.safetensors"]
