"""Ranks that a launcher starts again join the ranks of their own start, and name the missing ones."""

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
    """Return a function that connects to the store of a launcher, which outlives the ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connected(seconds):
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=seconds))

    return connected


def start(launcher, ranks, seconds=60.0):
    """Start these ranks; return for each the name of the start, or the text of its error."""

    def rank(number):
        try:
            return name_of_start(launcher(seconds), number, SIZE, seconds)
        except RankError as error:
            return str(error)

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(rank, ranks))


def test_ranks_that_are_started_again_share_a_name_that_no_earlier_start_had(launcher):
    names = [start(launcher, range(SIZE)) for _ in range(2)]
    start(launcher, [1], 0.1)  # This rank asks, and has ended before it is answered.
    names.append(start(launcher, range(SIZE)))
    assert all(len(set(names_of_ranks)) == 1 for names_of_ranks in names)
    assert len({names_of_ranks[0] for names_of_ranks in names}) == len(names)


def test_the_key_that_a_failed_collective_leaves_in_the_store_is_deleted_by_the_next_start(launcher):
    """A thread of NCCL would end the new ranks when it reads the key."""
    launcher(60.0).set(process_group.EXCEPTION, "rank 1")
    start(launcher, range(SIZE))
    assert not launcher(60.0).check([process_group.EXCEPTION])


@pytest.mark.parametrize(
    ("variables", "count", "device"),
    [({"RANK": "5", "LOCAL_RANK": "1"}, 4, 1), ({"RANK": "5"}, 4, 1), ({"RANK": "5", "LOCAL_RANK": "3"}, 1, 0)],
    ids=["torchrun", "no local rank", "sees only its own"],
)
def test_each_rank_of_a_node_sets_its_own_device(monkeypatch, variables, count, device):
    devices = []
    monkeypatch.setattr(process_group.os, "environ", variables)
    process_group._set_device(SimpleNamespace(set_device=devices.append, device_count=lambda: count))
    assert devices == [device]


def test_more_ranks_than_devices_on_a_node_are_an_error(monkeypatch):
    monkeypatch.setattr(process_group.os, "environ", {"RANK": "9", "LOCAL_RANK": "4"})
    module = SimpleNamespace(set_device=pytest.fail, device_count=lambda: 4)
    with pytest.raises(OptionError, match=r"mesh: LOCAL_RANK is 4, and this process sees 4 devices.*per-node=4"):
        process_group._set_device(module)


@pytest.mark.parametrize(
    ("variables", "warning"),
    [
        ({"SLURM_NTASKS": "4"}, "mesh: SLURM_NTASKS is 4, and RANK is not set.* alone.* torchrun"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "mesh: WORLD_SIZE is 2"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
    ],
    ids=["tasks of Slurm", "a world without RANK", "one process", "with RANK"],
)
def test_one_of_many_processes_without_a_rank_is_warned_that_it_is_alone(monkeypatch, variables, warning):
    monkeypatch.setattr(process_group.os, "environ", variables)
    monkeypatch.setattr(process_group.dist, "init_process_group", lambda *_, **__: None)
    with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
        process_group._initialise(1.0)


def test_functions_of_groups_are_not_called_at_the_end_after_an_error_or_in_a_forked_process(monkeypatch):
    registered, arguments = [], []
    monkeypatch.setattr(process_group.atexit, "register", registered.append)
    process_group.at_exit(arguments.append, "first")
    (end_program,) = registered
    monkeypatch.setattr(sys, "last_value", OSError(), raising=False)
    end_program()
    monkeypatch.delattr(sys, "last_value")
    monkeypatch.setattr(process_group.os, "getpid", lambda: -1)
    end_program()
    assert arguments == []
    monkeypatch.undo()
    end_program()
    assert arguments == ["first"]


def test_a_rank_that_does_not_join_is_named(launcher):
    start(launcher, range(SIZE))  # Rank 2 joined an earlier start.
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
