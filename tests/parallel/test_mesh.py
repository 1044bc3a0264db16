"""The mesh of ranks, and the batches that they share."""

import dataclasses
from contextlib import nullcontext
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import ftrain as ft
from ftrain.errors import BatchError, ComposeError, OptionError, StructureError
from ftrain.parallel.batch_rows import rows_of
from tests.parallel import models
from tests.parallel.ranks import run


def test_sizes_that_are_left_out_follow_from_the_number_of_ranks():
    def shapes(rank):
        sizes = {}, {"replicate": 2}, {"shard": 2}, {"shard": np.int64(1)}
        return [tuple(ft.parallel.mesh(**given).shape) for given in sizes]

    assert run(4, shapes)[0] == [(1, 4), (2, 2), (2, 2), (4, 1)]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"shard": 3}, "there are 4 ranks, those that torchrun"),
        ({"shard": 2, "replicate": 1}, "there are 4 ranks, those that torchrun"),
        ({"replicate": 0}, "needs a whole number of at least 1"),
        ({"shard": True}, "needs a whole number of at least 1"),
    ],
    ids=["a part", "two of four", "none", "no number"],
)
def test_sizes_of_a_mesh_that_are_not_those_of_all_ranks_are_an_error(sizes, text):
    def rank(_):
        with pytest.raises(OptionError, match=text):
            ft.parallel.mesh(**sizes)

    run(4, rank)


@pytest.mark.parametrize(
    ("old_options", "new_options", "warning"),
    [
        ({"timeout": timedelta(seconds=7200)}, {}, r"for 7200 seconds.* 600 from now on; mesh\(timeout=7200\) keeps"),
        ({"timeout": timedelta(seconds=7200)}, {"timeout": 30}, None),
        ({"timeout": timedelta(seconds=60)}, {}, None),
        ({}, {}, None),
    ],
    ids=["longer, default", "longer, chosen", "shorter, default", "default, default"],
)
def test_only_replacing_a_longer_timeout_of_the_process_group_by_the_default_is_warned_of(
    old_options, new_options, warning
):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, **old_options)
    try:
        with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
            ft.parallel.mesh(**new_options)
    finally:
        dist.destroy_process_group()


def test_a_mesh_of_some_ranks_is_an_error_on_every_rank():
    def rank(number):
        part = DeviceMesh("cpu", torch.tensor([[number]]), mesh_dim_names=("replicate", "shard"))
        with pytest.raises(OptionError, match="sharded: the mesh has 1 of 2 ranks; needs one of all ranks"):
            ft.sharded(part)

    run(2, rank)


def test_options_of_sharded_are_checked():
    def rank(_):
        with pytest.raises(OptionError, match="sharded: level is 4; needs 0, 1, 2 or 3"):
            ft.sharded(ft.parallel.mesh(), 4)
        with pytest.raises(OptionError, match=r"sharded: the mesh is None; needs one of ft.parallel.mesh"):
            ft.sharded(None)
        with pytest.raises(OptionError, match="sharded: batches is 'half'; choices are whole, rows"):
            ft.sharded(ft.parallel.mesh(), batches="half")

    run(2, rank)


def test_ranks_have_rows_of_each_microbatch_and_every_row_is_on_one_rank():
    batch = {"x": torch.arange(10), "flag": torch.tensor(True)}
    for size in (1, 2, 3, 7):
        for microbatches in (1, 2):
            rows = [rows_of(batch, rank, size, (microbatches,), torch.device("cpu")) for rank in range(size)]
            pieces = [of_rank.batch["x"].reshape(microbatches, -1) for of_rank in rows if of_rank.length]
            assert torch.equal(torch.cat(pieces, 1).reshape(-1), batch["x"])
            assert all(of_rank.batch["flag"] for of_rank in rows)
            lengths = [of_rank.length for of_rank in rows]
            assert max(lengths) - min(lengths) <= 1


def test_the_rows_of_a_rank_are_on_its_device():
    rows = rows_of(next(models.batches()), 1, 5, (2,), torch.device("meta"))
    assert {(leaf.device.type, len(leaf)) for leaf in rows.batch.values()} == {("meta", 2)}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(())}, "has no tensor with an axis"),
        ({"x": torch.zeros(0, 5)}, "the batch has no examples"),
        ({"x": torch.zeros(4, 5), "y": torch.zeros(5)}, "batch.y has 5 examples and batch.x has 4"),
    ],
    ids=["no-axis", "empty", "unequal"],
)
def test_a_batch_that_ranks_cannot_share_is_an_error_on_every_rank(batch, message):
    def rank(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 0))
        with pytest.raises(BatchError, match=message):
            step(step.init(), batch)

    run(2, rank)


UNDECLARED = dataclasses.replace(ft.optim.adamw(1e-3), by_element=False, split=None)
WHOLE_GRADIENTS = ft.Wrapper("centralise", "mean of rows", grad=ft.OnGrad(lambda grad: grad))


@pytest.mark.parametrize(
    ("optimizer", "wrappers", "message"),
    [
        (UNDECLARED, (), r"adamw\(.*says neither .*by_element.* nor .*split.*; say one of them, or use level=0"),
        (ft.optim.chain(ft.optim.centralize(), UNDECLARED), (), r"chain\(centralize.*says neither"),
        (ft.optim.adamw(1e-3), (ft.compiled(lowering="split"),), "leave out lowering='split'"),
        (ft.optim.adamw(1e-3), (ft.with_amp("fp16", watch=True),), "with_amp.*watch.*use level=2"),
        (ft.optim.adamw(1e-3), (WHOLE_GRADIENTS,), r"mean of rows does not say .*by_element=True\); else use level=0"),
    ],
    ids=["undeclared", "chain", "split", "watch", "whole gradients"],
)
def test_a_step_that_cannot_compute_on_parts_is_refused_when_it_is_composed(optimizer, wrappers, message):
    def rank(_):
        with pytest.raises(ComposeError, match=message):
            models.step_of(*wrappers, ft.sharded(ft.parallel.mesh()), optimizer=optimizer)

    run(2, rank)


def test_different_first_batches_are_an_error_on_every_rank():
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        with pytest.raises(BatchError, match=r"different batches; .*DistributedSampler"):
            step(step.init(), next(models.batches(seed=number)))

    run(3, rank)


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        # Of the same state: each rank would clip in another way.
        (
            ([ft.clip(1.0)], [ft.clip(2.0)]),
            r"rank 0 has .*clip\(norm<=1\).*, and rank 1 has .*clip\(norm<=2\).*; every rank",
        ),
        (([], [ft.ema(0.9)]), r"ema\(0.9\)"),
    ],
    ids=["options", "wrappers"],
)
def test_different_steps_are_an_error_on_every_rank_that_names_the_difference(wrappers, message):
    def rank(number):
        step = models.step_of(*wrappers[number], ft.sharded(ft.parallel.mesh(), 0))
        with pytest.raises(StructureError, match=message):
            step(step.init(), next(models.batches()))

    run(2, rank)
