"""Files of adapters that are refused: damaged, with options of another computation, of another step or base."""

import math

import pytest
import torch
from safetensors.torch import load, save

import ftrain as ft
from ftrain.errors import CheckpointError, ComposeError, OptionError, StructureError
from tests.bits import assert_same_bits
from tests.laws.models import make_model as make_tiny
from tests.laws.models import token_loss
from tests.transforms.lora.adapter_files import CONFIG, WEIGHTS, make_peft_files
from tests.transforms.lora.models import TARGETS, make_model, make_step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', which ft.lora does not support"),
        ({"bias": "all"}, r"has bias='all', which ft\.lora does not support; .*ft\.from_module\(peft_model\)"),
        ({"rank_pattern": {"up": 8}}, r"rank_pattern=\{'up': 8\}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"layer_replication": [[0, 4]], "lora_bias": True}, r"layer_replication=\[\[0, 4\]\], lora_bias=True"),
        ({"some_option_of_tomorrow": 1}, "some_option_of_tomorrow=1"),
    ],
)
def test_options_of_another_computation(saved_adapter, options, message):
    step, state, directory = saved_adapter
    make_peft_files(directory, **options)
    with pytest.raises(CheckpointError, match=message):
        ft.adapters.load(directory, step, state)
    with pytest.raises(CheckpointError, match=message):
        ft.adapters.like(directory)


@pytest.mark.parametrize(
    ("options", "load_message", "like_message"),
    [
        ({"r": "three"}, "r: found 'three', the step has rank=3", "rank is 'three'"),
        ({"r": None}, "r: found None", "rank is None"),
        ({"lora_alpha": math.nan}, "lora_alpha: found nan", "alpha is nan"),
    ],
)
def test_options_in_a_file_out_of_their_range(saved_adapter, options, load_message, like_message):
    step, state, directory = saved_adapter
    make_peft_files(directory, **options)
    with pytest.raises(StructureError, match=load_message):
        ft.adapters.load(directory, step, state)
    with pytest.raises(OptionError, match=like_message):
        ft.adapters.like(directory)


@pytest.mark.parametrize(
    ("lora", "messages"),
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
def test_adapters_of_other_options_than_those_of_the_step(saved_adapter, lora, messages):
    _, _, directory = saved_adapter
    step = make_step(make_model(), lora)
    with pytest.raises(StructureError, match="does not fit the step") as raised:
        ft.adapters.load(directory, step, step.init())
    for message in messages:
        assert raised.match(message)


def test_adapters_of_another_base(saved_adapter):
    _, state, directory = saved_adapter
    other_base = make_model()
    with torch.no_grad():
        other_base.blocks[1].norm.weight.mul_(1.001)
        other_base.head.bias.add_(1e-3)
    step = make_step(other_base, ft.lora(3, 5, targets=TARGETS))
    with pytest.raises(
        StructureError, match=r"another base, with other values in blocks\.1\.norm\.weight and 1 more; any_base=True"
    ):
        ft.adapters.load(directory, step, step.init())
    assert_same_bits(ft.adapters.load(directory, step, step.init(), any_base=True).params, state.params)


def test_a_base_in_another_dtype_may_be_the_same(saved_adapter):
    _, _, directory = saved_adapter
    step = make_step(make_model(dtype=torch.float32), ft.lora(3, 5, targets=TARGETS))
    loaded = ft.adapters.load(directory, step, step.init())
    assert loaded.params["head.lora_A.weight"].dtype == torch.float32


def change_prefix(content):
    """Return a file of safetensors whose names do not begin as those of peft."""
    return save({name.removeprefix("base_model."): tensor for name, tensor in load(content).items()})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (WEIGHTS, lambda content: content[:-8], "adapter: cannot be read: SafetensorError"),
        (WEIGHTS, lambda content: b"", "adapter: cannot be read: SafetensorError"),
        (
            WEIGHTS,
            change_prefix,
            r"adapter_model\.safetensors has model\..*, which does not begin with base_model\.model\.",
        ),
        (CONFIG, lambda content: content[:-5], "cannot be read: JSONDecodeError"),
        (CONFIG, lambda content: b"[]", r"adapter_config\.json holds a list"),
    ],
    ids=["cut weights", "empty weights", "other names", "cut config", "no dict"],
)
def test_damaged_files_of_peft(saved_adapter, name, change, message):
    step, state, directory = saved_adapter
    make_peft_files(directory)
    (directory / name).write_bytes(change((directory / name).read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        ft.adapters.load(directory, step, state)


def test_missing_files(saved_adapter, tmp_path):
    step, state, directory = saved_adapter
    (directory / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"FileNotFoundError: .*adapter_config\.json"):
        ft.adapters.load(directory, step, state)
    with pytest.raises(CheckpointError, match=r"FileNotFoundError: .*nowhere"):
        ft.adapters.like(tmp_path / "nowhere")


def assert_not_saved(directory, step, state, error, message):
    """Check that saving in a directory, which is in an empty one, raises an error and writes nothing."""
    with pytest.raises(error, match=message):
        ft.adapters.save(directory, step, state)
    assert not [*directory.parent.iterdir()]


def test_a_trained_weight_that_is_tied_is_not_saved(tmp_path):
    step = make_step(make_tiny(), ft.lora(2, targets=["*.up"]), criterion=token_loss, trainable=["embed.*"])
    assert_not_saved(tmp_path / "a", step, step.init(), StructureError, r"embed train, and embed\.weight is tied")


def test_a_target_that_the_model_has_twice_is_not_saved(tmp_path):
    model = make_model()
    model.alias = model.head
    step = make_step(model, ft.lora(2, targets=["head"]))
    assert_not_saved(tmp_path / "a", step, step.init(), StructureError, "the module head is also alias")


def test_merged_adapters_are_not_saved(tmp_path):
    step = make_step(make_model(), ft.lora(2, targets=["head"]))
    merged = ft.adapters.merge(step, step.init())
    message = r"adapters\.save: the adapters of this state are merged"
    assert_not_saved(tmp_path / "a", step, merged, StructureError, message)


def test_a_state_without_adapters_is_not_saved(tmp_path):
    step = make_step(make_model())
    assert_not_saved(tmp_path / "a", step, step.init(), ComposeError, "the step has no adapters")


def test_adapters_of_a_tree_are_not_saved(tmp_path):
    step = ft.lora(2, targets=["w"])(ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(0.1)))
    state = step.init({"w": torch.ones(2, 2)})
    message = "a loss of a tree, but peft's files are for modules"
    assert_not_saved(tmp_path / "a", step, state, StructureError, message)
