"""Ranks that a launcher starts again find those of their own start, and say who is missing."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ftrain._torch import store
from ftrain.errors import OptionError, RankError
from ftrain.parallel import process_group
from ftrain.parallel.process_group import name_of_start

SIZE = 3


@pytest.fixture
def launcher():
    """Return what makes a connection to the store of a launcher, which lives on when ranks are gone."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connected(seconds):
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=seconds))

    return connected


def start(launcher, ranks, seconds=60.0):
    """Return the name of a start in which some ranks come, or the error, of each of these."""

    def rank(number):
        try:
            return name_of_start(launcher(seconds), number, SIZE, seconds)
        except RankError as error:
            return str(error)

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(rank, ranks))


def test_ranks_that_are_started_again_share_a_name_that_no_earlier_start_had(launcher):
    names = [start(launcher, range(SIZE)) for _ in range(2)]
    start(launcher, [1], 0.1)  # It asks, and is gone before it is answered.
    names.append(start(launcher, range(SIZE)))
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == len(names)


def test_what_a_failed_collective_left_in_the_store_of_the_launcher_is_gone_after_the_next_start(launcher):
    """A thread of NCCL would end the new ranks when it finds it."""
    launcher(60.0).set(process_group.EXCEPTION, "rank 1")
    start(launcher, range(SIZE))
    assert not launcher(60.0).check([process_group.EXCEPTION])


@pytest.mark.parametrize(
    ("variables", "count", "taken"),
    [({"RANK": "5", "LOCAL_RANK": "1"}, 4, 1), ({"RANK": "5"}, 4, 1), ({"RANK": "5", "LOCAL_RANK": "3"}, 1, 0)],
    ids=["torchrun", "no local rank", "sees only its own"],
)
def test_a_rank_takes_a_device_of_its_own(monkeypatch, variables, count, taken):
    devices = []
    monkeypatch.setattr(process_group.os, "environ", variables)
    process_group._set_device(SimpleNamespace(set_device=devices.append, device_count=lambda: count))
    assert devices == [taken]


def test_more_ranks_than_devices_on_a_node(monkeypatch):
    monkeypatch.setattr(process_group.os, "environ", {"RANK": "9", "LOCAL_RANK": "4"})
    module = SimpleNamespace(set_device=pytest.fail, device_count=lambda: 4)
    with pytest.raises(OptionError, match=r"mesh: LOCAL_RANK is 4, and this process sees 4 devices.*per-node=4"):
        process_group._set_device(module)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"SLURM_NTASKS": "4"}, "mesh: SLURM_NTASKS is 4, and RANK is not set.* alone.* torchrun"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "mesh: WORLD_SIZE is 2"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
    ],
)
def test_one_of_many_processes_without_a_rank_is_warned_that_it_is_alone(monkeypatch, variables, told):
    monkeypatch.setattr(process_group.os, "environ", variables)
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **__: None)
    with pytest.warns(UserWarning, match=told) if told else nullcontext():
        process_group._initialise(1.0)


def test_after_an_error_and_in_a_copy_of_the_process_nothing_is_done_to_groups_at_the_end(monkeypatch):
    registered, called = [], []
    monkeypatch.setattr(process_group.atexit, "register", registered.append)
    process_group.at_exit(called.append, "first")
    (end,) = registered
    monkeypatch.setattr(sys, "last_value", OSError(), raising=False)
    end()
    monkeypatch.delattr(sys, "last_value")
    monkeypatch.setattr(process_group.os, "getpid", lambda: -1)
    end()
    assert called == []
    monkeypatch.undo()
    end()
    assert called == ["first"]


def test_a_rank_that_does_not_join_is_named(launcher):
    start(launcher, range(SIZE))  # Rank 2 had come then.
    for text in start(launcher, [0, 1], 0.5):
        assert text == "mesh: rank 2 did not join within 0.5 seconds; see the log of each rank"


def test_a_thread_keeps_its_connection_to_the_store_of_a_process_group():
    def groups():
        for _ in range(2):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            yield
            dist.destroy_process_group()

    connections = []
    for _ in groups():
        with ThreadPoolExecutor(1) as thread:
            connections += [store.store(), thread.submit(store.store).result()]
        assert store.store() is connections[-2]
        assert store.connect() is not connections[-2]
    assert len(set(map(id, connections))) == 4
