"""Rematerialisation changes no bit, for any policy and any block; a block that it cannot run again is refused."""

import functools

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import LossError
from tests.bits import assert_same_bits
from tests.laws.remat_model import MODES, WIDTH, aten, build, everything, make_batch, products


def train(step, steps=1):
    state = step.init(seed=3)
    for index in range(steps):
        state, _ = step(state, make_batch(index))
    return state


STACKS = {
    "eager": (),
    "bf16": (ft.with_amp("bf16"), ft.accumulate(2)),
    "captured": (ft.compiled(lowering="whole", backend="eager"),),
    "split": (ft.compiled(lowering="split", backend="eager"),),
    "lora": (ft.lora(2, targets=["*.up", "*.qkv"], dropout=0.3),),
}
# Captured and split steps run the same recomputation as eager ones and are slow to build: `make test` runs only these.
NOT_EXHAUSTIVE = {"captured": [], "split": ["nested-few"]}


@functools.cache
def unwrapped(stack, blocks):
    return train(build(*STACKS[stack], dtype=dtype_of(stack), blocks=blocks))


def dtype_of(stack):
    return torch.float32 if stack == "bf16" else torch.float64


# Dynamo reads the .grad of every tensor it traces, which makes torch warn.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("stack", "mode"),
    [
        pytest.param(stack, mode, marks=[] if mode in NOT_EXHAUSTIVE.get(stack, MODES) else pytest.mark.exhaustive)
        for stack in STACKS
        for mode in MODES
    ],
)
def test_no_bit_changes(stack, mode):
    blocks = 1 if mode == "nested-few" else 2
    step = build(MODES[mode](), *STACKS[stack], dtype=dtype_of(stack), blocks=blocks)
    assert_same_bits(train(step), unwrapped(stack, blocks))


class WritesOverProducts(nn.Module):
    """Writes over a product, that is over the view that a matmul returns of the result of its `mm`.

    If `written_over` is "output", it writes over none, and leaves that to the loss.
    """

    def __init__(self, written_over):
        super().__init__()
        self.written_over = written_over
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        if self.written_over == "output":
            return self.down(torch.sin(self.up(x)))
        hidden = self.up(x) if self.written_over == "linear" else torch.einsum("bti,oi->bto", x, self.up.weight)
        hidden += x
        return self.down((torch.sin(hidden) * hidden).relu_())


@pytest.mark.parametrize("written_over", ["linear", "einsum", "output"])
@pytest.mark.parametrize("policy", ["dots", "everything", "products", "reshaped"])
def test_a_kept_result_that_was_written_over_is_computed_again(written_over, policy):
    def reshaped(op, *args, **kwargs):
        return op is aten._unsafe_view.default

    def loss(model, batch):
        for block in model:
            batch = block(batch)
            batch += 0.5  # The output of a block is a product too.
        return batch.square().mean()

    torch.manual_seed(0)
    model = nn.ModuleList(WritesOverProducts(written_over) for _ in range(2)).double()
    batch = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    plain = ft.train_step(ft.from_module(model, loss), ft.optim.sgd(0.1))
    policies = {"everything": everything, "products": products, "reshaped": reshaped}
    step = ft.remat(policy=policies.get(policy, policy))(plain)
    assert_same_bits(step(step.init(), batch.clone())[0], plain(plain.init(), batch.clone())[0])


class CachesProduct(nn.Module):
    """Computes a table with a product in its first run and caches it, so that a recomputation has one product less."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH, bias=False), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.eye(WIDTH, dtype=x.dtype) @ torch.full((WIDTH, WIDTH), 0.1, dtype=x.dtype)
        return torch.sin(x @ self.linear.weight @ self.table)


@pytest.mark.parametrize("policy", ["full", "dots", everything], ids=["full", "dots", "everything"])
def test_no_bit_changes_for_a_block_that_caches_a_product(policy):
    def trained(*wrappers):
        torch.manual_seed(0)
        model = nn.ModuleList(CachesProduct() for _ in range(2)).double()
        loss = ft.from_module(model, lambda model, batch: model[1](model[0](batch)).square().mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
        return step(step.init(), torch.ones(2, WIDTH, dtype=torch.float64))[0]

    assert_same_bits(trained(ft.remat(policy=policy, blocks=[CachesProduct])), trained())


class WritesOverInput(nn.Module):
    """Writes over its input, which only a recomputation needs afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x=None, inputs=None):
        x = inputs["x"] if x is None else x
        return self.linear(x.mul_(1.5))


