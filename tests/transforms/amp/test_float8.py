"""`with_amp("fp8")`: torchao's float8 products, emulated, in the layers of a module as a step binds them."""

import copy
import dataclasses
import importlib.util
import types
import warnings

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.backends import cuda, rocm
from ftrain.errors import ComposeError, DeviceError, FtrainError, OptionError, StructureError
from ftrain.transforms.amp import float8
from tests.bits import assert_same_bits
from tests.faults.problem import batch, failing, make, squares

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")


class Net(nn.Module):
    """Two blocks whose layers multiply in float8, and two layers that do not: 40 is not a multiple of 16."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False)) for _ in range(2)
        )
        self.odd, self.head = nn.Linear(32, 40), nn.Linear(40, 16)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.tanh(self.odd(x)))


FLOAT8_LAYERS = ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]


def criterion(model, batch):
    return ft.Mean(model(batch).float().square().sum(), torch.tensor(float(batch.numel())))


def make_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


def make_batch(rows=16):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))


def emulated_config(*, padded):
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(emulate=True, pad_inner_dim=padded)


@pytest.fixture
def _emulated(monkeypatch):
    """A CPU that says that it multiplies in float8, with torchao's arithmetic for devices that cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.float8", reason="multiplies in float8")
    monkeypatch.setattr(float8, "_config", emulated_config)
    record = ft.backends.get("cpu")
    ft.backends.register(dataclasses.replace(record, float8=lambda: True))
    yield
    ft.backends.register(record)


emulated = pytest.mark.usefixtures("_emulated")


def make_step(*wrappers, model=None, dtype="fp8"):
    loss_fn = ft.from_module(make_net() if model is None else model, criterion)
    return ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1)), ft.with_amp(dtype), *wrappers)


def train(step, batches):
    """Return the state after a step on each batch, and the losses."""
    state, losses = step.init(), []
    for x in batches:
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"]))
    return state, losses


def train_with_torchao(model, batches):
    """Return the parameters and the losses of a loop by hand over the module that torchao converts."""
    from torchao.float8 import convert_to_float8_training

    model = copy.deepcopy(model)
    convert_to_float8_training(
        model, module_filter_fn=lambda layer, name: name in FLOAT8_LAYERS, config=emulated_config(padded=False)
    )
    for name in FLOAT8_LAYERS:
        # Torchao's layer reads the autocast dtype of GPUs only, so its input is cast here as autocast on a CPU does.
        model.get_submodule(name).register_forward_pre_hook(lambda layer, args: (args[0].bfloat16(),))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
        optimizer.zero_grad()
        loss.backward(gradient=torch.tensor(1.0 / x.numel()))
        optimizer.step()
        losses.append(float(loss.detach()) / x.numel())
    return dict(model.named_parameters()), losses


def assert_close(actual, expected, *, rtol=1e-5, atol=1e-7):
    assert actual.keys() == expected.keys()
    for name, param in actual.items():
        torch.testing.assert_close(param, expected[name].detach(), rtol=rtol, atol=atol)


@emulated
def test_a_step_computes_what_torchao_computes():
    model, batches = make_net(), [make_batch(), make_batch(48), make_batch(32).reshape(2, 16, 32)]
    state, losses = train(make_step(model=model), batches)
    expected_params, expected_losses = train_with_torchao(model, batches)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_close(state.params, expected_params)


@emulated
def test_a_step_differs_from_bf16_by_the_rounding_of_float8():
    model, batches = make_net(), [make_batch(), make_batch(48)]
    state, losses = train(make_step(model=model), batches)
    bf16_state, bf16_losses = train(make_step(model=model, dtype="bf16"), batches)
    assert losses == pytest.approx(bf16_losses, rel=0.05)
    assert not torch.equal(state.params["blocks.0.0.weight"], bf16_state.params["blocks.0.0.weight"])
    # The head multiplies in bf16; only its input differs.
    torch.testing.assert_close(state.params["head.bias"], bf16_state.params["head.bias"], rtol=0.1, atol=1e-2)


@emulated
def test_the_state_and_the_module_are_those_of_bf16(tmp_path):
    def types_and_attributes(model):
        return {name: (type(module), set(vars(module))) for name, module in model.named_modules()}

    model = make_net()
    before = types_and_attributes(model)
    step, bf16_step = make_step(model=model), make_step(model=model, dtype="bf16")
    state, _ = train(step, [make_batch()])
    assert types_and_attributes(model) == before
    tree.require_same("test", "the state", state, bf16_step.init())
    assert {leaf.dtype for leaf in tree.leaves(state.params)} == {torch.float32}
    ft.checkpoint.save(tmp_path / "a", state)
    assert_same_bits(ft.checkpoint.load(tmp_path / "a", like=bf16_step.init()).params, state.params)


