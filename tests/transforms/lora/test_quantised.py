"""Runs on a base that torchao has quantised: its weights are tensors that are made of others."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import CheckpointError, OptionError, StructureError
from tests.checkpoint.trees import assert_trees_equal

quantization = pytest.importorskip("torchao.quantization", reason="quantises the base")


def pipeline(quantise=quantization.Int8WeightOnlyConfig, dropout=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Dropout(dropout), nn.Linear(16, 8))
    if quantise is not None:
        quantization.quantize_(model, quantise())
    loss = ft.from_module(model, lambda model, batch: ft.losses.mse(model(batch["x"]), batch["y"]))
    return ft.compose(ft.train_step(loss, ft.optim.adamw(0.01), trainable=[]), ft.lora(2, targets=["*"]))


def rows():
    generator = torch.Generator().manual_seed(1)
    leaves = {"x": torch.randn(24, 32, generator=generator), "y": torch.randn(24, 8, generator=generator)}
    return ft.data.loader(ft.data.arrays(leaves), 8, seed=0)


def fitted(directory, steps):
    step = pipeline()
    return ft.fit(step, step.init(seed=3), rows(), steps=steps, checkpoints=ft.Checkpoints(directory, every=2))


def bits(state):
    """The state with the parts of its quantised weights in place of these."""
    frozen = {name: leaf for name, leaf in state.frozen.items() if leaf is not None}
    parts = {name: [getattr(leaf, part) for part in names_of(leaf)] for name, leaf in frozen.items()}
    return state.params, parts, state.opt_state, state.rng


def names_of(leaf):
    return leaf.__tensor_flatten__()[0] if hasattr(leaf, "__tensor_flatten__") else ["data"]


def test_a_run_that_was_interrupted_goes_on_with_the_same_bits(tmp_path):
    state, history = fitted(tmp_path / "whole", 7)
    fitted(tmp_path / "parts", 3)
    resumed, resumed_history = fitted(tmp_path / "parts", 7)
    assert type(resumed.frozen["0.weight"]) is type(state.frozen["0.weight"])
    assert_trees_equal(bits(resumed), bits(state))
    assert resumed_history["loss"] == history["loss"]


def test_they_are_loaded_with_a_template_of_the_same_class(tmp_path):
    state = pipeline().init(seed=3)
    ft.checkpoint.save(tmp_path / "a", state)
    ft.checkpoint.verify(tmp_path / "a")
    loaded = ft.checkpoint.load(tmp_path / "a", like=pipeline().init(seed=4))
    assert_trees_equal(bits(loaded), bits(state))
    batch = {"x": torch.randn(4, 32), "y": torch.randn(4, 8)}
    assert_trees_equal(pipeline()(loaded, batch)[1], pipeline()(state, batch)[1])
    with pytest.raises(
        CheckpointError, match="the tree holds a tensor Int8Tensor, which can only be loaded with like="
    ):
        ft.checkpoint.load(tmp_path / "a")
    other = pipeline(quantization.Float8WeightOnlyConfig).init(seed=3)
    with pytest.raises(StructureError, match=r"frozen\.0\.weight: found tensor Int8Tensor, needs tensor Float8Tensor"):
        ft.checkpoint.load(tmp_path / "a", like=other)
    with pytest.raises(StructureError, match=r"frozen\.0\.weight: found tensor Int8Tensor, needs float32.*"):
        ft.checkpoint.load(tmp_path / "a", like=pipeline(None).init(seed=3))


@pytest.mark.parametrize("lowering", ["whole", "split"])
def test_a_compiled_step_computes_the_same(lowering):
    """As one graph, whose inputs are the tensors in the weights."""
    batch = {"x": torch.randn(4, 32), "y": torch.randn(4, 8)}
    dropout = 0.0 if lowering == "whole" else 0.1  # The draws of stock modules are others in a whole graph.
    eager = pipeline(dropout=dropout)
    compiled = ft.compose(eager, ft.donated(), ft.compiled(lowering=lowering, backend="aot_eager"))
    state, expected = eager.init(seed=3), eager.init(seed=3)
    for _ in range(2):
        state, metrics = compiled(state, batch)
        expected, expected_metrics = eager(expected, batch)
    assert type(state.frozen["0.weight"]) is type(expected.frozen["0.weight"])
    torch.testing.assert_close(metrics["loss"], expected_metrics["loss"])
    torch.testing.assert_close(state.params, expected.params)


def test_a_step_without_them_and_one_with_them_are_different_graphs():
    """And so are steps with weights of two classes."""
    batch = {"x": torch.randn(4, 32), "y": torch.randn(4, 8)}
    compiled = ft.compose(pipeline(None, 0.0), ft.compiled(lowering="whole", backend="eager"))
    for quantise in (None, quantization.Int8WeightOnlyConfig, quantization.Float8WeightOnlyConfig):
        state = pipeline(quantise, 0.0).init(seed=3)
        _, metrics = compiled(state, batch)
        torch.testing.assert_close(metrics["loss"], pipeline(quantise, 0.0)(state, batch)[1]["loss"])


def test_a_run_is_replayed_and_a_state_may_take_the_weights_of_its_module(tmp_path):
    _, history = fitted(tmp_path, 5)
    start = pipeline().init(seed=3, donate=True)
    before, batch = ft.replay(pipeline(), start, rows(), ft.Checkpoints(tmp_path, every=2), at=4)
    assert float(pipeline()(before, batch)[1]["loss"]) == history["loss"][3]


def test_a_weight_of_packed_bits_is_refused_with_a_way_to_quantise():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    step = ft.train_step(ft.from_module(model, lambda model, batch: model(batch).sum()), ft.optim.sgd(0.1))
    with pytest.raises(OptionError, match=r"the weight of 1 is uint8\[4, 1\], bits that .* with torchao instead"):
        ft.compose(step, ft.lora(2, targets=["*"]))


@pytest.mark.parametrize("mesh", [None, (2, 2)], ids=["one device", "planned ranks"])
def test_the_memory_of_a_step_is_predicted_with_the_bytes_of_its_quantised_weights(mesh):
    step, batch = pipeline(), {"x": torch.randn(8, 32), "y": torch.randn(8, 8)}
    state = step.init()
    weights = [leaf for leaf in ft.tree.leaves(state.frozen) if names_of(leaf) != ["data"]]
    stored = sum(getattr(leaf, name).nbytes for leaf in weights for name in names_of(leaf))
    biases = sum(leaf.nbytes for leaf in ft.tree.leaves(state.frozen) if leaf.ndim == 1)
    predicted = ft.anatomy(step, state, batch, mesh=mesh)
    # Quantised weights are whole on every rank, and the others divided over two.
    assert predicted.most["frozen parameters"] == stored + (biases if mesh is None else biases // 2)
