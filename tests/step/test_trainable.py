"""Which parameters are trained: `requires_grad`, `trainable=`, and a state that trains others."""

import pytest
import torch

import ftrain as ft
from ftrain.errors import StructureError
from tests.step.modules import LR, make_case, make_step, train_by_hand


def test_parameters_that_require_no_gradient_are_frozen():
    module, make_batch, criterion = make_case("net")
    module.embed.weight.requires_grad_(False)
    step = make_step(module, criterion, optimizer=ft.optim.adamw(LR, weight_decay=0.5))
    state = step.init()
    new, _ = step(state, make_batch())
    assert sorted(name for name, leaf in new.params.items() if leaf is not None) == ["norm.bias", "norm.weight"]
    assert torch.equal(new.frozen["embed.weight"], module.embed.weight)
    assert not module.embed.weight.requires_grad
    assert not torch.equal(new.params["norm.weight"], state.params["norm.weight"])
    assert new.opt_state["mu"]["embed.weight"] is None


@pytest.mark.parametrize(
    "trainable",
    [["norm.*"], ("norm.weight", "norm.bias"), lambda name, leaf: leaf.ndim == 1, lambda name, leaf: "norm" in name],
    ids=["pattern", "names", "by leaf", "by name"],
)
def test_trainable_chooses_the_parameters_that_are_trained(trainable):
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion, trainable=trainable)
    state = step.init()
    new, _ = step(state, make_batch())
    assert state.params["embed.weight"] is None
    assert torch.equal(new.frozen["embed.weight"], module.embed.weight)
    _, grads = train_by_hand(module, make_batch, criterion, steps=1)
    for name in ("norm.weight", "norm.bias"):
        assert new.frozen[name] is None
        torch.testing.assert_close((state.params[name] - new.params[name]) / LR, grads[name], rtol=1e-9, atol=1e-12)


def test_trainable_overrides_requires_grad():
    module, make_batch, criterion = make_case("net")
    module.requires_grad_(False)
    step = make_step(module, criterion, trainable=["norm.*"])
    state, _ = step(step.init(), make_batch())
    assert not torch.equal(state.params["norm.weight"], module.norm.weight)
    assert not module.norm.weight.requires_grad


def step_without_embedding(module, criterion, *wrappers, by):
    """Return a step that freezes the embedding, by an option or by a flag of the parameter."""
    if by == "trainable":
        return make_step(module, criterion, *wrappers, trainable=["norm.*"])
    module.embed.weight.requires_grad_(False)
    return make_step(module, criterion, *wrappers)


@pytest.mark.parametrize("by", ["trainable", "requires_grad"])
def test_another_step_that_trains_the_same_parameters_takes_the_state(by):
    module, make_batch, criterion = make_case("net")
    step = step_without_embedding(module, criterion, by=by)
    state, _ = step(step.init(), make_batch())
    step_without_embedding(module, criterion, ft.clip(1.0), by=by)(state, make_batch())


@pytest.mark.parametrize("by", ["trainable", "requires_grad"])
def test_a_state_that_freezes_what_the_step_trains_is_refused(by):
    """The module was unfrozen between two phases, but the state still freezes the embedding."""
    module, make_batch, criterion = make_case("net")
    state = step_without_embedding(module, criterion, by=by).init()
    module.embed.weight.requires_grad_(True)
    step = make_step(module, criterion)
    message = r"the state freezes params\.embed\.weight, which this step trains; .*init"
    with pytest.raises(StructureError, match=message):
        step(state, make_batch())
    with pytest.raises(StructureError, match=message):
        ft.fit(step, state, [make_batch()], progress=False)


@pytest.mark.parametrize("by", ["trainable", "requires_grad"])
def test_a_state_that_trains_what_the_step_freezes_is_refused(by):
    module, make_batch, criterion = make_case("net")
    state = make_step(module, criterion).init()
    with pytest.raises(StructureError, match=r"the state trains params\.embed\.weight, which this step freezes"):
        step_without_embedding(module, criterion, by=by)(state, make_batch())
