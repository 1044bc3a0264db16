"""Level 3 prefetches a block while the one before it computes, in the forward and in the backward pass.

In the backward pass, it frees each parameter that is no longer needed.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from tests.exhaustive import exhaustive_rows
from tests.parallel.results import assert_leaves_near
from tests.parallel.test_blocks import of_blocks

WIDTH, RANKS = 8, 4
HIDDEN = 16, 24, 32
"""Widths, by which the blocks are distinguished."""


class Events(TorchDispatchMode):
    """Context that records (event, number of the block): the start of a gather, the wait for it, and products.

    The sending of gradients is recorded with None.
    """

    def __init__(self):
        super().__init__()
        self.events, self._blocks = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name == "all_gather_into_tensor":
            size = RANKS * args[0].numel()
            block = next(i for i, hidden in enumerate(HIDDEN) if size == 2 * hidden * WIDTH)
            # The result is kept alive, so that no other storage gets its id.
            self._blocks[result.untyped_storage()._cdata] = block, result
            self._note("start", block)
        elif name == "wait_tensor" and args[0].untyped_storage()._cdata in self._blocks:
            self._note("wait", self._blocks[args[0].untyped_storage()._cdata][0])
        elif name == "mm":
            lengths = {length for matrix in args for length in matrix.shape}
            self._note("compute", next(i for i, hidden in enumerate(HIDDEN) if hidden in lengths))
        elif name == "reduce_scatter_tensor":
            self._note("send", None)
        return result

    def _note(self, *event):
        if self.events[-1:] != [event]:
            self.events.append(event)


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def one_step(blocks, *wrappers):
    loss = ft.from_module(nn.Sequential(*blocks), lambda model, x: model(x).square().mean())
    train_step = ft.train_step(loss, ft.optim.sgd(0.1), allow_unused=True)
    step = ft.compose(train_step, *wrappers, ft.sharded(ft.parallel.mesh()))
    step(step.init(), torch.randn(2 * RANKS, WIDTH))


@pytest.mark.parametrize("wrappers", [(), (ft.remat(),)], ids=["alone", "remat"])
def test_the_gather_of_the_next_block_starts_before_a_block_computes(wrappers, fake_ranks):
    def block(hidden):
        return nn.Sequential(nn.Linear(WIDTH, hidden, bias=False), nn.Tanh(), nn.Linear(hidden, WIDTH, bias=False))

    with Events() as recorded:
        one_step([block(hidden) for hidden in HIDDEN], *wrappers)

    forward = [("start", 0)]
    for block in range(3):
        forward += [("wait", block), *([("start", block + 1)] if block < 2 else []), ("compute", block)]
    backward = [("start", 2)]
    for block in (2, 1, 0):
        before = [("start", block - 1)] if block else []
        # What is computed again starts the gather; else the first half of the block's parameters is read before.
        half = [*before, ("compute", block)] if wrappers or not block else [("compute", block), *before]
        backward += [("wait", block), *half, *([("compute", block)] if block and not wrappers else []), ("send", None)]
    assert recorded.events == [*forward, *backward]


class HalfUnused(nn.Module):
    """A block whose larger parameter the backward pass does not reach."""

    def __init__(self, hidden):
        super().__init__()
        self.small = nn.Parameter(torch.ones(RANKS, WIDTH))
        self.large = nn.Parameter(torch.ones(2 * hidden - RANKS, WIDTH))
        self.shape = nn.Tanh()

    def forward(self, x):
        _unused = self.large * x[0]
        return self.shape(self.small[0] * x)


def test_a_gather_starts_at_the_latest_before_gradients_are_sent(fake_ranks):
    with Events() as recorded:
        one_step(map(HalfUnused, HIDDEN))
    # The first block needs no parameters there.
    backward = ["start", "wait", "start", "send", "wait", "send"]
    assert [event for event, _ in recorded.events[-len(backward) :]] == backward


class Twice(torch.autograd.Function):
    """A product that reads its saved tensors twice in the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, gain):
        ctx.save_for_backward(x, weight, gain)
        return x @ weight * gain

    @staticmethod
    def backward(ctx, grad):
        (x, _, gain), (_, weight, _) = ctx.saved_tensors, ctx.saved_tensors
        return (grad * gain) @ weight.T, x.T @ (grad * gain), (grad * (x @ weight)).sum(0)


class Alive(TorchDispatchMode):
    """Context that counts gathers, and at each product the gathered matrices that are in memory."""

    def __init__(self):
        super().__init__()
        self.gathers, self.alive, self._matrices = 0, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        self.gathers += name == "all_gather_into_tensor"
        if name == "split_with_sizes_copy":
            columns = [column for column in result if column.numel() == WIDTH * WIDTH]
            self._matrices += [StorageWeakRef(column.untyped_storage()) for column in columns]
        elif name == "mm":
            self.alive.append(sum(not matrix.expired() for matrix in self._matrices))
        return result


class Doubled(nn.Module):
    """A block that uses one matrix twice, between others."""

    def __init__(self, product):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(4))
        self.gain, self.product = nn.Parameter(torch.ones(WIDTH)), product

    def forward(self, x):
        first, second, third, fourth = self.weights
        for weight in (first, second, third, second, fourth):
            x = self.product(x, weight, self.gain).tanh()
        return x


@pytest.mark.parametrize(
    ("product", "products"), [(lambda x, weight, gain: x @ weight * gain, 2), (Twice.apply, 3)], ids=["once", "twice"]
)
def test_a_parameter_is_freed_when_the_backward_pass_no_longer_needs_it(product, products, fake_ranks):
    with Alive() as recorded:
        one_step([Doubled(product), Doubled(product)])
    assert recorded.gathers == 2 * 2
    in_backward = [alive for alive in (4, 3, 3, 2, 1) for _ in range(products)]
    assert recorded.alive[2 * 5 :][: len(in_backward)] == in_backward


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


@pytest.mark.parametrize(
    ("forward", "wrappers"),
    [
        *((backwards, ()), (repeated, (ft.remat(),)), (dropped, ()), (dropped, (ft.remat(),))),
        *exhaustive_rows([(backwards, (ft.remat(),)), (repeated, ())]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "+".join(wrapper.name for wrapper in value) or "alone",
)
def test_blocks_that_run_in_another_order_than_registered_train_as_at_level_2(forward, wrappers):
    gathered_once, by_block = (of_blocks(2, level, forward, *wrappers, steps=6, allow_unused=True) for level in (2, 3))
    # A sum over two ranks has one order; but the gradients of two runs of a block are added after it, and not before.
    assert_leaves_near(by_block, gathered_once, 1e-12 if forward is repeated else 0)
