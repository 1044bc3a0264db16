"""Trees and texts that cannot be saved, and paths that hold no checkpoint, are errors that name them."""

import json

import pytest
import torch

import ftrain as ft
from ftrain import checkpoint
from ftrain.checkpoint import files, saving
from ftrain.checkpoint.manifest import NAME, signed
from ftrain.errors import CheckpointError, OptionError


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


def test_a_run_whose_manifest_could_not_be_read_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_BYTES", 10_000)
    step = ft.train_step(lambda params, batch: sum(params.values()).mean() * batch.mean(), ft.optim.sgd(0.1))
    made = []

    def steps(state, batch):
        made.append(state)
        return step(state, batch)

    state = step.init({str(index): torch.ones(1) for index in range(60)})
    checkpoints = ft.Checkpoints(tmp_path, every=1)
    with pytest.raises(CheckpointError, match=r"the manifest of 62 tensors takes .* and 10,000 are read"):
        ft.fit(steps, state, [torch.ones(1)], steps=2, checkpoints=checkpoints)
    assert not made


def test_a_text_that_could_not_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_BYTES", 1000)
    with pytest.raises(OptionError, match=r"texts\['a.json'\] has 1,002 bytes, and 1,000 are read"):
        checkpoint.save(tmp_path / "a", {"x": torch.ones(1)}, texts={"a.json": "ä" * 501})
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


@pytest.mark.parametrize("version", [0, 3, True, 1.0, "2", None, [1]])
def test_another_version_of_the_format_is_refused(version, tmp_path):
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2)})
    body = json.loads((tmp_path / "a" / NAME).read_text())
    del body["digest"]
    text = json.dumps({**body, "version": version}, indent=1).removesuffix("\n}")
    (tmp_path / "a" / NAME).write_bytes(signed(text.encode()))
    with pytest.raises(CheckpointError, match="this ftrain reads 'ftrain checkpoint', versions 1, 2"):
        checkpoint.load(tmp_path / "a")


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
