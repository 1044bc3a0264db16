"""Level 3 under autocast: the 16-bit copies of weights that autograd would save are made again in the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from tests.bits import assert_same_bits
from tests.parallel.ranks import run, seeded
from tests.parallel.results import NARROW, assert_leaves_near


class Block(nn.Module):
    """Weights that autocast casts: as they are, transposed, or written to when cast; and some that stay float32.

    No weight is used twice: on one rank autocast would cache its copy, and add the two gradients in 16 bits.
    """

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.conv = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Conv1d(1, 1, 3, padding=1)
        self.down = nn.Parameter(torch.randn(2 * width, width) / width)
        self.gain = nn.Parameter(torch.ones(width, width))
        self.wave = nn.Parameter(torch.randn(width, 2))

    def forward(self, x):
        hidden = self.up(self.norm(x)).tanh() @ self.down
        hidden = self.conv(hidden.unsqueeze(1)).squeeze(1)
        gain = self.gain.to(hidden.dtype, copy=True)
        with torch.no_grad():
            gain.mul_(0.5)
        wide = x.float()  # Torch 2.15 has complex numbers of 16 bits, and cannot multiply them.
        return x + F.linear(hidden, gain) + (torch.view_as_complex(self.wave).conj() * (wide + 1j * wide)).real


class PlainBlock(nn.Module):
    """Each weight is used once, by an operation that autocast casts; one is frozen, and one is not used at all."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.conv = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Conv1d(1, 1, 3, padding=1)
        self.down, self.unused = nn.Parameter(torch.randn(2 * width, width) / width), nn.Linear(2, 2)
        self.up.weight.requires_grad_(False)

    def forward(self, x):
        return x + self.conv((self.up(self.norm(x)).tanh() @ self.down).unsqueeze(1)).squeeze(1)


def trained(size, level, block=Block, **options):
    def rank(_):
        with seeded(2):
            net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(block(4), block(4)), nn.Linear(4, 2))
        loss = ft.from_module(net, lambda net, x: net(x).float().square().mean())
        step = ft.train_step(loss, ft.optim.sgd(0.005), allow_unused=True)
        step = ft.compose(step, ft.with_amp("bf16"), ft.sharded(ft.parallel.mesh(), level, **options))
        state = step.init()
        for seed in range(3):
            state, _ = step(state, torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)))
        return ft.parallel.whole(state).params

    return run(size, rank)


def test_a_step_under_autocast_has_the_bits_of_level_2_and_equals_one_rank():
    (expected,) = trained(1, 0)
    for gathered_once, by_block in zip(trained(2, 2), trained(2, 3), strict=True):
        assert_same_bits(by_block, gathered_once)  # A sum over two ranks has one order.
        assert_leaves_near(by_block, expected, NARROW)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_blocks_that_are_gathered_in_the_dtype_of_autocast_have_the_same_bits(size):
    for narrow, own in zip(trained(size, 3, PlainBlock, gather="amp"), trained(size, 3, PlainBlock), strict=True):
        assert_same_bits(narrow, own)


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    yield ft.parallel.mesh()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrappers", [(), (ft.remat(),)], ids=["alone", "remat"])
def test_matrices_of_blocks_are_gathered_in_16_bits_and_their_gradients_added_in_32(wrappers, mesh):
    width, size = 64, 4
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)))
    step = ft.train_step(ft.from_module(net, lambda net, x: net(x).float().square().mean()), ft.optim.sgd(0.1))
    step = ft.compose(step, ft.with_amp("bf16"), *wrappers)

    def sent(gather):
        on_ranks = ft.sharded(mesh, gather=gather)(step)
        planned = ft.anatomy(on_ranks, None, torch.randn(8, width), mesh=(1, size))
        return {row.kind: row.sent for row in planned.traffic}

    own, narrow = sent("own"), sent("amp")
    matrix, vector = 4 * width * width, 4 * width
    assert narrow["all-gather"] / own["all-gather"] == pytest.approx((matrix / 2 + vector) / (matrix + vector))
    assert narrow["reduce-scatter"] == own["reduce-scatter"]


def test_blocks_are_gathered_in_the_dtype_of_autocast_only_with_autocast_and_at_level_3(mesh):
    for gather, level in (("amp", 2), ("bf16", 3)):
        with pytest.raises(OptionError, match=f"sharded: gather is '{gather}' at level {level}; needs 'own', or"):
            ft.sharded(mesh, level, gather=gather)
    loss = ft.from_module(nn.Linear(3, 2), lambda net, x: net(x).mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(mesh, gather="amp"))
    with pytest.raises(ComposeError, match="gather='amp' is the dtype of with_amp, which the step does not have"):
        step(step.init(), torch.ones(4, 3))


def test_narrow_copies_of_one_block_are_held_at_a_time():
    width, blocks = 64, 16
    block_bytes = 4 * 4 * width * width

    def planned(*wrappers):
        children = [
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks)
        ]
        loss = ft.from_module(nn.Sequential(*children), lambda model, x: model(x).float().square().mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
        return ft.anatomy(step, None, torch.randn(4, width), mesh=(1, 4), level=3)

    wide, narrow = planned(), planned(ft.with_amp("bf16"))
    assert 0 < narrow.most["copies in another dtype"] <= block_bytes / 2 * 1.1  # And not of 16 blocks.
    assert narrow.peak <= wide.peak + block_bytes
