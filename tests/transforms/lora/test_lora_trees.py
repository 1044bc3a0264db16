"""`lora` of a pure loss: its matrices get their adapters added, and what a tree cannot have is refused."""

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError, LossError, OptionError
from tests.bits import assert_same_bits


def tree_loss(params, batch):
    hidden = torch.tanh(batch @ params["layers"][0]["w"])
    return (hidden @ params["layers"][1]["w"] + params["bias"]).square().mean()


def tree_params():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {"layers": [{"w": draw(4, 5)}, {"w": draw(5, 2)}], "bias": draw(2)}


def make_tree_step(*wrappers, **options):
    return ft.compose(ft.train_step(tree_loss, ft.optim.sgd(0.1), **options), *wrappers)


def train_adapters_and_bias(params, batch):
    """Return a step and its state after 5 steps."""
    step = make_tree_step(ft.accumulate(2), ft.lora(2, 6, targets=["layers.*.w"]), trainable=["bias"])
    state = step.init(params)
    for _ in range(5):
        state, _ = step(state, batch)
    return step, state


def add_by_hand(params, state):
    """Return a copy of the parameters with the bias of a state, and its adapters added."""
    adapted = ft.tree.clone(params)
    adapted["bias"] = state.params["base"]["bias"]
    for index, layer in enumerate(adapted["layers"]):
        factors = state.params["adapters"][f"layers.{index}.w"]
        layer["w"] += 3 * factors["B"] @ factors["A"]
    return adapted


def test_a_tree_begins_with_the_loss_of_its_base():
    params, batch = tree_params(), torch.randn(6, 4, dtype=torch.float64)
    step = make_tree_step(ft.lora(2, 6, targets=["layers.*.w"]), trainable=["bias"])
    state = step.init(params)
    assert_same_bits(ft.eval_step(step.loss)(state, batch)["loss"].value, tree_loss(params, batch))
    assert ft.tree.leaf_names(state.params) == [
        "adapters.layers.0.w.A",
        "adapters.layers.0.w.B",
        "adapters.layers.1.w.A",
        "adapters.layers.1.w.B",
        "base.bias",
    ]


def test_a_tree_gets_its_matrices_with_the_adapters_added():
    params, batch = tree_params(), torch.randn(6, 4, dtype=torch.float64)
    step, state = train_adapters_and_bias(params, batch)
    expected = float(tree_loss(add_by_hand(params, state), batch))
    assert float(ft.eval_step(step.loss)(state, batch)["loss"]) == pytest.approx(expected)


def test_adapters_of_a_tree_are_merged_and_unmerged():
    params, batch = tree_params(), torch.randn(6, 4, dtype=torch.float64)
    step, state = train_adapters_and_bias(params, batch)
    merged = ft.adapters.merge(step, state)
    torch.testing.assert_close(merged.params, add_by_hand(params, state))
    unmerged = ft.adapters.unmerge(step, merged)
    for actual, expected in zip(ft.tree.leaves(unmerged), ft.tree.leaves(state), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"dora": True}])
def test_a_tree_has_no_dropout_and_no_magnitudes(option):
    with pytest.raises(OptionError, match=r"lora: dropout and dora are for modules, and tree_loss is a loss of a tree"):
        make_tree_step(ft.lora(2, targets=["layers.*.w"], **option))


def test_targets_of_a_tree_that_match_nothing_are_refused():
    step = make_tree_step(ft.lora(2, targets=["layers.w"]))
    with pytest.raises(
        OptionError, match=r"lora: targets names 'layers\.w', and no .* there are layers\.[01]\.w, layers\.[01]\.w"
    ):
        step.init(tree_params())


def test_a_tree_with_two_matrices_of_one_name_is_refused():
    # They would share one adapter.
    def loss(params, batch):
        return (batch @ params["a"]["b"]).square().mean() + (batch @ params["a.b"]).square().mean()

    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.lora(2, targets=["*"]))
    with pytest.raises(ComposeError, match=r"lora: two parameters are called a\.b"):
        step.init({"a": {"b": torch.randn(3, 3)}, "a.b": torch.randn(3, 3)})


def test_a_tree_without_a_matrix_is_refused():
    step = make_tree_step(ft.lora(2, targets=["*"]))
    with pytest.raises(OptionError, match="no floating-point leaf with two axes"):
        step.init({"bias": torch.ones(3)})


def test_a_state_without_adapters_is_refused():
    step, base_step = make_tree_step(ft.lora(2, targets=["*.w"])), make_tree_step()
    with pytest.raises(LossError, match="params has no adapters"):
        ft.eval_step(step.loss)(base_step.init(tree_params()), torch.ones(1, 4))


def test_matrices_of_integers_and_complex_numbers_get_no_adapter():
    params = {"w": torch.randn(4, 3), "table": torch.arange(6).view(3, 2), "phases": torch.ones(2, 2) * 1j}

    def tree_loss(params, batch):
        assert torch.equal(params["table"], torch.arange(6).view(3, 2))
        return (batch @ params["w"]).square().mean() + params["phases"].imag.mean()

    step = ft.compose(ft.train_step(tree_loss, ft.optim.sgd(0.1), trainable=["w"]), ft.lora(2, targets=["*"]))
    state = step.init(params)
    assert state.params["adapters"].keys() == {"w"}
    assert float(step(state, torch.zeros(2, 4))[1]["loss"]) == 1
