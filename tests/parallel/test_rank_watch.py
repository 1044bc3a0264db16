"""A rank that dies, hangs or fails is named by an error on the others within the deadline, with what it was doing."""

import dataclasses
import logging
import os
import re
import signal
import time

import pytest
import torch

import ftrain as ft
from ftrain.backends import cpu, registry
from ftrain.errors import OptionError, RankError
from ftrain.parallel import rank_watch
from ftrain.training import run
from tests.faults.forks import FOREVER, quiet_forks
from tests.parallel import models
from tests.parallel.processes import started

SIZE, FAULTY, AT = 3, 2, 3
"""Ranks; the one that fails; its last step."""
SECONDS = 2.0
"""The deadline."""


def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(*_):
    time.sleep(FOREVER)


def has_no_memory(*_):
    raise torch.OutOfMemoryError("tried to allocate 3 GiB")


def is_stopped(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {
    "dies before a step": (dies, False, r"rank 2 died or hangs, and was (in|after) step [12]"),
    "dies in its loss": (dies, True, r"rank 2 died or hangs, and was .* step [123]"),
    "hangs before a step": (hangs, False, r"rank 2 is after step 2, and hangs there or runs another program"),
    "hangs in its loss": (hangs, True, r"rank 2 is still in step 3, and hangs there"),
    "is stopped": (is_stopped, True, r"rank 2 died or hangs, and was .* step [123]"),
    "runs out of memory": (has_no_memory, True, r"rank 2 failed in step 3: OutOfMemoryError: tried to allocate 3 GiB"),
}
"""Name -> the fault, whether it happens in the loss or before the step, and the text of the others' error.

Of a rank that has died they know what it did at its last heartbeat, which may be some steps ago.
"""


def training(tell, rank, name):
    fault, in_loss, _ = FAULTS[name]
    rank_watch.BEAT, rank_watch.PATIENCE = 0.1, 1.5

    def loss(model, batch):
        if rank == FAULTY and batch["x"].sum() == 0:
            fault()
        return models.loss(model, batch)

    ft.parallel.mesh()  # To start the processes may take longer than the deadline.
    step = models.step_of(ft.sharded(ft.parallel.mesh(timeout=SECONDS)), criterion=loss)
    state = step.init(seed=5)
    for number, batch in enumerate(models.batches(AT), 1):
        if number == AT and not in_loss and rank == FAULTY:
            fault()
        last = {**batch, "x": torch.zeros_like(batch["x"])}
        start_of_step = time.monotonic()
        try:
            state, _ = step(state, batch if number < AT else last)
        except Exception as error:
            tell([number, time.monotonic() - start_of_step, type(error).__name__, str(error)])
            return


NOT_EXHAUSTIVE = "dies before a step", "hangs before a step", "runs out of memory"


@quiet_forks
@pytest.mark.parametrize(
    "name",
    [name if name in NOT_EXHAUSTIVE else pytest.param(name, marks=pytest.mark.exhaustive) for name in FAULTS],
)
def test_a_rank_that_fails_is_named_on_every_other_rank_within_the_deadline(name):
    # When a rank fails at once, the others wait at the first block; when it stops, they may wait at a later one.
    place = ", at block blocks.0" if name == "runs out of memory" else r"(, at block blocks\.\d)?"
    with started(SIZE, training, name) as ranks:
        for number, rank in enumerate(ranks[:FAULTY]):
            step, seconds, error_name, text = rank.receive()
            assert (step, error_name) == (AT, RankError.__name__)
            assert re.match(rf"sharded: step {AT} did not end on rank {number}{place}: {FAULTS[name][2]}", text), text
            # The limit is generous, because the machine may be busy. Without a deadline it would be half an hour.
            assert seconds < 15 * SECONDS


def test_an_error_of_a_collective_without_the_name_of_its_library_is_recognised():
    assert rank_watch.is_failed_collective(RuntimeError("Application timeout caused pair closure"))
    assert not rank_watch.is_failed_collective(RuntimeError("timeout of the application"))


def test_with_a_device_errors_of_the_library_of_the_host_are_recognised_too(monkeypatch):
    monkeypatch.setattr(rank_watch.backends, "default", lambda: dataclasses.replace(cpu.BACKEND, distributed="nccl"))
    for text in ("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer", "NCCL error: remote"):
        assert rank_watch.is_failed_collective(RuntimeError(text))


@pytest.mark.parametrize(
    ("number", "doing", "text"),
    [
        (3, "in", "rank 1 is still in step 3, and hangs there"),
        (3, "after", "rank 1 is still after step 3, and hangs there"),
        (2, "after", "rank 1 is after step 2, and hangs there or runs another program"),
    ],
)
def test_a_rank_is_behind_if_it_has_not_begun_the_step_of_this_rank(monkeypatch, number, doing, text):
    watch = rank_watch.Watch()
    watch._note |= {"number": 3, "doing": "in"}
    heartbeats = iter([{1: {**watch._note, "number": number, "doing": doing, "beats": beats}} for beats in (1, 2)])
    monkeypatch.setattr(watch, "_read_heartbeats", lambda: next(heartbeats))
    monkeypatch.setattr(rank_watch, "PATIENCE", 0.0)
    gone, (why, *_) = watch._describe_others()
    assert (gone, why) == ([], text)


def waiting_for_a_device(tell, rank):
    """Rank 0 waits for its device, which waits for rank 1: no collective fails."""
    rank_watch.BEAT, rank_watch.PATIENCE, rank_watch.ALARM = 0.1, 1.5, 1.0
    ft.parallel.mesh()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ftrain").addHandler(handler)
    deadline = time.monotonic() + 60
    while not messages and time.monotonic() < deadline:
        time.sleep(0.1)
    tell(messages)


@quiet_forks
def test_a_rank_without_progress_logs_which_other_rank_has_died():
    with started(2, waiting_for_a_device) as ranks:
        (message,) = ranks[0].receive()
    pattern = r"rank 0 waits after step 0: rank 1 (died or hangs, and was after step 0|never came)"
    assert re.match(pattern, message), message


def test_after_a_rank_error_nothing_is_read_from_a_device(monkeypatch):
    """The device may wait for that rank forever."""
    reads = []
    monkeypatch.setattr(run, "read_steps", lambda steps: reads.append(steps) or [])

    def step(state, batch):
        if batch:
            raise RankError("sharded: step 2 did not end")
        return state, {"loss": torch.zeros(())}

    for immediate in (False, True):
        monkeypatch.setitem(registry._records, "cpu", dataclasses.replace(cpu.BACKEND, immediate=immediate))
        reads.clear()
        with pytest.raises(RankError):
            ft.fit(step, {"w": torch.zeros(1)}, [0, 1], progress=False)
        assert bool(reads) == immediate


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), "600", None])
def test_the_deadline_must_be_a_positive_number(timeout):
    with pytest.raises(OptionError, match="mesh: timeout is"):
        ft.parallel.mesh(timeout=timeout)


def test_a_retried_step_keeps_its_number_and_the_steps_of_another_run_get_later_ones():
    watch, numbers = rank_watch.Watch(), []
    for count in (0, 0, 1, 7, 0, 1):
        watch.begin(torch.tensor(count))
        numbers.append(watch._note["number"])
    assert numbers == [1, 1, 2, 8, 9, 10]


def test_an_error_without_a_text_is_named_by_its_class():
    watch = rank_watch.Watch()
    watch.report_failure(KeyboardInterrupt())
    assert watch._note["failure"] == "KeyboardInterrupt"
