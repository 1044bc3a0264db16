"""Level 3 gathers the parameters of blocks one by one: blocks that are hard to gather."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from ftrain.errors import LossError
from tests.bits import assert_same_bits
from tests.parallel import models
from tests.parallel.ranks import run, seeded
from tests.parallel.results import assert_leaves_near, assert_near


class Mixed(nn.Module):
    """A trained and a frozen matrix of two rows, of which two ranks have one each; one is viewed."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(2, 2), nn.Parameter(torch.randn(2, 2))
        self.viewed, self.table = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x):
        return self.trained(x) + (x @ self.frozen).tanh() + self.viewed.view(-1)[:2] + self.table.sum()


class Net(nn.Module):
    """Two blocks, and buffers that nothing changes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Mixed(), Mixed())
        self.register_buffer("constant", torch.rand(5))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x):
        return self.blocks(x)


def trained(size, level, metrics=lambda outputs: {}, trainable=("*.trained.*", "*.viewed"), steps=3):
    """Return the whole state of each rank after the last step."""

    def criterion(net, x):
        outputs = net(x)
        return outputs.square().mean(), metrics(outputs)

    def rank(_):
        with seeded(2):
            net = Net().double()
        loss = ft.from_module(net, criterion)
        step = ft.compose(
            ft.train_step(loss, ft.optim.adamw(0.1), trainable=list(trainable)), ft.sharded(ft.parallel.mesh(), level)
        )
        state = step.init()
        for seed in range(steps):
            x = torch.randn(7, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            state, _ = step(state, x)
        return ft.parallel.whole(state)

    return run(size, rank)


def test_trained_and_frozen_parameters_of_a_block_may_have_parts_of_single_rows():
    (expected,) = trained(1, 0)
    for size, level in ((2, 3), (4, 3), (4, 1)):
        for state in trained(size, level):
            assert_leaves_near(state.params, expected.params)


def test_a_block_without_a_trained_parameter_passes_gradients_to_the_one_before_it():
    (expected,) = trained(1, 0, trainable=["blocks.0.trained.weight"])
    for state in trained(2, 3, trainable=["blocks.0.trained.weight"]):
        assert_leaves_near(state.params, expected.params)


def test_blocks_without_any_trained_parameter_pass_gradients_to_what_is_before_them():
    def rank(level):
        with seeded(1):
            module = models.Model().double()
        module.blocks.requires_grad_(False)
        step = ft.train_step(ft.from_module(module, models.loss), ft.optim.adamw(1e-2))
        return models.train(ft.compose(step, ft.sharded(ft.parallel.mesh(), level)))

    (expected,) = run(1, lambda _: rank(0))
    assert expected[0].frozen["blocks.0.hidden.weight"] is not None
    assert_near(run(3, lambda _: rank(3)), expected)


def test_buffers_that_nothing_changes_keep_their_bits():
    (expected,) = trained(1, 0)
    for level in (0, 3):
        for state in trained(3, level, steps=30):
            assert_same_bits(state.buffers, expected.buffers)


def test_a_metric_with_a_value_for_each_example_is_an_error():
    with pytest.raises(
        LossError, match=r"the metric rows is float64\[\d\]; on ranks a metric is a 0-d tensor or a Mean"
    ):
        trained(2, 0, lambda outputs: {"rows": outputs.detach().sum(1)})


class Checkpointed(nn.Module):
    """A block that computes two parts of itself again in the backward pass, by torch's checkpoint."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        hidden = checkpoint(lambda x: self.up(self.norm(x)).tanh(), x, use_reentrant=False)
        return x + checkpoint(lambda hidden: self.down(hidden) * self.gain, hidden, use_reentrant=False)


def of_blocks(size, level, forward, *wrappers, steps=3, **options):
    """Return the whole parameters after a few steps of a model of two blocks, on all ranks."""

    def rank(_):
        with seeded(2):
            net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(Checkpointed(), Checkpointed())).double()
        loss = ft.from_module(net, lambda net, x: forward(net, x).square().mean())
        train_step = ft.train_step(loss, ft.optim.adamw(0.1), **options)
        step = ft.compose(train_step, *wrappers, ft.sharded(ft.parallel.mesh(), level))
        state = step.init()
        for seed in range(steps):
            x = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            state, _ = step(state, x)
        return ft.parallel.whole(state).params

    return run(size, rank)


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(7),), (ft.remat(),)], ids=["alone", "accumulate", "remat"])
def test_a_block_may_recompute_parts_of_itself(wrappers):
    (expected,) = of_blocks(1, 0, lambda net, x: net(x), *wrappers)
    for params in of_blocks(3, 3, lambda net, x: net(x), *wrappers):
        assert_leaves_near(params, expected)


def test_a_parameter_of_a_block_has_a_shape_outside_of_its_forward_and_no_values():
    def reading(read):
        return lambda net, x: net(x) + read(net[1][1].up.weight)

    shapes = []
    of_blocks(2, 3, reading(lambda weight: shapes.append((weight.shape, weight.dtype, weight.device.type)) or 0))
    assert set(shapes) == {((8, 4), torch.float64, "cpu")}
    for read in (torch.sum, lambda weight: weight[0, 0], lambda weight: weight.max().item()):
        with pytest.raises(LossError, match=r"reads the parameter 1\.1\.up\.weight outside of .* level=2"):
            of_blocks(2, 3, reading(read))


def test_blocks_in_lists_of_lists_train_as_on_one_rank():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            pairs = [[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)] for _ in range(2)]
            self.layers = nn.ModuleList(map(nn.ModuleList, pairs))

        def forward(self, x):
            for first, second in self.layers:
                x = x + second(x + first(x))
            return x

    def rank(_):
        with seeded(0):
            net = Nested().double()
        loss = ft.from_module(net, lambda net, x: net(x).square().mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), level=3))
        state, _ = step(step.init(seed=0), torch.arange(8, dtype=torch.float64).reshape(4, 2))
        return ft.parallel.whole(state).params

    (expected,) = run(1, rank)
    for params in run(2, rank):
        assert_leaves_near(params, expected)


@pytest.mark.parametrize(
    "transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())], ids=["vmap", "grad"]
)
def test_a_block_within_a_transform_is_an_error_that_names_the_level(transform):
    def rank(_):
        net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
        loss = ft.from_module(net, lambda net, x: transform(net)(x).square().mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), level=3))
        with pytest.raises(LossError, match=r"block 0 within a transform of torch\.func.*use level=2"):
            step(step.init(seed=0), torch.ones(4, 2))

    run(2, rank)
