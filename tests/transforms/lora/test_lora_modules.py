"""`lora` and modules that are not plain stacks: tied weights, fused layers, a layer that runs twice, small shapes."""

import copy
import dataclasses
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ftrain as ft
from ftrain.errors import OptionError, StructureError
from tests.bits import assert_same_bits
from tests.laws.models import make_batch, token_loss
from tests.laws.models import make_model as make_tiny
from tests.transforms.lora.models import TARGETS, loss, make_model, make_step, train, without_none


def attributes_of(model):
    """Return the attributes of each module; dicts, such as that of its parameters, with the identities of values."""

    def comparable(attribute):
        if isinstance(attribute, dict):
            return {name: id(value) for name, value in attribute.items()}
        return attribute

    return [{name: comparable(value) for name, value in vars(module).items()} for module in model.modules()]


def test_the_module_is_as_before_after_steps_and_errors():
    model = make_model()
    before = attributes_of(model)

    def failing_loss(model, batch):
        loss(model, batch)
        raise RuntimeError("no")

    train(make_step(model, ft.lora(2, targets=TARGETS), ft.remat()))
    step = make_step(model, ft.lora(2, targets=TARGETS), criterion=failing_loss)
    with pytest.raises(RuntimeError, match="no"):
        step(step.init(), make_batch(0))
    assert attributes_of(model) == before


def make_tiny_step(model):
    """Return the step with adapters of a `make_tiny` model, whose head is tied to its embedding."""
    return make_step(model, ft.lora(2, targets=["head", "*.down"]), criterion=token_loss)


def test_a_tied_weight_gets_an_adapter_with_a_warning_and_cannot_be_merged():
    step = make_tiny_step(make_tiny())
    with pytest.warns(UserWarning, match=r"lora: head\.weight is tied to embed\.weight") as warnings_seen:
        state = step.init()
    assert len(warnings_seen) == 1
    embedding = state.frozen["embed.weight"].clone()
    for index in range(2):
        state, _ = step(state, make_batch(index))
    assert "head.lora_B.weight" in without_none(state.params)
    assert_same_bits(state.frozen["embed.weight"], embedding)
    with pytest.raises(StructureError, match=r"merge: head\.weight is tied to embed\.weight"):
        ft.adapters.merge(step, state)


@pytest.mark.filterwarnings("ignore:lora. .* is tied to:UserWarning")
def test_batch_statistics_are_updated_as_without_adapters():
    model = make_tiny()
    base_step, step = make_step(model, criterion=token_loss), make_tiny_step(model)
    base, _ = base_step(base_step.init(), make_batch(0))
    state, _ = step(step.init(), make_batch(0))
    # The norm of the first block comes before every adapter, so that its statistics are those of the base.
    assert_same_bits(state.buffers["blocks.0.norm.running_mean"], base.buffers["blocks.0.norm.running_mean"])


@pytest.mark.filterwarnings("ignore:lora. .* is tied to:UserWarning")
def test_adapters_of_a_tied_weight_are_merged_into_a_weight_that_is_no_longer_tied(tmp_path):
    """As the error of `merge` advises."""
    model = make_tiny()
    step = make_tiny_step(model)
    state, _ = step(step.init(), make_batch(0))
    with pytest.warns(UserWarning, match=r"changed buffers of the base.*blocks\.0\.norm\.running_mean"):
        ft.adapters.save(tmp_path / "adapters", step, state)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    untied_step = make_tiny_step(model)
    untied = ft.adapters.load(tmp_path / "adapters", untied_step, untied_step.init())
    merged = dataclasses.replace(ft.adapters.merge(untied_step, untied), buffers=state.buffers)
    actual = ft.eval_step(untied_step.base)(merged, make_batch(9))
    expected = ft.eval_step(step.loss)(state, make_batch(9))
    assert float(actual["loss"]) == pytest.approx(float(expected["loss"]), abs=1e-12)


