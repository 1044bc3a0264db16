"""`with_amp("fp8")`: torchao's float8 products, emulated, in the layers of a module as a step binds them."""

import copy
import dataclasses
import importlib.util
import types

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.backends import cuda, rocm
from ftrain.errors import ComposeError, DeviceError, FtrainError, OptionError, StructureError
from ftrain.transforms.amp import float8
from tests.faults.problem import assert_bitwise, batch, failing, make, squares

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
quiet = pytest.mark.filterwarnings("ignore")  # Of torchao's import.


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 32, bias=False)) for _ in range(2)
        )
        self.odd, self.head = nn.Linear(32, 40), nn.Linear(40, 16)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.tanh(self.odd(x)))


def criterion(model, batch):
    return ft.Mean(model(batch).float().square().sum(), torch.tensor(float(batch.numel())))


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def data(rows=16):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))


def config(*, padded):
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(emulate=True, pad_inner_dim=padded)


@pytest.fixture
def emulated(monkeypatch):
    """A CPU that says it multiplies in float8, and torchao's arithmetic for those that do not."""
    monkeypatch.setattr(float8, "_config", config)
    real = ft.backends.get("cpu")
    ft.backends.register(dataclasses.replace(real, float8=lambda: True))
    yield
    ft.backends.register(real)


def step_of(*wrappers, model=None, dtype="fp8"):
    loss = ft.from_module(net() if model is None else model, criterion)
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.with_amp(dtype), *wrappers)


def train(step, batches):
    state, losses = step.init(), []
    for x in batches:
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"]))
    return state, losses


def by_torchao(model, batches):
    """The loop by hand over the module that torchao converts: its own layers in place of those of torch."""
    from torchao.float8 import convert_to_float8_training

    model = copy.deepcopy(model)
    chosen = {f"blocks.{block}.{layer}" for block in (0, 1) for layer in (0, 2)}
    convert_to_float8_training(model, module_filter_fn=lambda part, name: name in chosen, config=config(padded=False))
    for name in chosen:
        part = model.get_submodule(name)
        # Torchao's layer reads the autocast dtype of GPUs only, so its input is cast here as autocast on a CPU does.
        part.register_forward_pre_hook(lambda part, args: (args[0].bfloat16(),))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
        optimizer.zero_grad()
        loss.backward(gradient=torch.tensor(1.0 / x.numel()))
        optimizer.step()
        losses.append(float(loss) / x.numel())
    return dict(model.named_parameters()), losses


@needs_torchao
@quiet
def test_it_is_what_torchao_computes(emulated):
    model, batches = net(), [data(), data(48), data(32).reshape(2, 16, 32)]
    state, losses = train(step_of(model=model), batches)
    expected_params, expected_losses = by_torchao(model, batches)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert expected_params.keys() == state.params.keys()
    for name, leaf in state.params.items():
        torch.testing.assert_close(leaf, expected_params[name].detach(), rtol=1e-5, atol=1e-7)
    narrow, other = train(step_of(model=model, dtype="bf16"), batches)
    assert other == pytest.approx(losses, rel=0.05)
    assert not torch.equal(narrow.params["blocks.0.0.weight"], state.params["blocks.0.0.weight"])
    # What is left out is as it was in bf16, up to what reaches it.
    torch.testing.assert_close(narrow.params["head.bias"], state.params["head.bias"], rtol=0.1, atol=1e-2)


@needs_torchao
@quiet
def test_state_and_module_are_as_they_would_be_without(emulated, tmp_path):
    model = net()
    kept = {name: (type(part), set(part.__dict__)) for name, part in model.named_modules()}
    step, plain = step_of(model=model), step_of(model=model, dtype="bf16")
    state, _ = train(step, [data()])
    tree.require_same("test", "the state", state, plain.init())
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.float32}
    assert {name: (type(part), set(part.__dict__)) for name, part in model.named_modules()} == kept
    ft.checkpoint.save(tmp_path / "a", state)
    actual = ft.checkpoint.load(tmp_path / "a", like=plain.init())
    assert_bitwise(actual.params, state.params)


