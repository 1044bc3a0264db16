"""Paths as arguments: in the home directory, relative ones, and links."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch._dynamo import register_backend

import ftrain as ft


def lora_step():
    loss = ft.from_module(torch.nn.Sequential(torch.nn.Linear(2, 2)), lambda model, x: model(x).square().mean())
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.lora(1, targets=["0"]))


def save_adapters():
    step = lora_step()
    ft.adapters.save("~/here", step, step.init())
    ft.adapters.load("~/here", step, step.init())
    ft.adapters.like("~/here")


def open_checkpoints():
    with ft.Checkpoints("~/here", every=1):
        pass


def write_and_read_tokens():
    ft.data.write_tokens("~/here.npy", [np.arange(5)])
    ft.data.TokenFile("~/here.npy", 2)
    ft.data.TokenDocuments("~/here.npy")


def save_and_load():
    ft.checkpoint.save("~/here", {"x": torch.ones(2)})
    ft.checkpoint.load("~/here")
    ft.checkpoint.verify("~/here")


def init_from_file():
    model = torch.nn.Linear(2, 2)
    folder = ft.Checkpoints("~/here", every=1).directory
    folder.mkdir()
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    ft.train_step(ft.from_module(model, lambda model, x: model(x).mean()), ft.optim.sgd(0.1)).init("~/here")


@register_backend
def ftrain_makes_inductors_cache_folder(graph, inputs):
    Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).mkdir()
    return graph.forward


def compile_into_a_cache():
    step = ft.compose(
        ft.train_step(lambda params, x: (params["w"] * x).square().sum(), ft.optim.sgd(0.1)),
        ft.compiled(cache_dir="~/here", backend="ftrain_makes_inductors_cache_folder"),
    )
    step(step.init({"w": torch.ones(2)}), torch.ones(2))


CASES = {
    "Checkpoints": open_checkpoints,
    "jsonl": lambda: ft.loggers.jsonl("~/here")({"step": 1}),
    "plot": lambda: ft.schedules.plot(ft.schedules.constant(1.0), steps=3, path="~/here.png"),
    "offload": lambda: ft.offload("opt_state", directory="~/here"),
    "adapters": save_adapters,
    "tokens": write_and_read_tokens,
    "save": save_and_load,
    "init": init_from_file,
    "compiled": compile_into_a_cache,
}


@pytest.mark.parametrize("name", CASES)
def test_a_path_may_begin_with_the_home_directory(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    CASES[name]()
    assert list((tmp_path / "home").glob("here*"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_tilde_before_an_unknown_user_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ft.checkpoint.save("~nobody-of-this-name", {"x": torch.ones(2)})
    assert (tmp_path / "~nobody-of-this-name").is_dir()


def test_a_relative_path_stays_when_the_program_changes_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def evaluate(state):
        monkeypatch.chdir(tmp_path / "elsewhere")
        return {"loss": 1.0}

    step = ft.train_step(lambda params, x: (params["w"] * x).square().sum(), ft.optim.sgd(0.1))
    state, data = step.init({"w": torch.ones(2)}), [torch.ones(2)] * 4
    checkpoints, loggers = ft.Checkpoints("run", every=1), [ft.loggers.jsonl("log.jsonl")]
    options = {"evaluate": evaluate, "evaluate_every": 2, "log_every": 1, "progress": False}
    ft.fit(step, state, data, checkpoints=checkpoints, loggers=loggers, **options)
    assert ft.Checkpoints(tmp_path / "run", every=1).latest().step == 4
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 6  # Four steps and two evaluations.
    assert not list((tmp_path / "elsewhere").iterdir())


def replace_files_by_links(directory):
    """Move each file of a directory elsewhere and put a link in its place, as the cache of Hugging Face does."""
    blobs = directory.with_name("blobs")
    blobs.mkdir()
    for number, file in enumerate([*directory.iterdir()]):
        file.rename(blobs / str(number))
        file.symlink_to(f"../blobs/{number}")


@pytest.mark.parametrize("name", ["model", "link", "model/model.safetensors.index.json"])
def test_files_of_a_model_may_be_links(name, tmp_path):
    model, directory = torch.nn.Linear(2, 2), tmp_path / "model"
    directory.mkdir()
    for key, tensor in model.state_dict().items():
        safetensors.torch.save_file({key: tensor}, directory / f"{key}.safetensors")
    index = {"weight_map": {key: f"{key}.safetensors" for key in model.state_dict()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    replace_files_by_links(directory)
    (tmp_path / "link").symlink_to("model")
    loss = ft.from_module(torch.nn.Linear(2, 2), lambda model, x: model(x).mean())
    state = ft.train_step(loss, ft.optim.sgd(0.1)).init(tmp_path / name)
    assert torch.equal(state.params["weight"], model.weight)
    assert torch.equal(state.params["bias"], model.bias)


def test_files_of_adapters_may_be_links(tmp_path):
    step = lora_step()
    state = step.init(seed=3)
    ft.adapters.save(tmp_path / "adapter", step, state)
    replace_files_by_links(tmp_path / "adapter")
    loaded = ft.adapters.load(tmp_path / "adapter", step, step.init(seed=4))
    trained = [name for name, leaf in state.params.items() if leaf is not None]
    assert all(torch.equal(loaded.params[name], state.params[name]) for name in trained)
