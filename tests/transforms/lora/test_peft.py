"""The files of adapters: what ftrain writes peft computes alike, and the other way round; and what is refused."""

import copy
import json
import math
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ftrain as ft
from ftrain.checkpoint import files
from ftrain.checkpoint.safetensors_with_config import TensorsAndConfig, read_safetensors, write_safetensors
from ftrain.errors import CheckpointError, ComposeError, OptionError, StructureError
from tests.laws.models import make_batch, token_loss
from tests.laws.models import make_model as make_tiny
from tests.laws.pipelines import assert_equal
from tests.transforms.lora.models import TARGETS, adapters, loss, make, step_of, train

KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "dropout": {"dora": True, "dropout": 0.3}}
kinds = pytest.mark.parametrize("kind", KINDS)
WEIGHTS, CONFIG, DIGESTS = "adapter_model.safetensors", "adapter_config.json", "ftrain_digests.json"


def lora(targets=TARGETS, **options):
    return ft.lora(3, 5, targets=targets, **options)


def trained(kind="lora", model=None, targets=TARGETS, **options):
    step = step_of(make() if model is None else model, lora(targets, **KINDS[kind]), **options)
    return step, train(step)[0]


@pytest.fixture
def saved(tmp_path):
    """A step, its trained state, and where it is saved."""
    step, state = trained()
    ft.adapters.save(tmp_path / "adapter", step, state)
    return step, state, tmp_path / "adapter"


# The files


@kinds
def test_what_is_saved_is_loaded_to_the_bit(kind, tmp_path):
    step, state = trained(kind, trainable=["head.*"], targets=["embed", "*.up"])
    ft.adapters.save(tmp_path / "adapter", step, state)
    back = ft.adapters.load(tmp_path / "adapter", step, step.init(seed=9))
    assert_equal((back.params, back.frozen), (state.params, state.frozen))
    assert_equal(back.opt_state, step.init().opt_state)
    again = step_of(make(), ft.adapters.like(tmp_path / "adapter"), trainable=["head.*"])
    assert repr(again) == repr(step)
    assert_equal(ft.adapters.load(tmp_path / "adapter", again, again.init()).params, state.params)


def test_averages_begin_with_what_was_loaded(saved):
    step, state, path = saved
    averaging = ft.ema(0.9)(step)
    loaded = ft.adapters.load(path, averaging, averaging.init())
    assert_equal(adapters(loaded.slots["ema"]), adapters(state.params))


def test_the_names_are_those_of_peft(saved):
    _, state, path = saved
    assert sorted(file.name for file in path.iterdir()) == [CONFIG, WEIGHTS, DIGESTS]
    tensors, said = load_file(path / WEIGHTS), json.loads((path / CONFIG).read_text())
    assert tensors.keys() == {f"base_model.model.{name}" for name in adapters(state.params)}
    assert_equal(tensors["base_model.model.blocks.0.up.lora_A.weight"], state.params["blocks.0.up.lora_A.weight"])
    assert (said["peft_type"], said["r"], said["lora_alpha"], said["bias"]) == ("LORA", 3, 5, "none")
    assert said["target_modules"] == ["down", "embed", "head", "up"]
    assert said["modules_to_save"] is said["base_model_name_or_path"] is said["task_type"] is None


def test_targets_are_written_so_that_peft_finds_no_more(tmp_path):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    class Outer(Inner):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

    def written(*targets):
        step = step_of(Outer(), lora(targets), criterion=lambda model, batch: None)
        path = tmp_path / "-".join(targets)
        ft.adapters.save(path, step, step.init(), base_model="outer", task_type="CAUSAL_LM")
        said = json.loads((path / CONFIG).read_text())
        assert (said["base_model_name_or_path"], said["task_type"]) == ("outer", "CAUSAL_LM")
        return said["target_modules"]

    assert written("a", "inner.a") == ["a"]
    assert written("inner.a") == ["inner.a"]
    assert written("a") == "a"
    assert written("a", "inner.b") == r"a|inner\.b"


def test_nothing_is_there_before_all_of_it_is(saved, tmp_path, monkeypatch):
    step, state, path = saved
    with pytest.raises(CheckpointError, match="exists already"):
        ft.adapters.save(path, step, state)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(CheckpointError, match="No space left"):
        ft.adapters.save(tmp_path / "other", step, state)
    assert [each.name for each in tmp_path.iterdir()] == ["adapter"]


# What is refused