@pytest.mark.parametrize("argument", ["positional", "keyword", "in a dict"])
def test_a_block_that_writes_over_its_input_is_refused(argument):
    def loss(model, batch):
        x = batch * 2
        if argument == "positional":
            output = model(x)
        elif argument == "keyword":
            output = model(x=x)
        else:
            output = model(inputs={"x": x})
        return output.square().mean()

    plain = ft.train_step(ft.from_module(WritesOverInput(), loss), ft.optim.sgd(0.1))
    step, batch = ft.remat(blocks=[WritesOverInput])(plain), torch.ones(2, WIDTH)
    plain(plain.init(), batch)
    with pytest.raises(LossError, match="remat: a tensor among the arguments of a block was changed in place"):
        step(step.init(), batch)


class SpectralNorm(nn.Module):
    """Estimates a spectral norm by one more power iteration in each run, and keeps the vectors in buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return torch.tanh(self.linear(x))


class TakesGradient(nn.Module):
    """Takes a gradient in its forward pass, through a product that it has written over."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        hidden = self.up(x)
        hidden += 1
        (gradient,) = torch.autograd.grad(torch.sin(hidden).square().sum(), x, create_graph=True)
        return torch.sin(self.out(torch.sin(self.down(gradient))))


class ReadsValue(nn.Module):
    """Reads a value of a product in inference mode, as logging does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.logged = 0.0

    def forward(self, x):
        with torch.inference_mode():
            self.logged = self.linear(x).sum().item()
        return torch.tanh(self.linear(x))


def penalised(model, batch):
    """Return a loss with a gradient penalty: blocks are recomputed for it, and once more in the backward pass."""
    x = out = batch.clone().requires_grad_()
    for block in model:
        out = block(out)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + gradient.square().mean()


@pytest.mark.parametrize("block", [SpectralNorm, TakesGradient, ReadsValue])
@pytest.mark.parametrize("policy", ["full", "dots", everything], ids=["full", "dots", "everything"])
def test_no_bit_changes_where_the_loss_takes_a_gradient(block, policy):
    def trained(*wrappers):
        torch.manual_seed(0)
        model = nn.ModuleList(block() for _ in range(2)).double()
        step = ft.compose(ft.train_step(ft.from_module(model, penalised), ft.optim.sgd(0.1)), *wrappers)
        state, batch = step.init(), torch.randn(3, WIDTH, dtype=torch.float64)
        for _ in range(2):
            state, _ = step(state, batch)
        return state

    assert_same_bits(trained(ft.remat(policy=policy, blocks=[block])), trained())


@pytest.mark.parametrize("stack", ["eager", "captured"])
def test_no_bit_changes_for_an_attention_block_within_a_block(stack):
    """`nn.MultiheadAttention` takes another path where query, key and value are one tensor, which must stay so."""

    def trained(*wrappers):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True).double()
        loss = ft.from_module(layer, lambda model, batch: model(batch).square().mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers, *STACKS[stack])
        return step(step.init(), torch.randn(2, 3, WIDTH, dtype=torch.float64))[0]

    assert_same_bits(trained(ft.remat(blocks=[nn.TransformerEncoderLayer, nn.MultiheadAttention])), trained())


def test_a_model_may_skip_all_of_its_blocks_in_a_step():
    class SkipsBlocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x, skip):
            for block in () if skip else self.blocks:
                x = torch.sin(block(x))
            return x * self.scale

    def loss(model, batch):
        return model(batch["x"], batch["skip"]).square().mean()

    def trained(*wrappers):
        torch.manual_seed(0)
        step = ft.train_step(ft.from_module(SkipsBlocks(), loss), ft.optim.sgd(0.1), allow_unused=True)
        step = ft.compose(step, *wrappers)
        state = step.init()
        for skip in (False, True, False):
            state, _ = step(state, {"x": torch.ones(2, WIDTH), "skip": skip})
        return state

    assert_same_bits(trained(ft.remat(blocks=[nn.Linear])), trained())