def test_fused_layers_stay_off_while_another_thread_evaluates():
    """The switch belongs to the process, and two evaluations overlap: the first one ends within the second."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    seen = []

    def criterion(model, batch):
        if torch.is_grad_enabled():
            return model(batch).square().mean()
        is_first = threading.current_thread() is first
        (first_is_in if is_first else second_is_in).set()
        (second_is_in if is_first else first_is_out).wait(60)
        seen.append(torch.backends.mha.get_fastpath_enabled())
        return model(batch).square().mean()

    def evaluation():
        step = make_step(copy.deepcopy(encoder), ft.lora(2, targets=["linear?"]), criterion=criterion)
        state, evaluate = step.init(), ft.eval_step(step.loss)
        return lambda: evaluate(state, torch.ones(3, 4, 8))

    first = threading.Thread(target=evaluation())
    second = threading.Thread(target=evaluation())
    first.start()
    assert first_is_in.wait(60)
    second.start()
    first.join(60)
    first_is_out.set()
    second.join(60)
    assert seen == [False, False]
    assert torch.backends.mha.get_fastpath_enabled()


def test_fused_layers_of_torch_run_their_adapters_in_evaluation_too():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )

    def criterion(model, batch):
        return (model(batch)[..., 0] - 1).square().mean()

    step = make_step(encoder, ft.lora(2, targets=["*.linear?"]), criterion=criterion)
    state, batch = step.init(), torch.randn(3, 4, 8)
    for _ in range(3):
        state, _ = step(state, batch)
    evaluate = ft.eval_step(step.loss)
    fused = float(evaluate(state, batch)["loss"])
    assert torch.backends.mha.get_fastpath_enabled()
    assert fused < 0.99 * float(evaluate(step.init(), batch)["loss"])
    assert fused == pytest.approx(float(step(state, batch)[1]["loss"]), rel=1e-5)
    base = ft.eval_step(ft.from_module(encoder, criterion))
    assert fused == pytest.approx(float(base(ft.adapters.merge(step, state), batch)["loss"]), rel=1e-5)
    # The attention reads the weight of its output layer without calling the layer.
    with pytest.raises(OptionError, match="that matches can have an adapter"):
        make_step(encoder, ft.lora(2, targets=["*.out_proj"]))


def test_a_module_that_runs_twice_has_one_adapter_with_the_gradient_of_both_runs():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    batch = torch.randn(4, 3, dtype=torch.float64)
    step = make_step(
        Twice(),
        ft.lora(2, 3, targets=["layer"]),
        criterion=lambda model, batch: model(batch).square().mean(),
        optimizer=ft.optim.sgd(1.0),
    )
    # Neither factor is zero, so that both have a gradient.
    state = ft.tree.map(lambda leaf: leaf + 0.1 if leaf.ndim == 2 else leaf, step.init())
    a, b = (state.params[f"layer.lora_{factor}.weight"].requires_grad_() for factor in "AB")
    weight = state.frozen["layer.weight"] + 1.5 * b @ a
    bias = state.frozen["layer.bias"]
    F.linear(torch.tanh(F.linear(batch, weight, bias)), weight, bias).square().mean().backward()
    after, _ = step(ft.tree.clone(state), batch)
    torch.testing.assert_close(a.detach() - after.params["layer.lora_A.weight"], a.grad)
    torch.testing.assert_close(b.detach() - after.params["layer.lora_B.weight"], b.grad)


@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(1, 1, 1), (2, 3, 8), (4, 1, 2)])
def test_the_smallest_shapes_and_a_rank_above_them_train(inputs, outputs, rank):
    step = make_step(
        nn.Linear(inputs, outputs),
        ft.lora(rank, targets=[""], dora=True),
        criterion=lambda model, batch: model(batch).square().mean(),
    )
    state, metrics = step(step.init(), torch.randn(5, inputs))
    assert state.params["lora_B.weight"].shape == (outputs, rank)
    assert metrics["loss"].isfinite()


class CalledByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, tokens):
        return self.layer(input=self.embed(input=tokens))


@pytest.mark.parametrize("options", [{}, {"dora": True, "dropout": 0.5}], ids=["lora", "dora"])
def test_targets_may_be_called_with_names_of_arguments(options):
    step = make_step(
        CalledByName(),
        ft.lora(2, targets=["*"], **options),
        criterion=lambda model, batch: model(batch).square().mean(),
    )
    state = step.init()
    after, _ = step(state, torch.tensor([0, 2]))
    assert not torch.equal(after.params["layer.lora_B.weight"], state.params["layer.lora_B.weight"])
