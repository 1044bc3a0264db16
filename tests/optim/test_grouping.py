"""Which leaves a kernel updates together."""

import dataclasses

import torch

from ftrain import backends, tree
from ftrain.optim.grouping import BLOCK, Planner
from ftrain.optim.structure_cache import StructureCache
from ftrain.tree.name_patterns import everything, matrices

F64 = torch.float64


def test_groups_follow_the_dtypes_of_the_leaves():
    """A fused kernel on a GPU takes leaves of one dtype only."""
    plans = StructureCache(Planner(everything).plan)
    for dtypes, groups in (
        ((torch.float32, torch.float32), [([0, 1], True)]),
        ((F64, torch.float32), [([0], True), ([1], True)]),
    ):
        params = [torch.ones(2, dtype=dtype) for dtype in dtypes]
        plan, _ = plans(params, tree.clone(params))
        assert (plan.singles, plan.groups) == ([([0], True), ([1], True)], groups)
        assert plans(params, tree.clone(params))[0] is plan


def test_kernels_refuse_updates_only_on_a_device_whose_kernels_take_found_inf(monkeypatch):
    """The kernels of other devices, such as MPS, would write an update that is not finite."""
    params = [torch.ones(2)]
    for takes_found_inf in (True, False):
        backend = dataclasses.replace(backends.get("cpu"), fused_found_inf=takes_found_inf)
        monkeypatch.setattr(backends.registry, "_records", {"cpu": backend})
        plan, _ = StructureCache(Planner(everything).plan)(params, params)
        assert (plan.fusible, plan.refusable) == (True, takes_found_inf)


def test_blocks_hold_every_leaf_once():
    """If a device does not cache memory, formulas take one block at a time: several small leaves, or a large one."""
    params = [torch.ones(size) for size in (3, BLOCK, BLOCK + 1, 5, 0, BLOCK // 2, BLOCK // 2, 1)]
    plan, _ = StructureCache(Planner(matrices).plan)(params, params)
    assert plan.blocks == [([0], False), ([1], False), ([2], False), ([3, 4, 5], False), ([6, 7], False)]
