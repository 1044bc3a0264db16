"""Frozen parameters are written once: the checkpoints of a run share their file until one of them changes."""

import errno
import os
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.checkpoint import Checkpoints, files
from ftrain.errors import CheckpointError
from tests.checkpoint.trees import assert_trees_equal

FROZEN, TRAINED, INDEX = (
    f"params/model{end}" for end in ("-frozen.safetensors", "-trained.safetensors", ".safetensors.index.json")
)


def fine_tuned():
    """Return a step that trains a part of a model with dropout, its state, and a batch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    loss = ft.from_module(model, lambda model, batch: model(batch).square().mean())
    step = ft.train_step(loss, ft.optim.adamw(0.1), trainable=["2.*"])
    return step, step.init(seed=1), torch.randn(5, 3)


def file_numbers(checkpoints):
    """Return the number of the file of frozen parameters on the disk, for each checkpoint."""
    return [(checkpoints.path(step) / FROZEN).stat().st_ino for step in checkpoints.steps()]


@pytest.mark.parametrize(
    "wrappers", [(), (ft.donated(),), (ft.compiled(backend="aot_eager"),)], ids=["pure", "donated", "compiled"]
)
def test_a_run_writes_frozen_parameters_once(wrappers, tmp_path):
    step, state, batch = fine_tuned()
    step, saved = ft.compose(step, *wrappers), {}
    with Checkpoints(tmp_path, every=1, keep=2) as checkpoints:
        for number in (1, 2, 3):
            state, _ = step(state, batch)
            saved[number] = ft.tree.map(torch.clone, state)
            checkpoints.save(number, {"state": state})
    assert checkpoints.steps() == [2, 3]
    assert len({*file_numbers(checkpoints)}) == 1
    for number in (2, 3):
        ft.checkpoint.verify(checkpoints.path(number))
        assert_trees_equal(ft.checkpoint.load(checkpoints.path(number))["state"], saved[number])


CHANGES = {
    "in place": lambda leaf: leaf.add_(1),
    "through data": lambda leaf: (leaf.data.mul_(2), leaf)[1],
    "through numpy": lambda leaf: (leaf.numpy().fill(7.5), leaf)[1],
    "another tensor": lambda leaf: leaf + 1,
    "of other rows": lambda leaf: leaf.flip(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_parameter_that_has_changed_is_written_again(change, tmp_path):
    _, state, _ = fine_tuned()
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": state}, wait=True)
        before = state.frozen["0.weight"].clone()
        changed = CHANGES[change](state.frozen["0.weight"])
        state = replace(state, frozen={**state.frozen, "0.weight": changed})
        expected = changed.clone()
        assert not torch.equal(before, expected)
        checkpoints.save(2, {"state": state})
    loaded = [ft.checkpoint.load(checkpoints.path(step))["state"].frozen["0.weight"] for step in (1, 2)]
    assert torch.equal(loaded[0], before)
    assert torch.equal(loaded[1], expected)


ODD = {
    "three bytes": lambda: torch.tensor([True, False, True]),
    "expanded": lambda: torch.randn(1, 3).expand(5, 3),
    "beside eight bytes": lambda: torch.randn(9, dtype=torch.float32)[1:],
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "transposed": lambda: torch.randn(3, 5).T,
    "float8": lambda: torch.randn(11).to(torch.float8_e4m3fn),
    "empty": lambda: torch.empty(0, 2),
    "scalar": lambda: torch.tensor(2.5, dtype=torch.bfloat16),
    "inference": torch.inference_mode()(lambda: torch.randn(3)),
}


@pytest.mark.parametrize("case", ODD)
def test_any_tensor_may_be_frozen(case, tmp_path):
    _, state, _ = fine_tuned()
    state = replace(state, frozen={**state.frozen, "extra": ODD[case]()})
    with Checkpoints(tmp_path, every=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"state": state}, wait=True)
        assert len({*file_numbers(checkpoints)}) == 1
        assert_trees_equal(checkpoints.latest({"state": state}).parts["state"], state)


def test_without_hard_links_every_checkpoint_has_a_file_of_its_own(tmp_path, monkeypatch):
    def refuse(path, new):
        raise OSError(errno.EPERM, "Operation not permitted")

    _, state, _ = fine_tuned()
    monkeypatch.setattr(os, "link", refuse)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"state": state}, wait=True)
    assert len({*file_numbers(checkpoints)}) == 2
    assert_trees_equal(checkpoints.latest().parts["state"], state)


@pytest.mark.parametrize("reopen", [False, True], ids=["while it is open", "between two runs"])
def test_a_checkpoint_that_was_removed_is_not_shared(reopen, tmp_path):
    _, state, _ = fine_tuned()
    checkpoints = Checkpoints(tmp_path, every=1)
    with checkpoints:
        checkpoints.save(1, {"state": state}, wait=True)
        if not reopen:
            shutil.rmtree(checkpoints.path(1))
            checkpoints.save(2, {"state": state}, wait=True)
    if reopen:
        # Another run with other frozen parameters writes to the same directory.
        shutil.rmtree(checkpoints.path(1))
        zeros = replace(state, frozen=ft.tree.map(torch.zeros_like, state.frozen))
        ft.checkpoint.save(checkpoints.path(1), {"state": zeros}, step=1)
        with checkpoints:
            checkpoints.save(2, {"state": state}, wait=True)
    assert_trees_equal(ft.checkpoint.load(checkpoints.path(2))["state"], state)


def test_a_save_that_failed_is_not_shared(tmp_path, monkeypatch):
    _, state, _ = fine_tuned()
    changed = replace(state, frozen=ft.tree.map(lambda leaf: leaf + 1, state.frozen))
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": state}, wait=True)
        with monkeypatch.context() as broken:
            broken.setattr(files, "write", lambda descriptor, data: files.names("/nowhere"))
            with pytest.raises(CheckpointError):
                checkpoints.save(2, {"state": changed}, wait=True)
        checkpoints.save(3, {"state": changed}, wait=True)
        checkpoints.save(4, {"state": changed}, wait=True)
    assert_trees_equal(ft.checkpoint.load(checkpoints.path(4))["state"], changed)
    numbers = file_numbers(checkpoints)
    assert numbers[1] == numbers[2] != numbers[0]


def test_an_old_checkpoint_of_one_file_is_continued(tmp_path):
    """The newest checkpoint has all parameters in one file, as `save` writes them."""
    step, state, batch = fine_tuned()
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"state": state}, wait=True)
        run = checkpoints._run
    shutil.rmtree(checkpoints.path(1))
    ft.checkpoint.save(checkpoints.path(1), {"state": state}, step=1, run=run)
    with checkpoints:
        actual = checkpoints.latest({"state": step.init()}).parts["state"]
        assert_trees_equal(actual, state)
        checkpoints.save(1, {"state": actual}, wait=True)
        checkpoints.save(2, {"state": step(actual, batch)[0]}, wait=True)
    assert len({*file_numbers(checkpoints)}) == 1


def test_readers_of_hugging_face_find_both_files(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    step = ft.train_step(ft.from_module(model), ft.optim.adamw(0.1), trainable=["*.ln_f.*"])
    tokens = torch.arange(6).reshape(1, 6)
    state, _ = step(step.init(), {"input_ids": tokens, "labels": tokens})
    with Checkpoints(tmp_path, every=1, texts={"params/config.json": config.to_json_string()}) as checkpoints:
        checkpoints.save(1, {"state": state})
    folder = checkpoints.path(1) / "params"
    assert (folder.parent / TRAINED).stat().st_size < (folder.parent / FROZEN).stat().st_size
    actual = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    from_files = step.init(folder)
    ft.to_module(model, state)
    with torch.no_grad():
        assert torch.equal(actual(tokens).logits, model.eval()(tokens).logits)
    assert_trees_equal((from_files.params, from_files.frozen), (state.params, state.frozen))


@pytest.mark.parametrize("name", [FROZEN, INDEX])
def test_texts_with_the_names_of_these_files_are_refused(name, tmp_path):
    _, state, _ = fine_tuned()
    with (
        Checkpoints(tmp_path, every=1, texts={name: "{}"}) as checkpoints,
        pytest.raises(ft.errors.OptionError, match="a file that the checkpoint does not have"),
    ):
        checkpoints.save(1, {"state": state}, wait=True)
