"""Resuming: runs of another step, and what cannot be saved, are refused before a step."""

from collections import defaultdict, deque
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import CheckpointError, OptionError, StructureError
from tests.training.interrupted_runs import EVERY, STEPS, Positioned, assert_results_equal, batches, fit, make


class Pair(NamedTuple):
    a: int
    b: int


def test_resume_must_needs_a_checkpoint_and_never_refuses_one(tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*resume='must'"):
        fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path / "typo", every=EVERY), resume="must")
    assert not (tmp_path / "typo").exists()
    fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), resume="never", steps=4)
    with pytest.raises(CheckpointError, match="holds a run at step 4"):
        fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), resume="never")
    assert "continues" not in capsys.readouterr().err
    actual = fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), resume="must", progress=True)
    assert f"fit: continues from {tmp_path / 'step-000000000004'}\n" in capsys.readouterr().err
    assert_results_equal(actual, fit(make(), batches()))
    with pytest.raises(OptionError, match="resume is 'yes'"):
        fit(make(), batches(), resume="yes")
    with pytest.raises(OptionError, match="needs checkpoints="):
        fit(make(), batches(), resume="must")


def test_another_model_is_refused_before_a_step(tmp_path):
    fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), steps=4)
    step = make(module=nn.Linear(4, 2))
    with pytest.raises(StructureError, match=r"(?s)params\.weight: missing.*params\.0\.weight: unexpected"):
        fit(step, batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))


def test_a_run_of_another_step_is_refused_and_the_matching_leaves_can_be_loaded(tmp_path):
    checkpoints = ft.Checkpoints(tmp_path, every=EVERY)
    expected = fit(make(), batches(), steps=EVERY, checkpoints=checkpoints)
    averaging = make(ft.ema(0.9))
    with pytest.raises(StructureError, match=r"slots\.ema: missing") as caught:
        fit(averaging, batches(), checkpoints=checkpoints)
    (note,) = caught.value.__notes__
    assert note.startswith(f"fit: {tmp_path} holds a run of another step; pass that step, or use another directory")
    # The note says how to load what matches.
    like = {"state": averaging.init()}
    state = ft.checkpoint.load(checkpoints.path(EVERY), like=like, partial=True)["state"]
    for a, b in zip(ft.tree.leaves(state.params), ft.tree.leaves(expected.state.params), strict=True):
        assert torch.equal(a, b)
    assert int(fit(averaging, batches(), state).state.step) == STEPS


def test_another_number_of_threads_than_in_the_saved_run_is_warned_of(tmp_path):
    fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), steps=4)
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match=r"(?s)may differ in the last bits.*threads: 1, now 2"):
            fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    finally:
        torch.set_num_threads(1)


def test_a_state_or_text_that_cannot_be_saved_is_refused_before_a_step(tmp_path):
    batches_seen = []

    def count(state, batch):
        batches_seen.append(batch)
        return state, {}

    texts = {"../config.json": "{}"}
    with pytest.raises(CheckpointError, match=r"state\.names: \{1, 2\} is a builtins\.set"):
        ft.fit(count, {"names": {1, 2}}, batches(), checkpoints=ft.Checkpoints(tmp_path, every=9), progress=False)
    with pytest.raises(OptionError, match=r"texts has the name '\.\./config\.json'"):
        ft.fit(count, {}, batches(), checkpoints=ft.Checkpoints(tmp_path, every=9, texts=texts), progress=False)
    assert not batches_seen


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "value", [deque([1]), defaultdict(list), Pair(1, 2)], ids=["deque", "defaultdict", "namedtuple"]
)
def test_a_position_that_could_not_be_loaded_again_is_refused(value, later, tmp_path):
    class Buffered(Positioned):
        def state_dict(self):
            return {**super().state_dict(), "buffer": [] if later and not self.at else [value]}

    with pytest.raises(
        CheckpointError, match=r"fit: the position of the data .* holds a .*; use dicts, lists and"
    ) as error:
        fit(make(), Buffered(batches()), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert (error.value.result is not None) == later
    assert not ft.Checkpoints(tmp_path, every=EVERY).steps()


def test_metrics_in_a_deque_or_another_mapping_are_saved_and_loaded(tmp_path):
    def evaluate(state):
        return {"last": deque([torch.tensor(1.0), 2], maxlen=3), "by_class": MappingProxyType({"a": torch.tensor(3)})}

    options = {"evaluate": evaluate, "evaluate_every": EVERY}
    fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), steps=EVERY, **options)
    history = fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), **options).history
    assert history["eval_last"] == [[1.0, 2]] * (STEPS // EVERY)
    assert history["eval_by_class"] == [{"a": 3}] * (STEPS // EVERY)
