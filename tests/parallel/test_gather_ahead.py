"""Level 3 starts the gather of a block while the one before it computes, in the forward and in the backward pass."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from tests.parallel.test_blocks import of_blocks

WIDTH, RANKS = 8, 4
HIDDEN = 16, 24, 32
"""Widths by which the blocks are told apart."""


class Events(TorchDispatchMode):
    """Context that notes, with the number of the block, when a gather starts, when it is waited for, and products."""

    def __init__(self):
        super().__init__()
        self.events, self._blocks = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name == "all_gather_into_tensor":
            size = RANKS * args[0].numel()
            block = next(i for i, each in enumerate(HIDDEN) if size == 2 * each * WIDTH)
            self._blocks[result.untyped_storage()._cdata] = block, result  # Held, so that the number stays its own.
            self._note("start", block)
        elif name == "wait_tensor" and args[0].untyped_storage()._cdata in self._blocks:
            self._note("wait", self._blocks[args[0].untyped_storage()._cdata][0])
        elif name == "mm":
            lengths = {length for each in args for length in each.shape}
            self._note("compute", next(i for i, each in enumerate(HIDDEN) if each in lengths))
        return result

    def _note(self, *event):
        if self.events[-1:] != [event]:
            self.events.append(event)


@pytest.fixture
def ranks_that_do_not_exist():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrappers", [(), (ft.remat(),)], ids=["alone", "remat"])
def test_the_gather_of_the_next_block_starts_before_a_block_computes(wrappers, ranks_that_do_not_exist):
    def block(hidden):
        return nn.Sequential(nn.Linear(WIDTH, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, WIDTH, bias=False))

    loss = ft.from_module(nn.Sequential(*map(block, HIDDEN)), lambda model, x: model(x).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers, ft.sharded(ft.parallel.mesh()))
    state, x = step.init(), torch.randn(2 * RANKS, WIDTH)
    with Events() as recorded:
        step(state, x)

    def in_order(blocks):
        first, *_ = blocks
        yield "start", first
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            yield "wait", block
            if following is not None:
                yield "start", following
            yield "compute", block

    assert recorded.events == [*in_order([0, 1, 2]), *in_order([2, 1, 0])]


def backwards(net, x):
    first, second = net[1]
    return first(second(net[0](x)))


def repeated(net, x):
    first, second = net[1]
    return second(first(first(second(first(net[0](x))))))


def dropped(net, x):
    net.calls = getattr(net, "calls", 0) + 1
    keeps = random.Random(net.calls)
    x = net[0](x)
    for block in net[1]:
        x = block(x) if keeps.random() < 0.5 else x
    return x


@pytest.mark.parametrize("wrappers", [(), (ft.remat(),)], ids=["alone", "remat"])
@pytest.mark.parametrize("forward", [backwards, repeated, dropped])
def test_blocks_may_run_in_another_order_than_registered(forward, wrappers):
    gathered_once, by_block = (of_blocks(2, level, forward, *wrappers, steps=6, allow_unused=True) for level in (2, 3))
    # A sum over two ranks has one order; but the gradients of two runs of a block are added after it, and not before.
    tolerance = 1e-12 if forward is repeated else 0
    torch.testing.assert_close(by_block, gathered_once, rtol=tolerance, atol=tolerance)
