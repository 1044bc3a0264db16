"""Merged weights compute what adapters do, and unmerging them gives the state back."""

import copy

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import ComposeError, LossError, StructureError
from tests.laws.models import make_batch
from tests.laws.pipelines import assert_equal
from tests.transforms.lora.models import TARGETS, adapters, loss, make, step_of, train

KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "dropout": {"dora": True, "dropout": 0.3}}
kinds = pytest.mark.parametrize("kind", KINDS)


def trained(kind, dtype=torch.float64, *wrappers, **options):
    model = make(dtype=dtype)
    step = step_of(model, ft.lora(3, 5, targets=TARGETS, **KINDS[kind]), *wrappers, **options)
    return model, step, train(step, 5)[0]


def evaluated(criterion, state):
    return float(ft.eval_step(criterion)(state, make_batch(9))["loss"])


@kinds
@pytest.mark.parametrize("trainable", [None, ["head.*"]])
def test_merged_weights_compute_what_the_adapters_do(kind, trainable):
    model, step, state = trained(kind, trainable=trainable)
    kept = ft.tree.clone(state)
    merged = ft.adapters.merge(step, state)
    expected = evaluated(step.loss, state)
    assert evaluated(ft.from_module(model, loss), merged) == pytest.approx(expected, abs=1e-10)
    assert evaluated(step.base, merged) == pytest.approx(expected, abs=1e-10)
    with pytest.raises(LossError, match=r"or merged.*step\.base.*unmerge"):
        evaluated(step.loss, merged)
    assert expected != pytest.approx(evaluated(step.loss, step.init()), abs=1e-3)
    with torch.no_grad():
        actual = loss(ft.to_module(model, merged).eval(), make_batch(9))
    assert float(actual) == pytest.approx(expected, abs=1e-10)
    assert_equal(state, kept)


