"""Modules that call `torch.utils.checkpoint` themselves train as without it."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from ftrain.errors import TraceError
from tests.step.modules import make_step, mean_square, train, vectors
from tests.step.states import assert_same_bits, assert_unchanged, snapshot


class Recomputing(nn.Module):
    """Calls `torch.utils.checkpoint` in its forward, as models of transformers can."""

    def __init__(self, recomputes, rate=0.0):
        super().__init__()
        self.first, self.recomputes = nn.Linear(4, 4), recomputes
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(rate), nn.Linear(4, 4))

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.block, x, use_reentrant=False) if self.recomputes else self.block(x)


def float32_vectors(seed):
    return vectors(seed).float()


def trained_params(*wrappers, recomputes, rate=0.0):
    """Return the parameters after some steps, and check that the model is unchanged."""
    torch.manual_seed(0)
    model = Recomputing(recomputes, rate)
    step = make_step(model, mean_square, *wrappers, optimizer=ft.optim.sgd(0.5, momentum=0.9))
    before = snapshot(model)
    state = train(step, float32_vectors)
    assert_unchanged(model, before)
    return state.params


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize(
    "wrappers",
    [
        (),
        (ft.accumulate(2),),
        (ft.with_amp("bf16"), ft.clip(0.1)),
        (ft.remat(blocks=["block"]),),
        (ft.update_in_backward(),),
        (ft.donated(), ft.ema(0.9)),
        (ft.compiled(lowering="split", backend="aot_eager"),),
    ],
    ids=lambda wrappers: " ".join(wrapper.text for wrapper in wrappers) or "plain",
)
def test_a_model_with_a_checkpoint_trains_with_the_bits_of_one_without(wrappers, rate):
    expected = trained_params(*wrappers, recomputes=False, rate=rate)
    assert_same_bits(trained_params(*wrappers, recomputes=True, rate=rate), expected)


class CountingBlock(nn.Module):
    """Counts its calls. Dynamo cannot trace that within a checkpoint, and breaks the graph."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.inner(x)) + self.offset


class RecomputingBlocks(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from Dynamo itself
@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2),), (ft.lora(2, targets=["*.inner"]),)], ids=len)
def test_a_checkpoint_that_dynamo_does_not_trace_recomputes_with_the_state(wrappers):
    def trained_params_of_blocks(*lowering):
        torch.manual_seed(0)
        model = RecomputingBlocks(CountingBlock(), CountingBlock())
        step = make_step(model, mean_square, *wrappers, *lowering, optimizer=ft.optim.sgd(0.5))
        return train(step, float32_vectors).params

    split = ft.compiled(lowering="split", backend="aot_eager")
    torch.testing.assert_close(trained_params_of_blocks(split), trained_params_of_blocks())


def test_a_whole_graph_with_a_checkpoint_computes_what_one_without_does():
    whole = ft.compiled(lowering="whole", backend="aot_eager")
    assert_same_bits(trained_params(whole, recomputes=True), trained_params(whole, recomputes=False))


@pytest.mark.parametrize("backend", ["aot_eager", None])
def test_a_whole_graph_refuses_dropout_within_a_checkpoint(backend):
    """It cannot repeat the random numbers of the first pass."""
    whole = ft.compiled(lowering="whole", backend=backend)
    with pytest.raises(TraceError, match=r"recomputed by torch.utils.checkpoint.*ft.remat\(\) instead"):
        trained_params(whole, recomputes=True, rate=0.5)


def test_the_automatic_lowering_splits_a_step_with_dropout_within_a_checkpoint():
    automatic = ft.compiled(backend="aot_eager")
    params = trained_params(automatic, recomputes=True, rate=0.5)
    torch.testing.assert_close(params, trained_params(recomputes=False, rate=0.5), rtol=1e-5, atol=1e-6)
