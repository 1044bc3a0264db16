"""Adapters on a base that torchao has quantised: its weights are tensors that are made of other tensors."""

import copy

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import CheckpointError, StructureError
from tests.checkpoint.trees import assert_trees_equal
from tests.transforms.lora.models import adapters_in, make_step, without_none

quantization = pytest.importorskip("torchao.quantization", reason="quantises the base")
INT8, FLOAT8 = quantization.Int8WeightOnlyConfig, quantization.Float8WeightOnlyConfig


def build(config=INT8, dropout=0.1, seed=0):
    """Return a step whose base is quantised by a class of configurations of torchao, or is not if that is None."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 16), nn.Dropout(dropout), nn.Linear(16, 8))
    if config is not None:
        quantization.quantize_(model, config())
    lora = ft.lora(2, targets=["*"])
    return make_step(model, lora, criterion=mse, optimizer=ft.optim.adamw(0.01), trainable=[])


def mse(model, batch):
    return ft.losses.mse(model(batch["x"]), batch["y"])


def random_batch(rows=4):
    return {"x": torch.randn(rows, 32), "y": torch.randn(rows, 8)}


def make_loader():
    generator = torch.Generator().manual_seed(1)
    leaves = {"x": torch.randn(24, 32, generator=generator), "y": torch.randn(24, 8, generator=generator)}
    return ft.data.loader(ft.data.arrays(leaves), 8, seed=0)


def fit(directory, steps):
    step = build()
    return ft.fit(step, step.init(seed=3), make_loader(), steps=steps, checkpoints=ft.Checkpoints(directory, every=2))


def inner_tensors(leaf):
    """Return the tensors that a quantised weight is made of, or the leaf itself."""
    if not hasattr(leaf, "__tensor_flatten__"):
        return [leaf]
    names, _ = leaf.__tensor_flatten__()
    return [getattr(leaf, name) for name in names]


def assert_states_equal(actual, expected):
    for state in (actual, expected):
        assert type(state.frozen["0.weight"]).__name__ == "Int8Tensor"

    def plain(state):
        frozen = {name: inner_tensors(leaf) for name, leaf in without_none(state.frozen).items()}
        return state.params, frozen, state.opt_state, state.rng

    assert_trees_equal(plain(actual), plain(expected))


def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path):
    state, history = fit(tmp_path / "whole", 7)
    fit(tmp_path / "interrupted", 3)
    resumed, resumed_history = fit(tmp_path / "interrupted", 7)
    assert_states_equal(resumed, state)
    assert resumed_history["loss"] == history["loss"]


def test_quantised_weights_are_loaded_with_like_of_the_same_class_alone(tmp_path):
    state = build().init(seed=3)
    ft.checkpoint.save(tmp_path / "a", state)
    ft.checkpoint.verify(tmp_path / "a")
    loaded = ft.checkpoint.load(tmp_path / "a", like=build(seed=1).init(seed=4))
    assert_states_equal(loaded, state)
    batch = random_batch()
    assert_trees_equal(build()(loaded, batch)[1], build()(state, batch)[1])
    with pytest.raises(
        CheckpointError, match="the tree holds a tensor Int8Tensor, which can only be loaded with like="
    ):
        ft.checkpoint.load(tmp_path / "a")
    with pytest.raises(StructureError, match=r"frozen\.0\.weight: found tensor Int8Tensor, needs tensor Float8Tensor"):
        ft.checkpoint.load(tmp_path / "a", like=build(FLOAT8).init(seed=3))
    with pytest.raises(StructureError, match=r"frozen\.0\.weight: found tensor Int8Tensor, needs float32.*"):
        ft.checkpoint.load(tmp_path / "a", like=build(None).init(seed=3))


def test_adapters_train_as_on_the_dequantised_base():
    quantised = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    quantization.quantize_(quantised, INT8())
    dense = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    with torch.no_grad():
        for index in (0, 2):
            dense[index].weight.copy_(quantised[index].weight.dequantize())
            dense[index].bias.copy_(quantised[index].bias)
    batch = random_batch(16)
    states = []
    for base in (quantised, dense):
        step = make_step(base, ft.lora(4, targets=["*"], dora=True), criterion=mse, trainable=[])
        state = step.init()
        for _ in range(3):
            state, _ = step(state, batch)
        states.append(state)
    actual, expected = states
    assert type(actual.frozen["0.weight"]) is type(quantised[0].weight.data)
    for name, leaf in adapters_in(expected.params).items():
        torch.testing.assert_close(actual.params[name], leaf, rtol=1e-3, atol=1e-4)


def test_a_merged_weight_is_dense_and_the_others_stay_quantised():
    dense = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    quantised, batch = copy.deepcopy(dense), random_batch(16)
    quantization.quantize_(quantised, INT8())
    step = make_step(quantised, ft.lora(4, targets=["2"]), criterion=mse)
    state, _ = step(step.init(), batch)
    merged = ft.adapters.merge(step, state)
    expected = float(ft.eval_step(step.loss)(state, batch)["loss"])
    # Whether the module is quantised or not.
    for module in (copy.deepcopy(quantised), dense):
        ft.to_module(module, merged)
        with torch.no_grad():
            assert float(mse(module, batch)) == pytest.approx(expected)
        assert type(module[2].weight.data) is torch.Tensor
        assert type(module[0].weight.data) is type(quantised[0].weight.data)


@pytest.mark.parametrize("lowering", ["whole", "split"])
def test_a_compiled_step_computes_the_same(lowering):
    """A whole graph has the inner tensors of the weights as inputs."""
    batch = random_batch()
    dropout = 0.0 if lowering == "whole" else 0.1  # Stock dropout draws other bits in a whole graph.
    eager = build(dropout=dropout)
    compiled = ft.compose(eager, ft.donated(), ft.compiled(lowering=lowering, backend="aot_eager"))
    state, expected = eager.init(seed=3), eager.init(seed=3)
    for _ in range(2):
        state, metrics = compiled(state, batch)
        expected, expected_metrics = eager(expected, batch)
    assert type(state.frozen["0.weight"]) is type(expected.frozen["0.weight"])
    torch.testing.assert_close(metrics["loss"], expected_metrics["loss"])
    torch.testing.assert_close(state.params, expected.params)


def test_dense_and_quantised_weights_of_each_class_have_graphs_of_their_own():
    batch = random_batch()
    compiled = ft.compose(build(None, 0.0), ft.compiled(lowering="whole", backend="eager"))
    for config in (None, INT8, FLOAT8):
        eager = build(config, 0.0)
        state = eager.init(seed=3)
        torch.testing.assert_close(compiled(state, batch)[1]["loss"], eager(state, batch)[1]["loss"])


def test_a_run_is_replayed_from_a_state_with_the_donated_weights_of_its_module(tmp_path):
    _, history = fit(tmp_path, 5)
    start = build().init(seed=3, donate=True)
    before, batch = ft.replay(build(), start, make_loader(), ft.Checkpoints(tmp_path, every=2), at=4)
    assert float(build()(before, batch)[1]["loss"]) == history["loss"][3]


@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=["one device", "planned ranks"])
def test_the_predicted_memory_has_the_bytes_of_the_quantised_weights(mesh):
    step, batch = build(), random_batch(8)
    state = step.init()
    leaves = ft.tree.leaves(state.frozen)
    quantised_bytes = sum(inner.nbytes for leaf in leaves if leaf.ndim == 2 for inner in inner_tensors(leaf))
    bias_bytes = sum(leaf.nbytes for leaf in leaves if leaf.ndim == 1)
    predicted = ft.anatomy(step, state, batch, mesh=mesh)
    # Quantised weights are whole on every rank, and the biases divided over two.
    expected = quantised_bytes + (bias_bytes if mesh is None else bias_bytes // 2)
    assert predicted.most["frozen parameters"] == expected
