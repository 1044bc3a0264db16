"""Re-entrant checkpointing: torch.autograd.grad cannot find the parameters within it."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from ftrain.errors import LossError
from tests.faults.problem import failing

REMEDIES = "use_reentrant=False", "ft.remat()"
SPLIT = ft.compiled(backend="aot_eager", lowering="split")
WHOLE = ft.compiled(backend="aot_eager", lowering="whole")
# A warning of torch for checkpoints whose inputs do not require a gradient.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")


class Reentrant(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.runs = first, 0
        self.part, self.head = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4)
        self.spare = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.runs += 1
        return self.head(checkpoint(self.part, self.first(x), use_reentrant=True))


def step_of(model, *wrappers, **options):
    loss = ft.from_module(model, lambda model, x: model(x).square().mean())
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1), **options), *wrappers)


WRAPPERS = pytest.mark.parametrize(
    "wrappers",
    [(), (ft.accumulate(2),), (ft.update_in_backward(),), (WHOLE,)],
    ids=["plain", "accumulate", "late", "whole"],
)


@WRAPPERS
@pytest.mark.parametrize("allow_unused", [False, True])
def test_parameters_within_a_reentrant_checkpoint_whose_inputs_have_no_gradient_are_an_error(allow_unused, wrappers):
    step = step_of(Reentrant(nn.Identity()), *wrappers, allow_unused=allow_unused)
    state = step.init()
    for _ in range(2):
        with failing(LossError, "2 parameters", "part.0.bias, part.0.weight; use", "use_reentrant=True", *REMEDIES):
            step(state, torch.randn(4, 4))


@WRAPPERS
def test_a_gradient_through_a_reentrant_checkpoint_is_an_error(wrappers):
    step = step_of(Reentrant(nn.Linear(4, 4)), *wrappers, allow_unused=True)
    with failing(LossError, "use_reentrant=True", *REMEDIES):
        step(step.init(), torch.randn(4, 4))


def test_a_loss_whose_trained_parameters_are_all_within_a_reentrant_checkpoint_is_an_error():
    step = step_of(Reentrant(nn.Identity()), trainable=["part.*"])
    with failing(LossError, "does not depend on the parameters", "torch.utils.checkpoint with use_reentrant=True"):
        step(step.init(), torch.randn(4, 4))


def test_frozen_parameters_may_be_within_a_reentrant_checkpoint():
    model = Reentrant(nn.Identity())
    step = step_of(model, allow_unused=True, trainable=["head.*", "spare"])
    state = step.init()
    for count in (2, 3):  # Unused parameters are searched only in the first step.
        state, _ = step(state, torch.randn(4, 4))
        assert model.runs == count
    assert torch.equal(state.params["spare"], torch.zeros(4))
    assert not torch.equal(state.params["head.weight"], model.head.weight)


def test_a_split_step_has_gradients_within_a_reentrant_checkpoint():
    model = Reentrant(nn.Linear(4, 4))
    model.part[1].p = 0.0
    actual, _ = step_of(model, SPLIT, allow_unused=True)(step_of(model).init(), torch.ones(4, 4))
    model.forward = lambda x: model.head(model.part(model.first(x)))
    expected, _ = step_of(model, allow_unused=True)(step_of(model).init(), torch.ones(4, 4))
    torch.testing.assert_close(actual.params, expected.params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("trainable", [None, ["transformer.h.*", "transformer.ln_f.*"]], ids=["all", "blocks"])
def test_reentrant_gradient_checkpointing_of_transformers_is_an_error(trainable):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_embd=8, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.GPT2LMHeadModel(config)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    step = ft.train_step(ft.from_module(model), ft.optim.sgd(0.1), trainable=trainable, allow_unused=True)
    tokens = torch.ones(2, 6, dtype=torch.int64)
    with failing(LossError, "use_reentrant=True", *REMEDIES):
        step(step.init(), {"input_ids": tokens, "labels": tokens})
