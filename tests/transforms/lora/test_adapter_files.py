"""The files of adapters: their names and options are peft's, they load to the bit, and digests find every change."""

from collections import Counter
from fnmatch import fnmatchcase

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ftrain as ft
from ftrain.checkpoint import files
from ftrain.checkpoint.safetensors_with_config import TensorsAndConfig, read_safetensors, write_safetensors
from ftrain.errors import CheckpointError
from ftrain.transforms.lora import targets as lora_targets
from tests.bits import assert_same_bits
from tests.transforms.lora.adapter_files import CONFIG, DIGESTS, WEIGHTS, make_peft_files, read_config, update_config
from tests.transforms.lora.models import VARIANTS, adapters_in, make_model, make_step, train


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_adapters_are_loaded_to_the_bit(variant, tmp_path):
    lora = ft.lora(3, 5, targets=["embed", "*.up"], **VARIANTS[variant])
    step = make_step(make_model(), lora, trainable=["head.*"])
    state, _ = train(step)
    ft.adapters.save(tmp_path / "adapter", step, state)
    loaded = ft.adapters.load(tmp_path / "adapter", step, step.init(seed=9))
    assert_same_bits((loaded.params, loaded.frozen), (state.params, state.frozen))
    assert_same_bits(loaded.opt_state, step.init().opt_state)
    like_step = make_step(make_model(), ft.adapters.like(tmp_path / "adapter"), trainable=["head.*"])
    assert repr(like_step) == repr(step)
    assert_same_bits(ft.adapters.load(tmp_path / "adapter", like_step, like_step.init()).params, state.params)


def test_averages_begin_with_the_loaded_adapters(saved_adapter):
    step, state, directory = saved_adapter
    averaging = ft.ema(0.9)(step)
    loaded = ft.adapters.load(directory, averaging, averaging.init())
    assert_same_bits(adapters_in(loaded.slots["ema"]), adapters_in(state.params))


def test_the_names_are_those_of_peft(saved_adapter):
    _, state, directory = saved_adapter
    assert sorted(path.name for path in directory.iterdir()) == [CONFIG, WEIGHTS, DIGESTS]
    tensors, config = load_file(directory / WEIGHTS), read_config(directory)
    assert tensors.keys() == {f"base_model.model.{name}" for name in adapters_in(state.params)}
    assert_same_bits(tensors["base_model.model.blocks.0.up.lora_A.weight"], state.params["blocks.0.up.lora_A.weight"])
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["bias"]) == ("LORA", 3, 5, "none")
    assert config["target_modules"] == ["down", "embed", "head", "up"]
    assert config["modules_to_save"] is config["base_model_name_or_path"] is config["task_type"] is None


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


class Outer(Inner):
    def __init__(self):
        super().__init__()
        self.inner = Inner()


@pytest.mark.parametrize(
    ("targets", "target_modules"),
    [
        (["a", "inner.a"], ["a"]),
        (["inner.a"], ["inner.a"]),
        # Peft compares a list with the ends of names, and a text, a regular expression, with whole names.
        (["a"], "a"),
        (["a", "inner.b"], r"a|inner\.b"),
    ],
    ids=str,
)
def test_target_modules_are_written_so_that_peft_finds_no_others(targets, target_modules, tmp_path):
    step = make_step(Outer(), ft.lora(3, targets=targets), criterion=lambda model, batch: None)
    ft.adapters.save(tmp_path / "adapter", step, step.init(), base_model="outer", task_type="CAUSAL_LM")
    config = read_config(tmp_path / "adapter")
    assert config["target_modules"] == target_modules
    assert (config["base_model_name_or_path"], config["task_type"]) == ("outer", "CAUSAL_LM")


@pytest.mark.parametrize("pattern", ["*.0", "*"])
def test_the_work_grows_with_the_number_of_modules_and_not_with_its_square(pattern, tmp_path, monkeypatch):
    # A mixture of experts has tens of thousands of targets.
    calls = Counter()

    def counted(function, *args):
        calls[function.__name__] += 1
        return function(*args)

    monkeypatch.setattr(lora_targets, "fnmatchcase", lambda *args: counted(fnmatchcase, *args))
    walk = nn.Module.named_modules

    def named_modules(module, *args, **kwargs):
        for pair in walk(module, *args, **kwargs):
            calls["named_modules"] += 1
            yield pair

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)

    def count(experts):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(experts)))
        calls.clear()
        step = make_step(model, ft.lora(1, targets=[pattern]), criterion=lambda model, batch: None)
        ft.adapters.save(tmp_path / str(experts), step, step.init())
        step = make_step(model, ft.adapters.like(tmp_path / str(experts)), criterion=lambda model, batch: None)
        ft.adapters.load(tmp_path / str(experts), step, step.init())
        return sum(calls.values())

    assert count(64) < 3 * count(32)


def test_the_directory_appears_only_when_all_is_written(saved_adapter, tmp_path, monkeypatch):
    step, state, directory = saved_adapter
    with pytest.raises(CheckpointError, match="exists already"):
        ft.adapters.save(directory, step, state)

    def write_to_full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write", write_to_full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        ft.adapters.save(tmp_path / "second", step, state)
    assert [*tmp_path.iterdir()] == [directory]


def test_every_flipped_bit_is_found_and_named(tmp_path):
    directory, names = tmp_path / "adapter", (WEIGHTS, CONFIG)
    tensors = {"base_model.model.a.lora_A.weight": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}
    write_safetensors(directory, names, TensorsAndConfig(tensors, {"note": "text"}, {"peft_type": "LORA", "r": 3}))
    data_start = 8 + int.from_bytes((directory / WEIGHTS).read_bytes()[:8], "little")
    # The tensor of float32, of 48 bytes, comes first.
    b_start = data_start + 48

    def tensor_at(name, position):
        if name != WEIGHTS or position < data_start:
            return ""
        return "base_model.model.a.lora_A.weight" if position < b_start else "b"

    for name in (WEIGHTS, CONFIG, DIGESTS):
        content = (directory / name).read_bytes()
        for position in range(len(content)):
            flipped = bytearray(content)
            flipped[position] ^= 1 << position % 8
            (directory / name).write_bytes(flipped)
            with pytest.raises(CheckpointError, match=rf"adapter.*{name}.*{tensor_at(name, position)}"):
                read_safetensors(directory, names)
        for damaged in (content[:-1], content + b" "):
            (directory / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=rf"adapter.*({name}|SafetensorError: .* not fully covered)"):
                read_safetensors(directory, names)
        (directory / name).write_bytes(content)
    assert torch.equal(read_safetensors(directory, names).tensors["b"], tensors["b"])


def test_files_that_are_changed_on_purpose_load_without_their_digests(saved_adapter):
    step, state, directory = saved_adapter
    update_config(directory, base_model_name_or_path="mine")
    with pytest.raises(CheckpointError, match=f"{CONFIG}: the bytes are not those.*remove {DIGESTS}"):
        ft.adapters.load(directory, step, state)
    (directory / DIGESTS).unlink()
    assert_same_bits(ft.adapters.load(directory, step, step.init()).params, state.params)


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": "gaussian", "layers_pattern": None, "revision": "main"}, {"lora_dropout": 0.5}]
)
def test_options_of_peft_that_do_not_change_the_result_are_ignored(saved_adapter, options):
    step, state, directory = saved_adapter
    make_peft_files(directory, **options)
    assert_same_bits(ft.adapters.load(directory, step, step.init()).params, state.params)
