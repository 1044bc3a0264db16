"""A loss that returns other metrics on one rank than on the others: an error that names them, and no wrong sum."""

import pytest
import torch

import ftrain as ft
from ftrain.checkpoint import heartbeats
from ftrain.errors import LossError, RankError
from ftrain.parallel import rank_watch
from tests.faults.forks import quiet_forks
from tests.parallel import models
from tests.parallel.processes import started

pytestmark = quiet_forks
AT, STEPS = 3, 4
"""The step in which the metrics change, and the number of steps."""


def extra(metrics):
    return {**metrics, "extra": torch.ones(())}


def fewer(metrics):
    return {"size": metrics["size"]}


def renamed(metrics):
    return {"other": metrics["size"], "sizes": metrics["sizes"]}


def as_mean(metrics):
    return {**metrics, "size": ft.Mean(metrics["size"], torch.ones(()))}


CHANGES = {
    "extra": (extra, "the metric extra, which it did not in the last step"),
    "fewer": (fewer, "no longer the metric sizes of the last step"),
    "renamed": (renamed, "the metric other, which it did not in the last step"),
    "as a Mean": (as_mean, "the metric size as a Mean, which was a tensor in the last step"),
}
"""Name -> a function that changes metrics, and the text of the error about the change."""


def training(tell, rank, name, level, changing):
    """Train; on some ranks the metrics of one step change. Tell the names of the metrics of each step, or the error."""
    rank_watch.BEAT, rank_watch.PATIENCE, heartbeats.PATIENCE = 0.1, 0.5, 0.5
    calls = []

    def loss(model, batch):
        mean, metrics = models.loss(model, batch)
        calls.append(batch)
        return mean, CHANGES[name][0](metrics) if len(calls) == AT and rank in changing else metrics

    step = models.step_of(ft.sharded(ft.parallel.mesh(), level), criterion=loss)
    state, names = step.init(seed=5), []
    try:
        for batch in models.batches(STEPS):
            state, metrics = step(state, batch)
            names.append(sorted(metrics.keys() - {"lr"}))
    except (LossError, RankError) as error:
        tell([len(names), type(error).__name__, str(error)])
    else:
        tell(names)


@pytest.mark.parametrize(
    ("name", "level"),
    [("extra", 0), ("renamed", 3), *(pytest.param(name, 1, marks=pytest.mark.exhaustive) for name in CHANGES)],
)
def test_a_change_on_one_rank_alone_is_an_error_that_names_it_on_all(name, level):
    """Ranks send their numbers as one vector: one more would end the program of another rank, or be added to others."""
    text = CHANGES[name][1]
    with started(2, training, name, level, [1]) as ranks:
        first, second = (rank.receive() for rank in ranks)
        assert [rank.wait() for rank in ranks] == [0, 0]
    assert second[:2] == [AT - 1, "LossError"]
    assert second[2].startswith(f"sharded: the loss returns {text}, and not on every rank: rank 0 is in step {AT}")
    assert first[:2] == [AT - 1, "RankError"]
    assert f"rank 1 failed in step {AT}, where its loss returns {text}: LossError: sharded: the loss" in first[2]


def test_a_change_on_all_ranks_is_no_error():
    with started(2, training, "extra", 0, [0, 1]) as ranks:
        names_by_rank = [rank.receive() for rank in ranks]
        assert [rank.wait() for rank in ranks] == [0, 0]
    usual = ["loss", "size", "sizes"]
    assert names_by_rank == [[usual, usual, sorted([*usual, "extra"]), usual]] * 2