@emulated
@pytest.mark.parametrize(
    "wrappers",
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
def test_other_wrappers_change_nothing(wrappers):
    batches = [make_batch(), make_batch()]
    state, losses = train(make_step(*wrappers), batches)
    expected_state, expected_losses = train(make_step(), batches)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_close(state.params, expected_state.params)


@emulated
@pytest.mark.parametrize("rows", [1, 15, 17])
def test_any_number_of_rows(rows):
    """The gradient of a weight sums over rows, which torchao then pads to a multiple of 16."""
    step = make_step()
    state, (loss,) = train(step, [make_batch(rows)])
    bf16_state, (bf16_loss,) = train(make_step(dtype="bf16"), [make_batch(rows)])
    assert loss == pytest.approx(bf16_loss, rel=0.1)
    difference = tree.global_norm(tree.map(torch.sub, state.params, bf16_state.params))
    update = tree.global_norm(tree.map(torch.sub, bf16_state.params, step.init().params))
    assert 0 < float(difference) < 0.2 * float(update)


@emulated
def test_a_batch_without_rows_changes_no_parameter():
    step = make_step()
    state, _ = train(step, [make_batch(0)])
    assert_same_bits(state.params, step.init().params)


@emulated
@pytest.mark.parametrize(
    ("shape", "is_padded"), [((32, 32), False), ((2, 8, 32), False), ((17, 32), True), ((3, 5, 32), True)]
)
def test_rows_are_padded_to_a_multiple_of_16(shape, is_padded, monkeypatch):
    """A GPU needs that; emulated products take any number of rows."""
    calls = []
    convert = float8._converted

    def convert_recording(layer, *, padded):
        float8_layer = convert(layer, padded=padded)
        forward = float8_layer.forward

        def forward_recording(x):
            calls.append(padded)
            return forward(x)

        float8_layer.forward = forward_recording
        return float8_layer

    monkeypatch.setattr(float8, "_converted", convert_recording)
    train(make_step(), [torch.randn(shape)])
    assert calls == [is_padded] * len(FLOAT8_LAYERS)


@emulated
def test_an_evaluation_of_the_loss_of_a_step_is_in_float8_too():
    step = make_step()
    state = step.init()
    means = ft.evaluate(ft.eval_step(step.loss), state, [make_batch()])
    _, metrics = step(state, make_batch())
    assert means["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert means != ft.evaluate(ft.eval_step(step.base), state, [make_batch()], dtype="bf16")
    with failing(ComposeError, "evaluate", "computes in fp8"):
        ft.evaluate(ft.eval_step(step.loss), state, [make_batch()], dtype="bf16")


def test_layers_whose_sizes_are_multiples_of_16_multiply_in_float8_except_for_the_head():
    assert list(float8.float8_layers(make_net())) == FLOAT8_LAYERS
    sizes = [(16, 16), (16, 17), (17, 16), (32, 48), (48, 16)]
    assert list(float8.float8_layers(nn.Sequential(*(nn.Linear(*size) for size in sizes)))) == ["0", "3"]


def test_tied_layers_and_those_with_a_forward_of_their_own_do_not_multiply_in_float8():
    class Doubling(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    tied, embedding = nn.Linear(16, 32, bias=False), nn.Embedding(32, 16)
    tied.weight = embedding.weight
    plain, head = nn.Linear(16, 16), nn.Linear(16, 16)
    assert list(float8.float8_layers(nn.Sequential(embedding, tied, Doubling(16, 16), plain, head))) == ["3"]


# Refusals


@needs_torchao
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_without_float8_is_refused():
    step = make_step()
    with failing(DeviceError, "with_amp", "CPU", "no matmuls in fp8", "bf16, fp16, float32"):
        step.init()


def test_without_torchao_it_is_refused(monkeypatch):
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    with failing(FtrainError, "fp8", "torchao", "pip install 'torchao>=0.18'"):
        ft.with_amp("fp8")


@needs_torchao
def test_a_pure_loss_is_refused():
    with failing(OptionError, "fp8", "squares", "no module", "ft.from_module"):
        make(squares, ft.with_amp("fp8"))


@needs_torchao
def test_a_module_without_a_layer_for_float8_is_refused():
    with failing(OptionError, "fp8", "Sequential", "multiples of 16", "head"):
        make_step(model=nn.Sequential(nn.Linear(32, 33), nn.Linear(33, 16)))


@needs_torchao
def test_a_step_with_adapters_is_refused():
    adapted = ft.train_step(ft.from_module(make_net(), criterion), ft.optim.sgd(0.1))
    adapted = ft.lora(2, targets=["odd"])(adapted)
    with failing(ComposeError, "fp8", "adapters", "bf16"):
        ft.with_amp("fp8")(adapted)


@emulated
def test_parameters_in_float16_are_refused():
    with failing(StructureError, "params", "float16"):
        make_step(model=make_net().half()).init()


@needs_torchao
def test_float8_is_not_watched():
    with failing(OptionError, "watch=True", "fp8", "watch bf16 or fp16"):
        ft.with_amp("fp8", watch=True)


@needs_torchao
def test_a_second_with_amp_is_refused():
    with failing(ComposeError, "with_amp(fp8)", "already has the wrapper with_amp", "with_amp(bf16)"):
        make(squares, ft.with_amp("bf16"), ft.with_amp("fp8"))


def test_an_evaluation_of_any_loss_in_float8_is_refused():
    """Only the loss of a step with float8 computes in it."""
    with failing(OptionError, "evaluate", "'fp8'", "bf16, fp16"):
        ft.evaluate(ft.eval_step(squares), make().init({"w": torch.ones(3)}), [batch()], dtype="fp8")


# Which devices multiply in float8


@pytest.mark.parametrize(
    ("capability", "multiplies"), [((7, 5), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_gpus_of_nvidia_multiply_in_float8_from_8_9_on(capability, multiplies, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert cuda.BACKEND.float8() is multiplies


@pytest.mark.parametrize(
    ("name", "multiplies"), [("gfx90a:sramecc+", False), ("gfx942:sramecc+:xnack-", True), ("gfx950", True)]
)
def test_gpus_of_amd_multiply_in_float8_from_gfx942_on(name, multiplies, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: types.SimpleNamespace(gcnArchName=name))
    assert rocm.BACKEND.float8() is multiplies


@pytest.mark.parametrize("name", ["cpu", "mps", "hpu", "xla"])
def test_other_devices_have_no_float8(name):
    assert not ft.backends.of(name).float8()