@kinds
@pytest.mark.parametrize("trainable", [None, ["head.*", "*.up.weight"]])
def test_unmerging_gives_the_state_back(kind, trainable):
    _, step, state = trained(kind, torch.float64, ft.ema(0.9), trainable=trainable)
    back = ft.adapters.unmerge(step, ft.adapters.merge(step, state))
    ft.tree.require_same("test", "state", back, state)
    assert_equal((back.params, back.opt_state, back.slots), (state.params, state.opt_state, state.slots))
    for actual, expected in zip(ft.tree.leaves(back), ft.tree.leaves(state), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    _, metrics = step(back, make_batch(5))
    assert float(metrics["loss"]) == pytest.approx(float(step(state, make_batch(5))[1]["loss"]), abs=1e-10)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_narrow_weight_is_rounded_once(kind):
    _, step, state = trained(kind, torch.bfloat16)
    merged, params = ft.adapters.merge(step, state), {**state.frozen, **adapters(state.params)}
    weight, a, b = params["head.weight"].float(), params["head.lora_A.weight"], params["head.lora_B.weight"]
    whole = weight + 5 / 3 * b @ a
    if kind == "dora":
        whole *= (params["head.lora_magnitude_vector"] / whole.norm(dim=1))[:, None]
    assert merged.params["head.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(merged.params["head.weight"].float(), whole, rtol=2**-8, atol=0)
    assert {leaf.dtype for leaf in merged.params.values()} == {torch.bfloat16}


def test_the_average_is_merged_too():
    model, step, state = trained("lora", torch.float64, ft.ema(0.5))
    averaged = ft.averaged(state)
    merged = ft.adapters.merge(step, averaged)
    assert evaluated(ft.from_module(model, loss), merged) == pytest.approx(evaluated(step.loss, averaged), abs=1e-10)
    assert evaluated(step.loss, averaged) != pytest.approx(evaluated(step.loss, state), abs=1e-6)
    with pytest.raises(StructureError, match=r"average first: ft\.adapters\.merge\(step, ft\.averaged\(state\)\)"):
        ft.averaged(ft.adapters.merge(step, state))


def test_a_module_that_was_donated_gets_the_merged_weights():
    model = make()
    step = step_of(model, ft.lora(2, targets=TARGETS), ft.donated())
    state, _ = train(step, state=step.init(donate=True))
    assert next(model.parameters()).is_meta
    expected = evaluated(step.loss, state)
    with torch.no_grad():
        assert float(loss(ft.to_module(model, ft.adapters.merge(step, state)).eval(), make_batch(9))) == pytest.approx(
            expected
        )


def test_merged_weights_of_a_quantised_base():
    quantization = pytest.importorskip("torchao.quantization", reason="quantises the base")
    dense = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    model, batch = copy.deepcopy(dense), torch.randn(16, 32)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    step = step_of(model, ft.lora(4, targets=["2"]), criterion=lambda m, b: (m(b) - 1).square().mean())
    state, _ = step(step.init(), batch)
    merged, expected = ft.adapters.merge(step, state), ft.eval_step(step.loss)(state, batch)["loss"]
    # The merged weight is dense, and the other one stays quantised, whatever the module had.
    for module in (copy.deepcopy(model), dense):
        ft.to_module(module, merged)
        assert float((module(batch).detach() - 1).square().mean()) == pytest.approx(float(expected))
        assert type(module[2].weight.data) is torch.Tensor
        assert type(module[0].weight.data) is type(model[0].weight.data)


def test_what_cannot_be_merged_or_unmerged():
    model, step, state = trained("lora")
    merged = ft.adapters.merge(step, state)
    with pytest.raises(StructureError, match="merge: the adapters of this state are already merged"):
        ft.adapters.merge(step, merged)
    with pytest.raises(StructureError, match="unmerge: the state is not merged"):
        ft.adapters.unmerge(step, state)
    with pytest.raises(ComposeError, match=r"merge: the step has no adapters.*\n *loss    loss\(Net\)"):
        ft.adapters.merge(step_of(model), state)
    with pytest.raises(StructureError, match="these are adapters: merge them first"):
        ft.to_module(model, state)


@pytest.mark.parametrize("wrappers", [(), (ft.lora(3, 5, targets=TARGETS[:1], dora=True),)])
def test_adapters_are_not_left_out_by_loading_what_fits(wrappers, tmp_path):
    model, step, state = trained("dora")
    ft.checkpoint.save(tmp_path / "a", {"state": state})
    like = {"state": step_of(make(dtype=torch.float64), *wrappers).init()}
    rename = {} if wrappers else {"state.frozen": "state.params"}
    options = {"like": like, "partial": True}
    dropping = {"state.params": "unused", "state.opt_state": "unused", **rename}
    rename = {"state.opt_state": "unused", **rename}
    with pytest.raises(
        StructureError, match=r"has adapters, for which like has no place.*lora_A\.weight.*merge"
    ) as caught:
        ft.checkpoint.load(tmp_path / "a", rename=rename, **options)
    assert ("embed.lora" in str(caught.value)) == (not wrappers)
    # As the error says.
    merged = ft.adapters.merge(step, ft.checkpoint.load(tmp_path / "a")["state"])
    assert evaluated(ft.from_module(ft.to_module(model, merged), loss), merged) == evaluated(step.base, merged)
    assert ft.checkpoint.load(tmp_path / "a", rename=dropping, **options)["state"].step == state.step


def test_adapters_of_a_tree_are_not_left_out_either(tmp_path):
    step = ft.train_step(lambda params, batch: (batch @ params["w"]).square().mean(), ft.optim.sgd(0.1))
    adapting, params = ft.compose(step, ft.lora(2, 4, targets=["w"])), {"w": torch.ones(3, 2)}
    state, _ = adapting(adapting.init(params), torch.ones(4, 3))
    ft.checkpoint.save(tmp_path / "a", state)
    with pytest.raises(StructureError, match=r"has adapters, for which like has no place.*params\.adapters\.w\.A"):
        ft.checkpoint.load(tmp_path / "a", like=step.init(params), partial=True, rename={"frozen.base": "params"})