@needs_torchao
@quiet
@pytest.mark.parametrize(
    "more",
    [
        pytest.param((ft.remat(blocks=["blocks.0", "blocks.1"]),), id="remat"),
        pytest.param((ft.donated(),), id="donated"),
        pytest.param(
            (ft.remat("dots", blocks=["blocks.0"]), ft.compiled(lowering="whole", backend="eager", donate=True)),
            id="whole, remat, donated",
        ),
        pytest.param((ft.compiled(lowering="whole", backend="aot_eager"),), id="whole", marks=pytest.mark.exhaustive),
    ],
)
def test_other_wrappers_change_nothing(more, emulated):
    batches = [data(), data()]
    actual_state, losses = train(step_of(*more), batches)
    expected_state, expected_losses = train(step_of(), batches)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for a, b in zip(tree.leaves(actual_state.params), tree.leaves(expected_state.params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@needs_torchao
@quiet
@pytest.mark.parametrize("rows", [1, 15, 17, 0])
def test_any_number_of_rows(rows, emulated):
    """The gradient of a weight sums over rows, which torchao then pads to a multiple of 16."""
    step = step_of()
    state, (loss,) = train(step, [data(rows)])
    if not rows:
        return
    narrow, (other,) = train(step_of(dtype="bf16"), [data(rows)])
    assert loss == pytest.approx(other, rel=0.1)
    difference = tree.global_norm(tree.map(torch.sub, state.params, narrow.params))
    moved = tree.global_norm(tree.map(torch.sub, narrow.params, step.init().params))
    assert 0 < float(difference) < 0.2 * float(moved)


@needs_torchao
@quiet
@pytest.mark.parametrize(("shape", "padded"), [((32, 32), 0), ((2, 8, 32), 0), ((17, 32), 4), ((3, 5, 32), 4)])
def test_rows_are_padded_where_they_must_be(shape, padded, emulated, monkeypatch):
    """Emulated products take any number; those of a GPU do not."""
    seen = []
    converted = float8._converted

    def watched(layer, *, padded):
        float8_layer = converted(layer, padded=padded)
        forward = float8_layer.forward
        float8_layer.forward = lambda x: seen.append(padded) or forward(x)
        return float8_layer

    monkeypatch.setattr(float8, "_converted", watched)
    train(step_of(), [torch.randn(shape)])
    assert len(seen) == 4
    assert sum(seen) == padded


@needs_torchao
@quiet
def test_an_evaluation_of_the_steps_loss_is_in_float8_too(emulated):
    step = step_of()
    state = step.init()
    actual = ft.evaluate(ft.eval_step(step.loss), state, [data()])
    _, metrics = step(state, data())
    assert actual["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert actual != ft.evaluate(ft.eval_step(step.base), state, [data()], dtype="bf16")
    with failing(ComposeError, "evaluate", "computes in fp8"):
        ft.evaluate(ft.eval_step(step.loss), state, [data()], dtype="bf16")


def test_which_layers():
    assert list(float8.float8_layers(net())) == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    tied, embedding = nn.Linear(16, 32, bias=False), nn.Embedding(32, 16)
    tied.weight = embedding.weight
    parts = [embedding, tied, Own(16, 16), nn.Linear(16, 17), nn.Linear(17, 16), nn.Linear(16, 16), nn.Linear(16, 16)]
    assert list(float8.float8_layers(nn.Sequential(*parts))) == ["5"]


# Refusals


@needs_torchao
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_without_float8():
    step = step_of()
    with failing(DeviceError, "with_amp", "CPU", "no matmuls in fp8", "bf16, fp16, float32"):
        step.init()


def test_without_torchao(monkeypatch):
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    with failing(FtrainError, "fp8", "torchao", "pip install 'torchao>=0.18'"):
        ft.with_amp("fp8")


@needs_torchao
@quiet
def test_where_there_is_nothing_to_multiply_in_float8(emulated):
    with failing(OptionError, "fp8", "squares", "no module", "ft.from_module"):
        make(squares, ft.with_amp("fp8"))
    with failing(OptionError, "fp8", "Sequential", "multiples of 16", "head"):
        step_of(model=nn.Sequential(nn.Linear(32, 33), nn.Linear(33, 16)))
    loss = ft.from_module(net(), criterion)
    adapted = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.lora(2, targets=["odd"]))
    with failing(ComposeError, "fp8", "adapters", "bf16"):
        ft.with_amp("fp8")(adapted)
    with failing(StructureError, "params", "float16"):
        step_of(model=net().half()).init()


@needs_torchao
def test_what_it_is_not_asked_for_with():
    with failing(OptionError, "watch=True", "fp8", "watch bf16 or fp16"):
        ft.with_amp("fp8", watch=True)
    with failing(ComposeError, "with_amp(fp8)", "already has the wrapper with_amp", "with_amp(bf16)"):
        make(squares, ft.with_amp("bf16"), ft.with_amp("fp8"))
    with failing(OptionError, "evaluate", "'fp8'", "bf16, fp16"):
        ft.evaluate(ft.eval_step(squares), make().init({"w": torch.ones(3)}), [batch()], dtype="fp8")


# What devices say


@pytest.mark.parametrize(("capability", "able"), [((7, 5), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_of_nvidia(capability, able, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert cuda.BACKEND.float8() is able


@pytest.mark.parametrize(
    ("name", "able"), [("gfx90a:sramecc+", False), ("gfx942:sramecc+:xnack-", True), ("gfx950", True)]
)
def test_gpus_of_amd(name, able, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: types.SimpleNamespace(gcnArchName=name))
    assert rocm.BACKEND.float8() is able


def test_other_devices_have_none():
    assert not any(record.float8() for record in map(ft.backends.of, ("cpu", "mps", "hpu", "xla")))
