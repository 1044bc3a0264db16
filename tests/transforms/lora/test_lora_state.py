"""What `lora` adds to the state of a step: how adapters begin, what trains, what is frozen, and how it prints."""

import math

import pytest
import torch

import ftrain as ft
from ftrain.errors import StructureError
from tests.bits import assert_same_bits
from tests.laws.models import WIDTH, make_batch
from tests.transforms.lora.models import TARGETS, adapters_in, loss, make_model, make_step, train, without_none

VARIANTS = {"lora": {}, "rslora": {"rslora": True, "alpha": 5.0}, "dora": {"dora": True}}
variants = pytest.mark.parametrize("variant", VARIANTS)


@variants
@pytest.mark.filterwarnings("ignore:.* parameters in float16:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_first_loss_is_that_of_the_base_to_the_bit(variant, dtype):
    model = make_model(dtype=dtype)
    adapted, base = make_step(model, ft.lora(3, targets=TARGETS, **VARIANTS[variant])), make_step(model)
    for batch in (make_batch(0), make_batch(1)):
        assert_same_bits(adapted(adapted.init(), batch)[1]["loss"], base(base.init(), batch)[1]["loss"])


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_adapters_train_and_the_base_keeps_its_dtype(variant, dtype):
    model = make_model(dtype=dtype)
    step = make_step(model, ft.lora(3, targets=["*.up", "head"], **VARIANTS[variant]))
    state, _ = train(step)
    adapter_dtype = torch.promote_types(dtype, torch.float32)
    suffixes = ["A.weight", "B.weight"] + ["magnitude_vector"] * (variant == "dora")
    names = {f"{target}.lora_{suffix}" for target in ("blocks.0.up", "blocks.1.up", "head") for suffix in suffixes}
    for tree in (state.params, state.opt_state["mu"], state.opt_state["nu"]):
        leaves = without_none(tree)
        assert leaves.keys() == names
        assert {leaf.dtype for leaf in leaves.values()} == {adapter_dtype}
    assert without_none(state.frozen).keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        assert_same_bits(state.frozen[name], param.detach())


def test_initial_values_of_a_linear_map():
    step = make_step(make_model(), ft.lora(400, targets=["head"], dora=True))
    params = step.init(seed=3).params
    a, bound = params["head.lora_A.weight"], WIDTH**-0.5
    # Uniform within the bound, as torch draws the weight of a linear map.
    assert a.shape == (400, WIDTH)
    assert a.abs().max() < bound
    assert float(a.mean()) == pytest.approx(0, abs=0.05 * bound)
    assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not params["head.lora_B.weight"].any()
    assert_same_bits(params["head.lora_magnitude_vector"], make_model().head.weight.detach().norm(dim=1))


def test_initial_values_of_an_embedding():
    step = make_step(make_model(), ft.lora(400, targets=["embed"], dora=True))
    params = step.init(seed=3).params
    assert not params["embed.lora_embedding_A"].any()
    assert float(params["embed.lora_embedding_B"].std()) == pytest.approx(1, rel=0.05)
    norms = make_model().embed.weight.detach().norm(dim=0)
    torch.testing.assert_close(params["embed.lora_magnitude_vector"], norms)


def test_initial_values_depend_on_the_seed_and_the_module():
    step = make_step(make_model(), ft.lora(2, targets=["*.up"]))
    params = step.init(seed=3).params
    assert_same_bits(step.init(seed=3).params, params)
    assert not torch.equal(step.init(seed=4).params["blocks.0.up.lora_A.weight"], params["blocks.0.up.lora_A.weight"])
    assert not torch.equal(params["blocks.0.up.lora_A.weight"], params["blocks.1.up.lora_A.weight"])


def test_adapters_begin_from_the_parameters_that_init_is_given():
    step = make_step(make_model(), ft.lora(2, targets=["head"], dora=True))
    params = {name: 2 * param.detach() for name, param in make_model().named_parameters()}
    state = step.init(params)
    assert_same_bits(state.params["head.lora_magnitude_vector"], params["head.weight"].norm(dim=1))
    assert_same_bits(state.frozen["head.weight"], params["head.weight"])


@pytest.mark.parametrize("trainable", [["head.*"], lambda name, leaf: name.startswith("head")])
def test_trainable_names_what_trains_beside_the_adapters(trainable):
    step = make_step(make_model(), ft.lora(2, targets=["*.up"]), trainable=trainable)
    state, _ = train(step)
    assert without_none(state.params).keys() - adapters_in(state.params).keys() == {"head.weight", "head.bias"}
    assert not torch.equal(state.params["head.weight"], make_model().head.weight)
    assert_same_bits(state.frozen["embed.weight"], make_model().embed.weight.detach())


def test_adapters_of_a_base_without_gradients_train():
    model = make_model().requires_grad_(False)
    step = make_step(model, ft.lora(2, targets=["*.up"]))
    state, _ = train(step)
    assert state.params["blocks.0.up.lora_B.weight"].any()
    with pytest.raises(StructureError, match="no parameter to train"):
        make_step(model).init()


def test_a_bad_step_changes_only_the_counters():
    def nan_loss(model, batch):
        mean = loss(model, batch)
        return ft.Mean(mean.total * float("nan"), mean.weight)

    wrappers = ft.lora(2, targets=TARGETS, dora=True), ft.skip_nonfinite(3)
    state, _ = train(make_step(make_model(), *wrappers))
    after, metrics = make_step(make_model(), *wrappers, criterion=nan_loss)(state, make_batch(0))
    assert float(metrics["skipped"]) == 1
    assert_same_bits((after.params, after.frozen, after.opt_state), (state.params, state.frozen, state.opt_state))


def test_it_prints_its_options_and_the_number_of_targets():
    lora = ft.lora(8, 16, targets=["*.up"], dropout=0.05, dora=True, rslora=True)
    step = make_step(make_model(), ft.remat(), lora)
    first_line = repr(step).splitlines()[0]
    assert first_line == (
        "loss    loss(Net) <- lora(8, alpha=16, dropout=0.05, dora, rslora, targets=2) <- remat(blocks=2)"
    )
    assert ft.lora(4, targets=["w"]).text == "lora(4, alpha=4)"