def changed(path, **options):
    """Let a file be one of peft's, which has no digests."""
    (path / DIGESTS).unlink(missing_ok=True)
    said = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**said, **options}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"bias": "all"}, "has bias='all', which ftrain does not support"),
        ({"rank_pattern": {"up": 8}}, r"rank_pattern=\{'up': 8\}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"layer_replication": [[0, 4]], "lora_bias": True}, r"layer_replication=\[\[0, 4\]\], lora_bias=True"),
        ({"some_option_of_tomorrow": 1}, "some_option_of_tomorrow=1"),
    ],
)
def test_options_that_compute_something_else(saved, options, said):
    step, state, path = saved
    changed(path, **options)
    with pytest.raises(CheckpointError, match=said):
        ft.adapters.load(path, step, state)
    with pytest.raises(CheckpointError, match=said):
        ft.adapters.like(path)


@pytest.mark.parametrize(
    ("options", "actual", "said"),
    [
        ({"r": "three"}, "r: found 'three', the step has rank=3", "rank is 'three'"),
        ({"r": None}, "r: found None", "rank is None"),
        ({"lora_alpha": math.nan}, "lora_alpha: found nan", "alpha is nan"),
    ],
)
def test_options_out_of_their_range(saved, options, actual, said):
    step, state, path = saved
    changed(path, **options)
    with pytest.raises(StructureError, match=actual):
        ft.adapters.load(path, step, state)
    with pytest.raises(OptionError, match=said):
        ft.adapters.like(path)


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": "gaussian", "layers_pattern": None, "revision": "main"}, {"lora_dropout": 0.5}]
)
def test_options_that_do_not_are_none_of_our_business(saved, options):
    step, state, path = saved
    changed(path, **options)
    assert_equal(ft.adapters.load(path, step, step.init()).params, state.params)


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (
            ft.lora(4, 5, targets=TARGETS),
            [r"r: found 3, the step has rank=4", r"lora_A\.weight: found \[3, 6\], needs \[4, 6\]"],
        ),
        (ft.lora(3, 6, targets=TARGETS), [r"lora_alpha: found 5, the step has alpha=6"]),
        (ft.lora(3, 5, targets=TARGETS, rslora=True), ["use_rslora: found False, the step has rslora=True"]),
        (
            ft.lora(3, 5, targets=["head"], dora=True),
            [
                "use_dora",
                r"head\.lora_magnitude_vector: missing, needs float64\[7\]",
                r"blocks\.0\.down\.lora_A\.weight: unexpected",
            ],
        ),
    ],
)
def test_adapters_of_another_rank_or_target(saved, wrapper, said):
    path, step = saved[2], step_of(make(), wrapper)
    with pytest.raises(StructureError) as caught:
        ft.adapters.load(path, step, step.init())
    for each in ["does not fit the step", *said]:
        assert caught.match(each)


def test_adapters_of_another_base(saved):
    _, state, path = saved
    other = make()
    with torch.no_grad():
        other.blocks[1].norm.weight.mul_(1.001)
        other.head.bias.add_(1e-3)
    elsewhere = step_of(other, lora())
    with pytest.raises(
        StructureError, match=r"another base, with other values in blocks\.1\.norm\.weight and 1 more; any_base=True"
    ):
        ft.adapters.load(path, elsewhere, elsewhere.init())
    assert_equal(ft.adapters.load(path, elsewhere, elsewhere.init(), any_base=True).params, state.params)
    # In another dtype it may be the same.
    narrow = step_of(make(dtype=torch.float32), lora())
    loaded = ft.adapters.load(path, narrow, narrow.init())
    assert loaded.params["head.lora_A.weight"].dtype == torch.float32


def test_files_that_are_missing_or_damaged(saved, tmp_path):
    step, state, path = saved

    def refused(said):
        with pytest.raises(CheckpointError, match=said):
            ft.adapters.load(path, step, state)

    data, text = (path / WEIGHTS).read_bytes(), (path / CONFIG).read_text()
    (path / DIGESTS).unlink()
    (path / WEIGHTS).write_bytes(data[:-8])
    refused(r"adapter: cannot be read: SafetensorError")
    (path / WEIGHTS).write_bytes(b"")
    refused("cannot be read: SafetensorError")
    tensors = load_file_of(data, tmp_path)
    save_file({name.replace("base_model.", ""): tensor for name, tensor in tensors.items()}, path / WEIGHTS)
    refused(r"adapter_model\.safetensors has model\..*, which does not begin with base_model\.model\.")
    (path / WEIGHTS).write_bytes(data)
    (path / CONFIG).write_text(text[:-5])
    refused("cannot be read: JSONDecodeError")
    (path / CONFIG).write_text("[]")
    refused(r"adapter_config\.json holds a list")
    (path / CONFIG).unlink()
    refused(r"FileNotFoundError: .*adapter_config\.json")
    with pytest.raises(CheckpointError, match=r"FileNotFoundError: .*nowhere"):
        ft.adapters.like(tmp_path / "nowhere")


