"""Entrants of the bench: all of them clip, and other libraries have the options that they should have."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench.__main__
from bench import evaluation, registry
from bench.__main__ import main
from bench.cases import c13
from bench.gate import ClosedError
from bench.peers import accelerate_loop
from bench.registry import HAND_EAGER, JAX, OURS_COMPILED, OURS_EAGER, PEFT, TRAINERS
from bench.settings import Settings
from bench.tasks import MissingError, Task
from bench.timing import make_racer
from tests.exhaustive import exhaustive

ROOT = Path(__file__).parents[1]
SETTINGS = Settings(rounds=1, seconds=0.0, tiny=True, compile_backend="eager")


def unexpected(*arguments, **options):
    raise ValueError("this must not be made")


# Trainers and JAX clip by the same code with default and with best options.
OTHERS = [*registry.HAND[1:], c13.ADAPTED, *(entrant for entrant in TRAINERS if not entrant.best), JAX[0], PEFT]


@pytest.mark.parametrize(
    "entrant", [HAND_EAGER, OURS_EAGER, OURS_COMPILED, *exhaustive(OTHERS)], ids=lambda entrant: entrant.name
)
def test_every_entrant_clips(entrant):
    try:
        entrant.require()
    except MissingError as error:
        pytest.skip(str(error))
    # A gradient of such a norm is nothing beside the epsilon of AdamW, so nothing is updated.
    for max_norm, trains in ((1.0, True), (1e-30, False)):
        racer = make_racer(entrant, dataclasses.replace(SETTINGS.task("gpt128"), max_norm=max_norm))
        first, second = racer.losses(2)
        racer.close()
        assert (first != second) == trains


def test_the_versions_of_all_peers_are_pinned():
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()}
    peers = (ROOT / "bench/peers.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert {line.partition(">=")[0] for line in peers} <= pinned


def test_batches_of_the_trainer_are_not_broadcast(monkeypatch, tmp_path):
    data_loader = pytest.importorskip("accelerate.data_loader")
    hf_trainer = pytest.importorskip("bench.peers.hf_trainer")
    monkeypatch.setattr(data_loader, "DataLoaderDispatcher", unexpected)
    monkeypatch.chdir(tmp_path)
    task, recorded = SETTINGS.task("mlp"), []

    def batches():
        yield from [task.batch()] * 3
        raise ClosedError

    gate = SimpleNamespace(record=recorded.append)
    monkeypatch.setattr(hf_trainer.GateDataset, "__iter__", lambda self: batches())
    with pytest.raises(ClosedError):
        hf_trainer.drive(task, gate)
    assert len(recorded) >= 2


@pytest.mark.parametrize("fused", [False, True])
def test_accelerate_gives_ddp_the_options_of_the_entrant(fused, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    given = []

    class Recording(accelerate.Accelerator):
        def __init__(self, *args, **options):
            given.extend(options["kwargs_handlers"])
            super().__init__(*args, **options)

    monkeypatch.setattr(accelerate, "Accelerator", Recording)
    accelerate_loop.make(SETTINGS.task("null").with_options(fused=fused))
    (options,) = given
    assert (options.gradient_as_bucket_view, options.static_graph) == (fused, fused)


def test_the_loop_that_evaluates_runs_in_inference_mode(monkeypatch):
    modes = []
    monkeypatch.setattr(
        Task, "loss", lambda *_: (modes.append(torch.is_inference_mode_enabled()), torch.tensor(1.0))[1]
    )
    assert evaluation.by_hand(SETTINGS.task("null"))() == 1.0
    assert modes == [True] * evaluation.BATCHES


def test_all_processes_run_on_as_many_cores_as_they_have_threads(monkeypatch):
    limits = []
    monkeypatch.setattr(bench.__main__, "_limit_cores", limits.append)
    monkeypatch.setattr(bench.__main__, "_run", lambda *_: False)
    monkeypatch.setattr(bench.__main__, "_report", lambda *_: None)
    assert main(["--tiny", "--case", "C1"]) == 0
    assert limits == [torch.get_num_threads()]
