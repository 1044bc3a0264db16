"""Training with `lora` is training a module whose adapters are written out by hand, whatever else is composed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from tests.bits import assert_same_bits
from tests.exhaustive import choose
from tests.laws import registry
from tests.laws.models import VOCABULARY, WIDTH, keyed_loss, make_batch
from tests.laws.pipelines import assert_near, assert_trees_near
from tests.laws.registry import STACKS, is_narrow
from tests.transforms.lora.models import TARGETS, adapt_by_hand, adapters_in, loss, make_model, make_step, train
from tests.transforms.modes import CAPTURED

RANK, ALPHA = 3, 7.0
VARIANTS = {"lora": {}, "dora": {"dora": True, "rslora": True, "dropout": 0.2}}
NAMES = [(), *((name,) for name in registry.NAMES), *STACKS]


def label(names):
    return "+".join(names) or "plain"


def build(names, index, *outer, criterion=loss, p=0.3, optimizer=None, targets=TARGETS, **options):
    """Return a model and its step, with `lora` at an index among the named wrappers."""
    model = make_model(p, torch.float32 if is_narrow(names) else torch.float64)
    wrappers = registry.make(names)
    wrappers.insert(index, ft.lora(RANK, ALPHA, targets=targets, **options))
    return model, make_step(model, *wrappers, *outer, criterion=criterion, optimizer=optimizer)


def train_with(names, index, *outer, **options):
    _, step = build(names, index, *outer, **options)
    return train(step)


# By hand the weights with their magnitudes are computed first, which rounds otherwise in a narrow dtype.
@pytest.mark.parametrize(
    ("variant", "names"),
    [(variant, names) for variant in VARIANTS for names in NAMES if variant == "lora" or not is_narrow(names)],
    ids=str,
)
def test_lora_is_the_module_with_adapters_written_out(variant, names):
    model, step = build(names, 0, **VARIANTS[variant])
    state, losses = train(step)
    model_by_hand = adapt_by_hand(model, step.init(), RANK, ALPHA, **VARIANTS[variant])
    step_by_hand = make_step(model_by_hand, *registry.make(names), trainable=["*lora_*"])
    expected_state, expected_losses = train(step_by_hand)
    assert_near(adapters_in(state.params), adapters_in(expected_state.params), names)
    assert losses == pytest.approx(expected_losses, rel=2e-3 if is_narrow(names) else 1e-9)
    if "ema" in names:
        assert_near(adapters_in(state.slots["ema"]), adapters_in(expected_state.slots["ema"]), names)
    assert_same_bits(state.frozen, step.init().frozen)


@pytest.mark.parametrize(
    "names", choose(NAMES[1:], [("bf16",), ("remat",), ("sam",), ("ema",), *STACKS[:2]]), ids="+".join
)
def test_its_place_among_the_wrappers_makes_no_difference(names):
    first = train_with(names, 0, **VARIANTS["dora"])
    for index in {1, len(names)}:
        assert_same_bits(train_with(names, index, **VARIANTS["dora"]), first)


@pytest.mark.parametrize("names", choose(NAMES, [(), ("remat",), ("sam",), *STACKS[:2]]), ids=label)
def test_a_step_is_pure_and_donation_changes_no_bit(names):
    _, step = build(names, len(names), **VARIANTS["dora"])
    state, _ = train(step, 1)
    state_before, random_state_before = ft.tree.clone(state), torch.get_rng_state()
    assert_same_bits(step(state, make_batch(7)), step(state, make_batch(7)))
    assert_same_bits(state, state_before)
    assert torch.equal(torch.get_rng_state(), random_state_before)
    assert_same_bits(train(ft.donated(step))[0], train(step)[0])


# All wrappers alone, and one stack: a capture takes long.
@pytest.mark.parametrize("names", choose(NAMES[: -len(STACKS) + 1], [("remat",)]), ids=label)
def test_captured_is_eager(names):
    # Stock dropout draws other bits in a graph; that of the model here is counter-based.
    # With magnitudes, which make a graph larger, where there is no other wrapper or a stack.
    _, step = build(names, 0, criterion=keyed_loss, dora=len(names) != 1)
    eager, eager_losses = train(step)
    captured, losses = train(ft.compiled(lowering="whole", backend="eager", donate=True)(step))
    for part in ("params", "frozen", "opt_state", "slots"):
        assert_trees_near(getattr(captured, part), getattr(eager, part), names)
    assert losses == pytest.approx(eager_losses, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("lowering", "backend"),
    [
        ("whole", "aot_eager"),
        ("split", "aot_eager"),
        pytest.param("whole", "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_is_eager(lowering, backend):
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)).double()
    step = make_step(model, ft.lora(2, targets=["2"], dora=True), optimizer=ft.optim.sgd(0.5, momentum=0.9))
    compiled, _ = train(ft.compiled(lowering=lowering, backend=backend, donate=True)(step))
    eager, _ = train(step)
    assert_trees_near(compiled.params, eager.params, ())
    assert_same_bits(compiled.frozen, eager.frozen)


def few_targets_for(outer):
    """Return options of `build` for a small graph where one is captured: adapters in recomputed blocks alone, SGD."""
    return {"targets": ["*.up"], "optimizer": ft.optim.sgd(0.5)} if CAPTURED in outer else {}


@pytest.mark.parametrize(
    ("policy", "outer"), [("full", []), ("dots", []), ("full", [CAPTURED])], ids=["full", "dots", "captured"]
)
def test_rematerialised_blocks_have_the_same_adapters_and_masks(policy, outer):
    options = {**VARIANTS["dora"], **few_targets_for(outer)}
    plain, _ = train_with((), 0, *outer, **options)
    rematerialised, _ = train_with((), 0, ft.remat(policy), *outer, **options)
    assert_same_bits(rematerialised, plain)


@pytest.mark.parametrize("outer", [(), (ft.accumulate(2),), (CAPTURED,)], ids=["plain", "accumulate", "captured"])
def test_blocks_that_torch_recomputes_have_the_same_adapters(outer):
    def recomputing_loss(model, batch):
        x = model.embed(batch["tokens"])
        for block in model.blocks:
            x = checkpoint(block, x, None, use_reentrant=False)
        return ft.losses.cross_entropy(model.head(x), batch["labels"])

    options = {"p": 0.0, "dora": True, **few_targets_for(outer)}
    plain, _ = train_with((), 0, *outer, **options)
    recomputed, _ = train_with((), 0, *outer, criterion=recomputing_loss, **options)
    assert_same_bits(recomputed, plain)


def test_a_target_may_be_a_block_itself():
    plain, _ = train_with((), 0, dropout=0.2)
    rematerialised, _ = train_with((), 0, ft.remat(blocks=[torch.nn.Linear]), dropout=0.2)
    assert_same_bits(rematerialised, plain)


def test_accumulation_is_the_full_batch():
    _, step = build((), 0, p=0.0, dora=True)
    whole, _ = train(step)
    accumulated, _ = train(ft.accumulate(4)(step))
    assert_trees_near(accumulated.params, whole.params, ())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_goes_on_to_the_bit(variant, tmp_path):
    batches = [make_batch(index) for index in range(8)]

    def run(directory, steps):
        _, step = build(("remat", "ema", "clip"), 1, **VARIANTS[variant])
        checkpoints = ft.Checkpoints(tmp_path / directory, every=3)
        return ft.fit(step, step.init(), batches, steps=steps, checkpoints=checkpoints, progress=False)[0]

    run("interrupted", 5)
    assert_same_bits(run("interrupted", 8), run("whole", 8))