def test_every_flipped_byte_is_found_and_named(tmp_path):
    path, names = tmp_path / "adapter", (WEIGHTS, CONFIG)
    tensors = {"base_model.model.a.lora_A.weight": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    write_safetensors(path, names, TensorsAndConfig(tensors, {"note": "text"}, {"peft_type": "LORA", "r": 3}))
    start = 8 + int.from_bytes((path / WEIGHTS).read_bytes()[:8], "little")
    for name in (WEIGHTS, CONFIG, DIGESTS):
        whole = (path / name).read_bytes()
        for place in range(len(whole)):
            (path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            # Those of float32 come first.
            tensor = "" if name != WEIGHTS or place < start else [*tensors][place >= start + 48]
            with pytest.raises(CheckpointError, match=rf"adapter.*{name}.*{tensor}"):
                read_safetensors(path, names)
        for other in (whole[:-1], whole + b" "):
            (path / name).write_bytes(other)
            with pytest.raises(CheckpointError, match=rf"adapter.*({name}|SafetensorError: .* not fully covered)"):
                read_safetensors(path, names)
        (path / name).write_bytes(whole)
    assert torch.equal(read_safetensors(path, names).tensors["b"], tensors["b"])


def test_what_is_changed_on_purpose_needs_no_digests(saved):
    step, state, path = saved
    said = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**said, "base_model_name_or_path": "mine"}))
    with pytest.raises(CheckpointError, match=f"{CONFIG}: the bytes are not those.*remove {DIGESTS}"):
        ft.adapters.load(path, step, state)
    (path / DIGESTS).unlink()
    assert_equal(ft.adapters.load(path, step, step.init()).params, state.params)


def load_file_of(data, folder):
    (folder / "copy").write_bytes(data)
    return load_file(folder / "copy")


@pytest.mark.parametrize(
    ("trainable", "targets", "said"),
    [
        (["head.bias"], ["embed"], r"parameters of head train, and head\.weight is frozen"),
        (["head.*"], ["head"], "parameters of head train, and have adapters too"),
        (["blocks.0.up.*"], ["blocks.0.down"], None),
    ],
)
def test_what_trains_beside_adapters_must_be_whole_modules(trainable, targets, said, tmp_path):
    step = step_of(make(), lora(targets), trainable=trainable)
    if said is None:
        ft.adapters.save(tmp_path / "adapter", step, step.init())
        assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["modules_to_save"] == ["blocks.0.up"]
        bare = step_of(make(), lora(targets))
        with pytest.raises(StructureError, match=r"up\.bias: unexpected .* it trained beside the adapters: name it in"):
            ft.adapters.load(tmp_path / "adapter", bare, bare.init())
        return
    with pytest.raises(StructureError, match=said):
        ft.adapters.save(tmp_path / "adapter", step, step.init())


def test_what_peft_has_no_form_for(tmp_path):
    tied = ft.compose(
        ft.train_step(ft.from_module(make_tiny(), token_loss), ft.optim.sgd(0.1), trainable=["embed.*"]),
        ft.lora(2, targets=["*.up"]),
    )
    with pytest.raises(StructureError, match=r"embed train, and embed\.weight is tied"):
        ft.adapters.save(tmp_path / "a", tied, tied.init())
    twice = make()
    twice.again = twice.head
    step = step_of(twice, lora(["head"]))
    with pytest.raises(StructureError, match="the module head is also again"):
        ft.adapters.save(tmp_path / "a", step, step.init())
    step, state = trained()
    with pytest.raises(StructureError, match=r"adapters\.save: the adapters of this state are merged"):
        ft.adapters.save(tmp_path / "a", step, ft.adapters.merge(step, state))
    with pytest.raises(ComposeError, match="the step has no adapters"):
        ft.adapters.save(tmp_path / "a", step_of(make()), state)
    tree = ft.lora(2, targets=["w"])(ft.train_step(lambda p, b: p["w"].sum(), ft.optim.sgd(0.1)))
    with pytest.raises(StructureError, match="a loss of a tree, but peft's files are for modules"):
        ft.adapters.save(tmp_path / "a", tree, tree.init({"w": torch.ones(2, 2)}))
    assert not [*tmp_path.iterdir()]


# peft itself


@pytest.fixture(scope="module")
def peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft", reason="peft computes what ftrain is compared with")


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 7, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**options, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(**options, vocab_size=7, max_position_embeddings=8)).double()


def logits_loss(model, batch):
    return ft.losses.cross_entropy(model(batch["tokens"]).logits, batch["labels"])


