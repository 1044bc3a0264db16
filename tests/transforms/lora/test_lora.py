"""What `lora` adds to a state, what it leaves alone, and what it refuses."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ftrain as ft
from ftrain.errors import ComposeError, LossError, OptionError, StructureError
from tests.laws.models import WIDTH, make_batch, token_loss
from tests.laws.models import make_model as make_tiny
from tests.laws.pipelines import assert_equal
from tests.transforms.lora.models import TARGETS, adapters, loss, make, step_of, train

KINDS = {"lora": {}, "rslora": {"rslora": True, "alpha": 5.0}, "dora": {"dora": True}}
kinds = pytest.mark.parametrize("kind", KINDS)


def held(tree):
    return {name: leaf for name, leaf in tree.items() if leaf is not None}


# The state


@kinds
@pytest.mark.filterwarnings("ignore:.* parameters in float16:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_first_loss_is_that_of_the_base_to_the_bit(kind, dtype):
    model = make(dtype=dtype)
    adapted, base = step_of(model, ft.lora(3, targets=TARGETS, **KINDS[kind])), step_of(model)
    for batch in (make_batch(0), make_batch(1)):
        assert_equal(adapted(adapted.init(), batch)[1]["loss"], base(base.init(), batch)[1]["loss"])


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_adapters_train_and_the_base_keeps_its_dtype(kind, dtype):
    model = make(dtype=dtype)
    step = step_of(model, ft.lora(3, targets=["*.up", "head"], **KINDS[kind]))
    state, _ = train(step)
    wide = torch.promote_types(dtype, torch.float32)
    parts = ["A.weight", "B.weight"] + ["magnitude_vector"] * (kind == "dora")
    names = {f"{name}.lora_{part}" for name in ("blocks.0.up", "blocks.1.up", "head") for part in parts}
    for tree in (state.params, state.opt_state["mu"], state.opt_state["nu"]):
        assert held(tree).keys() == names
        assert {leaf.dtype for leaf in held(tree).values()} == {wide}
    assert held(state.frozen).keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert_equal(state.frozen[name], parameter.detach())


def test_how_adapters_begin():
    step = step_of(make(), ft.lora(400, targets=["embed", "head"], dora=True))
    params = adapters(step.init(seed=3).params)
    a, bound = params["head.lora_A.weight"], WIDTH**-0.5
    assert a.shape == (400, WIDTH)
    assert a.abs().max() < bound
    assert float(a.mean()) == pytest.approx(0, abs=0.05 * bound)
    assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not params["head.lora_B.weight"].any()
    assert not params["embed.lora_embedding_A"].any()
    assert float(params["embed.lora_embedding_B"].std()) == pytest.approx(1, rel=0.05)
    weights = dict(make().named_parameters())
    assert_equal(params["head.lora_magnitude_vector"], weights["head.weight"].norm(dim=1).detach())
    torch.testing.assert_close(params["embed.lora_magnitude_vector"], weights["embed.weight"].norm(dim=0).detach())
    assert_equal(step.init(seed=3).params, step.init(seed=3).params)
    assert not torch.equal(step.init(seed=4).params["head.lora_A.weight"], a)
    twins = adapters(step_of(make(), ft.lora(2, targets=["*.up"])).init().params)
    assert not torch.equal(twins["blocks.0.up.lora_A.weight"], twins["blocks.1.up.lora_A.weight"])


def test_adapters_begin_from_the_parameters_that_init_is_given():
    step = step_of(make(), ft.lora(2, targets=["head"], dora=True))
    params = {name: 2 * p.detach() for name, p in make().named_parameters()}
    state = step.init(params)
    assert_equal(state.params["head.lora_magnitude_vector"], params["head.weight"].norm(dim=1))
    assert_equal(state.frozen["head.weight"], params["head.weight"])


@pytest.mark.parametrize("trainable", [["head.*"], lambda name, leaf: name.startswith("head")])
def test_trainable_names_what_trains_beside_the_adapters(trainable):
    step = step_of(make(), ft.lora(2, targets=["*.up"]), trainable=trainable)
    state, _ = train(step)
    others = held(state.params).keys() - adapters(state.params).keys()
    assert others == {"head.weight", "head.bias"}
    assert not torch.equal(state.params["head.weight"], make().head.weight)
    assert_equal(state.frozen["embed.weight"], make().embed.weight.detach())


def test_a_base_that_requires_no_gradient_has_adapters_all_the_same():
    model = make().requires_grad_(False)
    train(step_of(model, ft.lora(2, targets=["*.up"])))
    with pytest.raises(StructureError, match="no parameter to train"):
        step_of(model).init()


def test_what_prints():
    step = step_of(make(), ft.remat(), ft.lora(8, 16, targets=["*.up"], dropout=0.05, dora=True, rslora=True))
    first = repr(step).splitlines()[0]
    assert first == "loss    loss(Net) <- lora(8, alpha=16, dropout=0.05, dora, rslora, targets=2) <- remat(blocks=2)"
    assert ft.lora(4, targets=["w"]).text == "lora(4, alpha=4)"


# Modules


def test_the_module_is_as_it_was_whatever_happens():
    model = make()
    before = [dict(vars(part)) for part in model.modules()]

    def failing(model, batch):
        loss(model, batch)
        raise RuntimeError("no")

    train(step_of(model, ft.lora(2, targets=TARGETS), ft.remat()))
    step = step_of(model, ft.lora(2, targets=TARGETS), criterion=failing)
    with pytest.raises(RuntimeError, match="no"):
        step(step.init(), make_batch(0))
    for part, was in zip(model.modules(), before, strict=True):
        assert vars(part) == was


def test_tied_weights_and_batch_statistics():
    model = make_tiny()
    step = ft.train_step(ft.from_module(model, token_loss), ft.optim.adamw(0.05))
    adapted = ft.lora(2, targets=["head", "*.down"])(step)
    with pytest.warns(UserWarning, match=r"lora: head\.weight is tied to embed\.weight") as warnings_seen:
        start = state = adapted.init()
    assert len(warnings_seen) == 1
    base = step.init()
    for index in range(2):
        state, _ = adapted(state, make_batch(index))
    assert "head.lora_B.weight" in held(state.params)
    assert_equal(state.frozen["embed.weight"], base.params["embed.weight"])
    # The first block comes before every adapter, so that its statistics are those of the base.
    base, _ = step(base, make_batch(0))
    once, _ = adapted(start, make_batch(0))
    assert_equal(once.buffers["blocks.0.norm.running_mean"], base.buffers["blocks.0.norm.running_mean"])
    with pytest.raises(StructureError, match=r"merge: head\.weight is tied to embed\.weight"):
        ft.adapters.merge(adapted, state)


@pytest.mark.filterwarnings("ignore:lora. .* is tied to:UserWarning")
def test_adapters_of_a_tied_weight_are_merged_into_one_of_its_own(tmp_path):
    """As the error of `merge` advises."""

    def step_of_tiny(model):
        loss_fn = ft.from_module(model, token_loss)
        return loss_fn, ft.lora(2, targets=["head", "*.down"])(ft.train_step(loss_fn, ft.optim.adamw(0.05)))

    model = make_tiny()
    _, step = step_of_tiny(model)
    state, _ = step(step.init(), make_batch(0))
    with pytest.warns(UserWarning, match=r"changed buffers of the base.*blocks\.0\.norm\.running_mean"):
        ft.adapters.save(tmp_path / "adapters", step, state)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    loss_fn, apart = step_of_tiny(model)
    merged = ft.adapters.merge(apart, ft.adapters.load(tmp_path / "adapters", apart, apart.init()))
    actual = ft.eval_step(loss_fn)(dataclasses.replace(merged, buffers=state.buffers), make_batch(9))
    expected = ft.eval_step(step.loss)(state, make_batch(9))
    assert float(actual["loss"]) == pytest.approx(float(expected["loss"]), abs=1e-12)


def test_fused_layers_of_torch_run_their_adapters_in_evaluation_too():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )

    def criterion(model, batch):
        return (model(batch)[..., 0] - 1).square().mean()

    step = step_of(encoder, ft.lora(2, targets=["*.linear?"]), criterion=criterion)
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
    with pytest.raises(OptionError, match="that matches can have an adapter"):
        step_of(encoder, ft.lora(2, targets=["*.out_proj"]))


def test_a_module_that_runs_twice_has_one_adapter():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    model, batch = Twice(), torch.randn(4, 3, dtype=torch.float64)
    step = step_of(
        model,
        ft.lora(2, 3, targets=["layer"]),
        criterion=lambda m, b: m(b).square().mean(),
        optimizer=ft.optim.sgd(1.0),
    )
    state = step.init()
    state = ft.tree.map(lambda leaf: leaf + 0.1 if leaf.ndim == 2 else leaf, state)
    a, b = (state.params[f"layer.lora_{x}.weight"].requires_grad_() for x in "AB")
    whole = state.frozen["layer.weight"] + 1.5 * b @ a
    bias = state.frozen["layer.bias"]
    F.linear(torch.tanh(F.linear(batch, whole, bias)), whole, bias).square().mean().backward()
    moved, _ = step(ft.tree.clone(state), batch)
    torch.testing.assert_close(a.detach() - moved.params["layer.lora_A.weight"], a.grad)
    torch.testing.assert_close(b.detach() - moved.params["layer.lora_B.weight"], b.grad)


@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(1, 1, 1), (2, 3, 8), (4, 1, 2)])
def test_shapes_at_the_edge(inputs, outputs, rank):
    step = step_of(
        nn.Linear(inputs, outputs),
        ft.lora(rank, targets=[""], dora=True),
        criterion=lambda model, batch: model(batch).square().mean(),
    )
    state, metrics = step(step.init(), torch.randn(5, inputs))
    assert state.params["lora_B.weight"].shape == (outputs, rank)
    assert metrics["loss"].isfinite()


def test_a_bad_step_changes_only_the_counters():
    def poisoned(model, batch):
        actual = loss(model, batch)
        return ft.Mean(actual.total * float("nan"), actual.weight)

    step = step_of(make(), ft.lora(2, targets=TARGETS, dora=True), ft.skip_nonfinite(3))
    bad = step_of(make(), ft.lora(2, targets=TARGETS, dora=True), ft.skip_nonfinite(3), criterion=poisoned)
    state, _ = train(step)
    after, metrics = bad(state, make_batch(0))
    assert float(metrics["skipped"]) == 1
    assert_equal((after.params, after.frozen, after.opt_state), (state.params, state.frozen, state.opt_state))


def test_a_quantised_base():
    quantization = pytest.importorskip("torchao.quantization", reason="quantises the base")
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    dense = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    with torch.no_grad():
        for place in (0, 2):
            dense[place].weight.copy_(model[place].weight.dequantize())
            dense[place].bias.copy_(model[place].bias)
    batch = torch.randn(16, 32)
    actual = []
    for base in (model, dense):
        step = step_of(
            base, ft.lora(4, targets=["*"], dora=True), criterion=lambda m, b: (m(b) - 1).square().mean(), trainable=[]
        )
        state = step.init()
        for _ in range(3):
            state, _ = step(state, batch)
        actual.append(state)
    assert type(actual[0].frozen["0.weight"]) is type(model[0].weight.data)
    for name, leaf in adapters(actual[1].params).items():
        torch.testing.assert_close(actual[0].params[name], leaf, rtol=1e-3, atol=1e-4)


# Trees


def tree_loss(params, batch):
    hidden = torch.tanh(batch @ params["layers"][0]["w"])
    return (hidden @ params["layers"][1]["w"] + params["bias"]).square().mean()


def tree_params():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"layers": [{"w": draw(4, 5)}, {"w": draw(5, 2)}], "bias": draw(2)}


def test_a_tree_gets_its_matrices_with_the_adapters_added():
    params, batch = tree_params(), torch.randn(6, 4, dtype=torch.float64)
    base_step = ft.train_step(tree_loss, ft.optim.sgd(0.1), trainable=["bias"])
    step = ft.compose(base_step, ft.accumulate(2), ft.lora(2, 6, targets=["layers.*.w"]))
    state = step.init(params)
    assert_equal(ft.eval_step(step.loss)(state, batch)["loss"].value, tree_loss(params, batch))
    names = ["adapters.layers.0.w.A", "adapters.layers.0.w.B", "adapters.layers.1.w.A", "adapters.layers.1.w.B"]
    assert ft.tree.leaf_names(state.params) == [*names, "base.bias"]
    for _ in range(5):
        state, _ = step(state, batch)
    summed = ft.tree.clone(params)
    summed["bias"] = state.params["base"]["bias"]
    for index in range(2):
        a, b = (state.params["adapters"][f"layers.{index}.w"][x] for x in "AB")
        summed["layers"][index]["w"] += 3 * b @ a
    assert float(ft.eval_step(step.loss)(state, batch)["loss"]) == pytest.approx(float(tree_loss(summed, batch)))
    merged = ft.adapters.merge(step, state)
    for name, leaf in zip(ft.tree.leaf_names(summed), ft.tree.leaves(summed), strict=True):
        torch.testing.assert_close(
            dict(zip(ft.tree.leaf_names(merged.params), ft.tree.leaves(merged.params), strict=True))[name], leaf
        )
    back = ft.adapters.unmerge(step, merged)
    for actual, expected in zip(ft.tree.leaves(back), ft.tree.leaves(state), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"dora": True}])
def test_what_a_tree_cannot_have(option):
    with pytest.raises(OptionError, match=r"lora: dropout and dora are for modules, and tree_loss is a loss of a tree"):
        ft.lora(2, targets=["layers.*.w"], **option)(ft.train_step(tree_loss, ft.optim.sgd(0.1)))


def test_targets_of_a_tree_that_match_nothing():
    step = ft.train_step(tree_loss, ft.optim.sgd(0.1))
    with pytest.raises(
        OptionError, match=r"lora: targets names 'layers\.w', and no .* there are layers\.[01]\.w, layers\.[01]\.w"
    ):
        ft.lora(2, targets=["layers.w"])(step).init(tree_params())
    with pytest.raises(OptionError, match="no leaf with two axes"):
        ft.lora(2, targets=["*"])(ft.train_step(lambda p, b: p["w"].sum(), ft.optim.sgd(0.1))).init(
            {"w": torch.ones(3)}
        )


# What is refused


@pytest.mark.parametrize(
    ("options", "said"),
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
def test_options_out_of_their_range(options, said):
    with pytest.raises(OptionError, match=f"lora: {said}"):
        ft.lora(**{"rank": 2, "targets": ["*.up"], **options})


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*.upp", r"'\*\.upp', and no module of Net that matches can have an adapter; .*: blocks\.[01]\.up"),
        ("up", r"'up'.*: blocks\.[01]\.up"),
        ("*.norm", r"'\*\.norm', and no module of Net that matches can have an adapter; nn\.Linear"),
    ],
)
def test_targets_that_match_nothing(pattern, said):
    with pytest.raises(OptionError, match=said):
        step_of(make(), ft.lora(2, targets=["*.down", pattern]))


def test_a_module_without_any_that_can_be_adapted():
    with pytest.raises(OptionError, match=r"no module of Conv2d that matches can have an adapter; .*: there are none"):
        step_of(nn.Conv2d(1, 1, 3), ft.lora(2, targets=["x"]))
    embedding = nn.ModuleDict({"e": nn.Embedding(3, 4, max_norm=1.0)})
    with pytest.raises(OptionError, match="that matches can have an adapter"):
        step_of(embedding, ft.lora(2, targets=["e"]))


def test_put_together_wrongly():
    with pytest.raises(ComposeError, match=r"lora\(3, alpha=3\): the step already has the wrapper lora"):
        step_of(make(), ft.lora(2, targets=["head"]), ft.lora(3, targets=["*.up"]))
    with pytest.raises(ComposeError, match="lora: needs the argument rank"):
        ft.lora(step_of(make()))
    with pytest.raises(ComposeError, match="changes the loss of a Step"):
        ft.lora(2, targets=["head"])(lambda state, batch: (state, {}))


def test_states_and_losses_that_do_not_belong_together():
    model = make()
    step, base = step_of(model, ft.lora(2, targets=["head"])), step_of(model)
    with pytest.raises(LossError, match=r"params has head\.lora_A\.weight, head\.lora_B\.weight, which .*step\.loss"):
        ft.eval_step(ft.from_module(model, loss))(step.init(), make_batch(0))
    with pytest.raises(LossError, match=r"params has no head\.lora_A\.weight.*step\.init"):
        ft.eval_step(step.loss)(base.init(), make_batch(0))
    with pytest.raises(StructureError, match=r"head\.lora_A\.weight is a parameter already"):
        step.init({**step.init().params, **base.init().params})
    tree_step = ft.lora(2, targets=["*.w"])(ft.train_step(tree_loss, ft.optim.sgd(0.1)))
    with pytest.raises(LossError, match="params has no adapters"):
        ft.eval_step(tree_step.loss)(ft.train_step(tree_loss, ft.optim.sgd(0.1)).init(tree_params()), torch.ones(1, 4))


def test_an_adapter_of_what_the_loss_does_not_use():
    def partly(model, batch):
        return model.embed(batch["tokens"]).square().mean()

    step = step_of(make(), ft.lora(2, targets=["embed", "head"]), criterion=partly)
    with pytest.raises(LossError, match=r"does not use 2 of 4 parameters: head\.lora_A\.weight, head\.lora_B\.weight"):
        step(step.init(), make_batch(0))
