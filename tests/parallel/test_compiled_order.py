"""A compiled step runs collectives while it computes, as the captured graph does."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain.errors import TraceError
from ftrain.parallel.agreement import Agreement
from ftrain.parallel.stand_in import running_graphs

WIDTH, BLOCKS = 8, 3


@contextmanager
def one_of(size, rank=0):
    """Context in which this process is one of `size` ranks; the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Overlaps(TorchDispatchMode):
    """Context that counts collectives, and those with a matmul between their start and their wait (overlapping)."""

    def __init__(self):
        super().__init__()
        self._products, self._started = 0, {}
        self.counts = {"gathers": 0, "scatters": 0, "overlapping gathers": 0, "overlapping scatters": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        counter = {"all_gather_into_tensor": "gathers", "reduce_scatter_tensor": "scatters"}.get(name)
        if counter is not None:
            self.counts[counter] += 1
            self._started[result.data_ptr()] = counter, self._products
        elif name == "wait_tensor" and args[0].data_ptr() in self._started:
            counter, products = self._started.pop(args[0].data_ptr())
            self.counts[f"overlapping {counter}"] += products < self._products
        self._products += name in ("mm", "addmm")
        return result


def step_of(backend, level=3):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
    compiled = ft.compiled(lowering="whole", backend=backend)
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), level), compiled)


def overlaps(backend):
    step, batch = step_of(backend), {"x": torch.ones(4, WIDTH)}
    state, _ = step(step.init(seed=0), batch)
    # `running_graphs` refuses a compiler that changes the number of collectives.
    with running_graphs(Agreement(1)), Overlaps() as recorded:
        step(state, batch)
    return recorded.counts


def test_inductor_waits_for_collectives_where_the_graph_does():
    with one_of(2):
        captured, compiled = overlaps("eager"), overlaps("inductor")
    assert captured["scatters"] == BLOCKS
    assert captured["overlapping scatters"] >= BLOCKS - 2
    assert compiled == captured


def test_a_collective_that_no_graph_can_have_is_named():
    def loss(params, batch):
        features = batch @ params["w"]
        dist.all_gather([torch.empty_like(features) for _ in range(2)], features)
        return features.square().mean()

    with one_of(2):
        compiled = ft.compiled(lowering="whole", backend="eager")
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), 0), compiled)
        with pytest.raises(TraceError, match=r"c10d\.allgather_.*use DTensors"):
            step(step.init({"w": torch.ones(3, 2)}), torch.ones(4, 3))


@pytest.mark.parametrize("level", [0, 3])
def test_ranks_with_as_many_rows_compile_the_same_graph(level):
    """So that the code that one rank has compiled serves the other rank."""
    texts = []
    for rank in range(2):
        with one_of(2, rank):
            step = step_of("eager", level)
            step.lower(step.init(seed=0), {"x": torch.ones(4, WIDTH)})
            texts.append(step.runner._cache.graphs[0].captured.code)
    assert texts[0] == texts[1]


def test_a_rank_whose_blocks_are_empty_compiles_once():
    """If it compiled again alone, the others would wait for it in the second step."""
    with one_of(4, 3):
        model = nn.Linear(6, 3)  # Its bias has no row for the last rank.
        loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
        compiled = ft.compiled(lowering="whole", backend="eager")
        sharded = ft.sharded(ft.parallel.mesh(), 1)
        step = ft.compose(ft.train_step(loss, ft.optim.adamw(0.1)), ft.ema(0.8), sharded, compiled)
        state = step.init(seed=0)
        assert any(leaf.to_local().numel() == 0 for leaf in ft.tree.leaves(state.params))
        state = ft.parallel.divided(ft.parallel.whole(state), like=state)
        for _ in range(2):
            state, _ = step(state, {"x": torch.ones(4, 6)})
        assert len(step.runner._cache.graphs) == 1