MODELS = {
    "net": (lambda: make(0.0), TARGETS, loss, ["head.*"]),
    "gpt2": (gpt2, ["*.c_attn", "*.c_proj", "*.wte"], logits_loss, ["*.ln_f.*"]),
    "llama": (llama, ["*.q_proj", "*.v_proj", "*.down_proj"], logits_loss, ["lm_head.*"]),
}
models = pytest.mark.parametrize("name", MODELS)
tied = pytest.mark.filterwarnings("ignore:lora. .* is tied to lm_head.weight:UserWarning")
"""As GPT-2 is; peft adapts the embedding alone, too."""


def prepared(name, kind):
    make_model, targets, criterion, beside = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make_model()
    beside = None if name == "net" else beside
    wrapper = lora(targets, **KINDS[kind])
    return model, criterion, lambda: step_of(model, wrapper, criterion=criterion, trainable=beside)


def loaded(peft, model, path, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(copy.deepcopy(model), path, **options)


@tied
@models
@kinds
def test_peft_computes_what_was_trained_here(name, kind, peft, tmp_path):
    model, criterion, build = prepared(name, kind)
    step = build()
    state, _ = train(step)
    ft.adapters.save(tmp_path / "adapter", step, state)
    theirs = loaded(peft, model, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = criterion(theirs, make_batch(9))
    actual = ft.eval_step(step.loss)(state, make_batch(9))["loss"]
    torch.testing.assert_close(actual.value, expected.value, rtol=0, atol=1e-12)
    assert float(actual) != pytest.approx(float(ft.eval_step(step.loss)(step.init(), make_batch(9))["loss"]), abs=1e-3)


@tied
@models
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_gradients_are_those_of_peft(name, kind, peft, tmp_path):
    model, criterion, build = prepared(name, kind)
    step = build()
    state, _ = train(step, 2)
    ft.adapters.save(tmp_path / "adapter", step, state)
    theirs = loaded(peft, model, tmp_path / "adapter", is_trainable=True).train()
    criterion(theirs, make_batch(5)).value.backward()
    expected = {path.replace(".default", ""): p.grad for path, p in theirs.named_parameters() if p.grad is not None}
    moved = step_of(model, step.wrappers[0], criterion=criterion, trainable=step.trainable, optimizer=ft.optim.sgd(1.0))
    start = ft.adapters.load(tmp_path / "adapter", moved, moved.init())
    after, _ = moved(start, make_batch(5))
    trains = {key: leaf - after.params[key] for key, leaf in start.params.items() if leaf is not None}
    assert len(expected) == len(trains)
    for key, gradient in trains.items():
        there = f"base_model.model.{key}" + ".weight" * key.endswith("lora_magnitude_vector")
        there = there if there in expected else there.replace(key, ".modules_to_save.".join(key.rsplit(".", 1)))
        torch.testing.assert_close(
            gradient, expected[there], rtol=1e-9, atol=1e-13, msg=lambda m, key=key: f"{key}: {m}"
        )


@tied
@models
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_what_peft_has_made_is_computed_here(name, kind, peft, tmp_path):
    model, criterion, _ = prepared(name, kind)
    targets = [each.removeprefix("*.") for each in MODELS[name][1] if name != "net"] or ["embed", "up", "down", "head"]
    options = {f"use_{key}": value for key, value in KINDS[kind].items()}
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, **options)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(2)
        theirs = peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False).double().eval()
        theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = criterion(theirs, make_batch(9)).value
    step = step_of(model, ft.adapters.like(tmp_path / "adapter"), criterion=criterion)
    state = ft.adapters.load(tmp_path / "adapter", step, step.init())
    actual = ft.eval_step(step.loss)(state, make_batch(9))["loss"]
    torch.testing.assert_close(actual.value, expected, rtol=0, atol=1e-12)
    assert abs(float(actual) - float(ft.eval_step(step.loss)(step.init(), make_batch(9))["loss"])) > 1e-3


@tied
def test_the_base_in_a_file_of_peft_must_be_ours(peft, tmp_path):
    model, criterion, _ = prepared("gpt2", "lora")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj", "wte"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(copy.deepcopy(model), config)
        theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert any(".base_layer." in name for name in load_file(tmp_path / "adapter" / WEIGHTS))
    step = step_of(model, lora(MODELS["gpt2"][1]), criterion=criterion)
    ft.adapters.load(tmp_path / "adapter", step, step.init())
    with torch.no_grad():
        model.transformer.wte.weight.add_(1e-3)
    with pytest.raises(StructureError, match=r"another base, with other values in lm_head\.weight and 1 more"):
        ft.adapters.load(tmp_path / "adapter", step, step.init())
