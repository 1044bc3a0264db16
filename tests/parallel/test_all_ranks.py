"""A function that exchanges tensors, called by one rank alone (`if rank == 0: ...`), is an error after seconds."""

import re
import time

import pytest

import ftrain as ft
from ftrain.checkpoint import Checkpoints, heartbeats
from ftrain.errors import RankError
from ftrain.parallel import rank_watch
from tests.faults.forks import quiet_forks
from tests.parallel import models
from tests.parallel.processes import started

pytestmark = quiet_forks
SOON = 60.0
"""Seconds; the deadline is 600."""
CALLS = {
    "to_module": (3, lambda step, state: ft.to_module(models.Model().double(), state)),
    "whole": (1, lambda step, state: ft.parallel.whole(state)),
    "evaluate": (0, lambda step, state: ft.evaluate(ft.eval_step(step.loss), state, models.batches(1))),
    "merge": (1, lambda step, state: ft.adapters.merge(step, state)),
    "eval_step": (2, lambda step, state: ft.eval_step(step.loss)(state, next(models.batches(1)))),
}
"""Name -> level, and what the first rank calls."""


def step_of(level=3):
    return models.step_of(ft.sharded(ft.parallel.mesh(), level))


def adapted(level=3):
    return ft.lora(2, targets=["head"])(step_of(level))


def shorten_waits():
    rank_watch.BEAT, heartbeats.PATIENCE = 0.1, 0.5


def calling(tell, rank, name, goes_on):
    shorten_waits()
    level, call = CALLS[name]
    step = adapted(level) if name == "merge" else step_of(level)
    state, _ = step(step.init(seed=5), next(models.batches(1)))
    if rank == 0:
        with pytest.raises(RankError) as caught:
            call(step, state)
        tell(str(caught.value))
    elif goes_on:
        step(state, next(models.batches(1)))
    else:
        rank_watch.watch()._ended.set()
        rank_watch.watch()._note["has_ended"] = True
        rank_watch.watch()._write_heartbeat()


@pytest.mark.parametrize("name", CALLS)
def test_the_error_of_a_rank_that_gathers_alone_says_where_the_others_are(name):
    with started(2, calling, name, True) as ranks:
        text = ranks[0].receive(SOON)
    assert re.match(
        f"{name}: rank 0 has called it, and rank 1 is in step 2(, at block .*)?. The ranks exchange tensors", text
    )


def test_a_rank_whose_program_has_ended_is_not_waited_for():
    with started(2, calling, "to_module", False) as ranks:
        text = ranks[0].receive(SOON)
    assert text.startswith("to_module: rank 0 has called it, and the program of rank 1 has ended after step 1.")


def calling_another(tell, rank):
    step = step_of()
    state, _ = step(step.init(seed=5), next(models.batches(1)))
    for name in ("whole", "evaluate") if rank == 0 else ("evaluate",):
        try:
            CALLS[name][1](step, state)
        except RankError as error:
            tell(str(error))


def test_ranks_that_call_different_functions_exchange_nothing():
    """As when one rank gathers alone, `if rank == 0: ...`, and all ranks evaluate afterwards."""
    with started(2, calling_another) as ranks:
        texts = [rank.receive(SOON) for rank in ranks]
    reason = "has called it, and another rank has called another function in its place"
    assert texts[0].startswith(f"whole: rank 0 {reason}")
    assert texts[1].startswith(f"evaluate: rank 1 {reason}")


def saving(tell, rank, path, function):
    shorten_waits()
    step = adapted(0) if function.startswith("adapters") else step_of()
    state, _ = step(step.init(seed=5), next(models.batches(1)))
    checkpoints = Checkpoints(f"{path}/run", every=1)

    def save():
        with checkpoints:
            checkpoints.save(1, {"state": state})

    calls = {
        "save": lambda: ft.checkpoint.save(f"{path}/a", state),
        "Checkpoints": save,
        "Checkpoints.latest": lambda: checkpoints.latest({"state": state}),
        "adapters.save": lambda: ft.adapters.save(f"{path}/a", step, state),
        "adapters.load": lambda: ft.adapters.load(f"{path}/a", step, state),
    }
    if rank == 0:
        with pytest.raises(RankError) as caught:
            calls[function]()
        tell(str(caught.value))
    else:
        step(state, next(models.batches(1)))


@pytest.mark.parametrize("function", ["save", "Checkpoints", "Checkpoints.latest", "adapters.save", "adapters.load"])
def test_the_error_of_a_rank_that_saves_or_loads_alone_says_where_the_others_are(tmp_path, function):
    with started(2, saving, str(tmp_path), function) as ranks:
        text = ranks[0].receive(SOON)
    name = function.removesuffix(".latest")
    assert re.match(
        rf"{name}: rank 1 did not come within \d+ seconds; rank 1 is in step 2.*Every rank must call it", text
    )


def fitting(tell, rank):
    shorten_waits()
    step = step_of()

    def evaluate(state):
        return ft.evaluate(ft.eval_step(step.loss), state, models.batches(1)) if rank == 0 else {}

    try:
        ft.fit(step, step.init(seed=5), [*models.batches(2)], evaluate=evaluate, progress=False)
    except RankError as error:
        tell(str(error))


def test_an_evaluation_within_fit_on_one_rank_alone_ends_soon():
    with started(2, fitting) as ranks:
        text = ranks[0].receive(SOON)
    assert text.startswith("evaluate: rank 0 has called it, and rank 1 is after step 2, at the end of evaluate")


def all_call(tell, rank):
    shorten_waits()
    step = step_of()
    state = step.init(seed=5)
    for number in range(3):
        if rank == 0 and number == 1:
            time.sleep(3 * heartbeats.PATIENCE)
        ft.to_module(models.Model().double(), state)
        state, _ = step(state, next(models.batches(1)))
    tell(int(state.step))


def test_a_rank_that_comes_late_is_waited_for_while_its_heartbeats_go_on():
    with started(2, all_call) as ranks:
        assert [rank.receive(SOON) for rank in ranks] == [3, 3]
