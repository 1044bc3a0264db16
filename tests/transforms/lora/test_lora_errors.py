"""What `lora` refuses: options, targets, compositions, and states of another step."""

import math

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, LossError, OptionError, StructureError
from tests.laws.models import make_batch
from tests.transforms.lora.models import loss, make_model, make_step


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank is 0, needs a whole number of at least 1"),
        ({"rank": 2.5}, r"rank is 2\.5"),
        ({"rank": True}, "rank is True"),
        ({"alpha": 0}, "alpha is 0, needs a positive number"),
        ({"alpha": math.inf}, "alpha is inf"),
        ({"alpha": "16"}, "alpha is '16'"),
        ({"dropout": 1.0}, r"dropout is 1\.0, needs a number in \[0, 1\)"),
        ({"dropout": -0.1}, r"dropout is -0\.1"),
        ({"targets": "*.up"}, r"targets is '\*\.up', needs a list of patterns of names"),
        ({"targets": []}, r"targets is \[\], needs a list"),
        ({"targets": [torch.nn.Linear]}, "targets is .*Linear.*, needs a list of patterns of names"),
    ],
)
def test_options_of_lora_out_of_their_range_are_refused(options, message):
    with pytest.raises(OptionError, match=f"lora: {message}"):
        ft.lora(**{"rank": 2, "targets": ["*.up"], **options})


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.upp", r"'\*\.upp', and no module of Net that matches can have an adapter; .*: blocks\.[01]\.up"),
        ("up", r"'up'.*: blocks\.[01]\.up"),
        ("*.norm", r"'\*\.norm', and no module of Net that matches can have an adapter; nn\.Linear"),
    ],
)
def test_targets_that_match_nothing_are_refused(pattern, message):
    with pytest.raises(OptionError, match=message):
        make_step(make_model(), ft.lora(2, targets=["*.down", pattern]))


def test_a_module_without_any_that_can_be_adapted_is_refused():
    with pytest.raises(OptionError, match=r"no module of Conv2d that matches can have an adapter; .*: there are none"):
        make_step(nn.Conv2d(1, 1, 3), ft.lora(2, targets=["x"]))


def test_an_embedding_that_rescales_its_weight_is_refused():
    embedding = nn.ModuleDict({"embed": nn.Embedding(3, 4, max_norm=1.0)})
    with pytest.raises(OptionError, match="that matches can have an adapter"):
        make_step(embedding, ft.lora(2, targets=["embed"]))


def test_a_weight_of_packed_bits_is_refused_with_advice():
    """As other libraries store them; the quantised weights of torchao have the shape of the layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = nn.Parameter(torch.zeros(4, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(OptionError, match=r"the weight of 1 is uint8\[4, 1\], bits that .* with torchao instead"):
        make_step(model, ft.lora(2, targets=["*"]), criterion=lambda model, batch: model(batch).sum())


def test_a_second_lora_is_refused():
    with pytest.raises(ComposeError, match=r"lora\(3, alpha=3\): the step already has the wrapper lora"):
        make_step(make_model(), ft.lora(2, targets=["head"]), ft.lora(3, targets=["*.up"]))


def test_lora_applied_without_options_or_to_a_plain_function_is_refused():
    with pytest.raises(ComposeError, match="lora: needs the argument rank"):
        ft.lora(make_step(make_model()))
    with pytest.raises(ComposeError, match="changes the loss of a Step"):
        ft.lora(2, targets=["head"])(lambda state, batch: (state, {}))


def test_states_and_losses_that_do_not_belong_together_are_refused():
    model = make_model()
    step, base_step = make_step(model, ft.lora(2, targets=["head"])), make_step(model)
    with pytest.raises(LossError, match=r"params has head\.lora_A\.weight, head\.lora_B\.weight, which .*step\.loss"):
        ft.eval_step(ft.from_module(model, loss))(step.init(), make_batch(0))
    with pytest.raises(LossError, match=r"params has no head\.lora_A\.weight.*step\.init"):
        ft.eval_step(step.loss)(base_step.init(), make_batch(0))
    with pytest.raises(StructureError, match=r"head\.lora_A\.weight is a parameter already"):
        step.init({**step.init().params, **base_step.init().params})


def test_an_adapter_of_a_module_that_the_loss_does_not_use_is_refused():
    def embedding_loss(model, batch):
        return model.embed(batch["tokens"]).square().mean()

    step = make_step(make_model(), ft.lora(2, targets=["embed", "head"]), criterion=embedding_loss)
    with pytest.raises(LossError, match=r"does not use 2 of 4 parameters: head\.lora_A\.weight, head\.lora_B\.weight"):
        step(step.init(), make_batch(0))


class Router(nn.Linear):
    """Returns scores and logits, as the routers of some models of transformers do."""

    def forward(self, x):
        logits = super().forward(x)
        return logits.sigmoid(), logits


def test_a_target_that_returns_no_tensor_is_refused():
    model = nn.Sequential(Router(4, 4))
    step = make_step(model, ft.lora(2, targets=["0"]), criterion=lambda model, batch: model(batch)[0].mean())
    with pytest.raises(LossError, match=r"lora: 0 \(Router\) returns tuple, .* leave it out of targets"):
        step(step.init(), torch.randn(3, 4))


def test_a_complex_weight_is_refused():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64).requires_grad_(False), nn.Linear(4, 2))
    with pytest.raises(OptionError, match=r"the weight of 0 is complex64\[4, 4\], and adapters are real"):
        make_step(model, ft.lora(2, targets=["*"]), criterion=lambda model, batch: model(batch).sum())


def test_dora_refuses_a_row_of_zeros():
    model = make_model()
    with torch.no_grad():
        model.head.weight[2:4] = 0
    with pytest.raises(StructureError, match=r"is 0 in head\.weight for 2 of 7 outputs"):
        make_step(model, ft.lora(2, targets=["head"], dora=True)).init()
    make_step(model, ft.lora(2, targets=["head"])).init()
