"""Merged weights compute what adapters do, and unmerging them gives the state back."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ftrain as ft
from ftrain.errors import ComposeError, LossError, StructureError
from tests.bits import assert_same_bits
from tests.laws.models import make_batch
from tests.transforms.lora.models import TARGETS, VARIANTS, adapters_in, loss, make_model, make_step, train

variants = pytest.mark.parametrize("variant", VARIANTS)


def train_adapters(variant, dtype=torch.float64, *wrappers, **options):
    """Return a model, its step with adapters, and the state after 5 steps."""
    model = make_model(dtype=dtype)
    step = make_step(model, ft.lora(3, 5, targets=TARGETS, **VARIANTS[variant]), *wrappers, **options)
    state, _ = train(step, 5)
    return model, step, state


def evaluate(loss_fn, state):
    return float(ft.eval_step(loss_fn)(state, make_batch(9))["loss"])


def loss_of_module(model, state):
    """Return the loss of a module with the parameters of a state."""
    with torch.no_grad():
        return float(loss(ft.to_module(model, state).eval(), make_batch(9)))


@variants
@pytest.mark.parametrize("trainable", [None, ["head.*"]])
def test_merged_weights_compute_what_the_adapters_do(variant, trainable):
    model, step, state = train_adapters(variant, trainable=trainable)
    state_before = ft.tree.clone(state)
    merged = ft.adapters.merge(step, state)
    assert_same_bits(state, state_before)
    expected = evaluate(step.loss, state)
    assert evaluate(ft.from_module(model, loss), merged) == pytest.approx(expected, abs=1e-10)
    assert evaluate(step.base, merged) == pytest.approx(expected, abs=1e-10)
    # Training has changed the loss.
    assert expected != pytest.approx(evaluate(step.loss, step.init()), abs=1e-3)
    assert loss_of_module(model, merged) == pytest.approx(expected, abs=1e-10)


@variants
@pytest.mark.parametrize("trainable", [None, ["head.*", "*.up.weight"]])
def test_unmerging_gives_the_state_back(variant, trainable):
    _, step, state = train_adapters(variant, torch.float64, ft.ema(0.9), trainable=trainable)
    unmerged = ft.adapters.unmerge(step, ft.adapters.merge(step, state))
    ft.tree.require_same("test", "state", unmerged, state)
    assert_same_bits(
        (unmerged.params, unmerged.opt_state, unmerged.slots), (state.params, state.opt_state, state.slots)
    )
    for actual, expected in zip(ft.tree.leaves(unmerged), ft.tree.leaves(state), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    _, metrics = step(unmerged, make_batch(5))
    assert float(metrics["loss"]) == pytest.approx(float(step(state, make_batch(5))[1]["loss"]), abs=1e-10)


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_a_narrow_weight_is_rounded_once(variant):
    _, step, state = train_adapters(variant, torch.bfloat16)
    merged, params = ft.adapters.merge(step, state), {**state.frozen, **adapters_in(state.params)}
    weight, a, b = params["head.weight"].float(), params["head.lora_A.weight"], params["head.lora_B.weight"]
    adapted = weight + 5 / 3 * b @ a
    if variant == "dora":
        adapted *= (params["head.lora_magnitude_vector"] / adapted.norm(dim=1))[:, None]
    assert merged.params["head.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(merged.params["head.weight"].float(), adapted, rtol=2**-8, atol=0)
    assert {leaf.dtype for leaf in merged.params.values()} == {torch.bfloat16}


def test_an_average_is_merged_as_a_state_is():
    model, step, state = train_adapters("lora", torch.float64, ft.ema(0.5))
    averaged = ft.averaged(state)
    merged = ft.adapters.merge(step, averaged)
    assert evaluate(ft.from_module(model, loss), merged) == pytest.approx(evaluate(step.loss, averaged), abs=1e-10)
    assert evaluate(step.loss, averaged) != pytest.approx(evaluate(step.loss, state), abs=1e-6)
    with pytest.raises(StructureError, match=r"average first: ft\.adapters\.merge\(step, ft\.averaged\(state\)\)"):
        ft.averaged(ft.adapters.merge(step, state))


def test_a_module_that_was_donated_gets_the_merged_weights():
    model = make_model()
    step = make_step(model, ft.lora(2, targets=TARGETS), ft.donated())
    state, _ = train(step, state=step.init(donate=True))
    assert next(model.parameters()).is_meta
    expected = evaluate(step.loss, state)
    assert loss_of_module(model, ft.adapters.merge(step, state)) == pytest.approx(expected)


def test_wrong_states_and_steps_are_refused():
    model, step, state = train_adapters("lora")
    merged = ft.adapters.merge(step, state)
    with pytest.raises(StructureError, match="merge: the adapters of this state are already merged"):
        ft.adapters.merge(step, merged)
    with pytest.raises(StructureError, match="unmerge: the state is not merged"):
        ft.adapters.unmerge(step, state)
    with pytest.raises(StructureError, match=r"merge: the state lacks adapters of the step: .*lora_A"):
        ft.adapters.merge(step, make_step(model).init())
    with pytest.raises(StructureError, match="merge: "):
        ft.adapters.merge(step, state.params)
    with pytest.raises(ComposeError, match=r"merge: the step has no adapters.*\n *loss    loss\(Net\)"):
        ft.adapters.merge(make_step(model), state)
    with pytest.raises(StructureError, match="these are adapters: merge them first"):
        ft.to_module(model, state)
    with pytest.raises(LossError, match=r"or merged.*step\.base.*unmerge"):
        evaluate(step.loss, merged)


@pytest.mark.parametrize("wrappers", [(), (ft.lora(3, 5, targets=TARGETS[:1], dora=True),)])
def test_a_partial_load_that_would_lose_adapters_is_refused(wrappers, tmp_path):
    """Into a state without adapters, and into one with the adapters of the embedding alone."""
    model, step, state = train_adapters("dora")
    ft.checkpoint.save(tmp_path / "a", {"state": state})
    like = {"state": make_step(make_model(dtype=torch.float64), *wrappers).init()}
    rename = {"state.opt_state": "unused"}
    if not wrappers:
        rename["state.frozen"] = "state.params"
    with pytest.raises(
        StructureError, match=r"has adapters, for which like has no place.*lora_A\.weight.*merge"
    ) as raised:
        ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename)
    assert ("embed.lora" in str(raised.value)) == (not wrappers)
    # As the error says: merge, or leave the adapters out by name.
    merged = ft.adapters.merge(step, ft.checkpoint.load(tmp_path / "a")["state"])
    assert evaluate(ft.from_module(ft.to_module(model, merged), loss), merged) == evaluate(step.base, merged)
    dropping = {"state.params": "unused", **rename}
    loaded = ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=dropping)
    assert loaded["state"].step == state.step


def test_a_partial_load_that_would_lose_adapters_of_a_tree_is_refused(tmp_path):
    step = ft.train_step(lambda params, batch: (batch @ params["w"]).square().mean(), ft.optim.sgd(0.1))
    adapted_step, params = ft.compose(step, ft.lora(2, 4, targets=["w"])), {"w": torch.ones(3, 2)}
    state, _ = adapted_step(adapted_step.init(params), torch.ones(4, 3))
    ft.checkpoint.save(tmp_path / "a", state)
    with pytest.raises(StructureError, match=r"has adapters, for which like has no place.*params\.adapters\.w\.A"):
        ft.checkpoint.load(tmp_path / "a", like=step.init(params), partial=True, rename={"frozen.base": "params"})


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


class Transposed(nn.Linear):
    """Computes what `nn.Linear` does in another way."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Centred(nn.Linear):
    def forward(self, x, more):
        return F.linear(x, self.weight - self.weight.mean(1, keepdim=True) * more, self.bias)


@pytest.mark.parametrize("layer_class", [Scaled, Transposed, Centred])
def test_a_layer_that_is_no_product_with_its_weight_is_not_merged(layer_class):
    model = nn.ModuleDict({"layer": layer_class(4, 4)})
    more = (1.0,) if layer_class is Centred else ()
    step = make_step(
        model,
        ft.lora(2, targets=["layer"]),
        criterion=lambda model, batch: model["layer"](batch, *more).square().mean(),
    )
    batch = torch.randn(3, 4)
    state, _ = step(step.init(), batch)
    if layer_class is not Transposed:
        with pytest.raises(StructureError, match=rf"merge: the forward of layer \({layer_class.__name__}\) does not"):
            ft.adapters.merge(step, state)
        return
    merged = ft.eval_step(step.base)(ft.adapters.merge(step, state), batch)["loss"]
    assert float(merged) == pytest.approx(float(ft.eval_step(step.loss)(state, batch)["loss"]), rel=1e-5)
