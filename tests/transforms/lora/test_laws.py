"""Training with `lora` is training a module whose adapters are written out by hand, whatever else is composed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from tests.exhaustive import choose
from tests.laws import registry
from tests.laws.models import VOCABULARY, WIDTH, keyed_loss, make_batch
from tests.laws.pipelines import assert_equal, assert_near, assert_trees_near
from tests.laws.registry import STACKS
from tests.laws.registry import is_narrow as narrow
from tests.transforms.lora.models import adapters, by_hand, loss, make, step_of, train

RANK, ALPHA = 3, 7.0
KINDS = {"lora": {}, "dora": {"dora": True, "rslora": True, "dropout": 0.2}}
PAIRS = [(name,) for name in registry.NAMES]
NAMES = [(), *PAIRS, *STACKS]


def label(names):
    return "+".join(names) or "plain"


def lora(targets=("embed", "*.up", "*.down", "head"), **options):
    return ft.lora(RANK, ALPHA, targets=targets, **options)


def build(names, place, *more, criterion=loss, p=0.3, optimizer=None, **options):
    """A step with `lora` at a place among other wrappers."""
    model = make(p, torch.float32 if narrow(names) else torch.float64)
    others = registry.make(names)
    wrappers = *others[:place], lora(**options), *others[place:], *more
    return model, step_of(model, *wrappers, criterion=criterion, optimizer=optimizer)


def named(tree):
    return dict(zip(ft.tree.leaf_names(tree), ft.tree.leaves(tree), strict=True))


# By hand the weights with their magnitudes are made first, which a narrow dtype rounds otherwise.
@pytest.mark.parametrize(
    ("kind", "names"),
    [(kind, names) for kind in KINDS for names in NAMES if kind == "lora" or not narrow(names)],
    ids=str,
)
def test_lora_is_the_module_with_adapters_written_out(kind, names):
    model, step = build(names, 0, **KINDS[kind])
    state, losses = train(step)
    hand = by_hand(model, step.init(), RANK, ALPHA, **KINDS[kind])
    others = registry.make(names)
    expected_state, expected = train(step_of(hand, *others, trainable=["*lora_*"]))
    assert_near(adapters(state.params), adapters(expected_state.params), names)
    assert losses == pytest.approx(expected, rel=2e-3 if narrow(names) else 1e-9)
    if "ema" in names:
        assert_near(adapters(state.slots["ema"]), adapters(expected_state.slots["ema"]), names)
    assert_equal(state.frozen, step.init().frozen)


@pytest.mark.parametrize(
    "names", choose(NAMES[1:], [("bf16",), ("remat",), ("sam",), ("ema",), *STACKS[:2]]), ids="+".join
)
def test_where_it_stands_makes_no_difference(names):
    first = train(build(names, 0, **KINDS["dora"])[1])
    for place in {1, len(names)}:
        assert_equal(train(build(names, place, **KINDS["dora"])[1]), first)


@pytest.mark.parametrize("names", choose(NAMES, [(), ("remat",), ("sam",), *STACKS[:2]]), ids=label)
def test_a_step_is_pure_and_donation_changes_no_bit(names):
    _, step = build(names, len(names), **KINDS["dora"])
    state, _ = train(step, 1)
    kept, before = ft.tree.clone(state), torch.get_rng_state()
    assert_equal(step(state, make_batch(7)), step(state, make_batch(7)))
    assert_equal(state, kept)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal(train(ft.donated(step))[0], train(step)[0])


@pytest.mark.parametrize(
    "names",
    choose(NAMES[: -len(STACKS) + 1], [("remat",)]),
    ids=label,
)
def test_captured_is_eager(names):
    # Stock dropout draws other bits in a graph; that of the model here is counter-based.
    _, step = build(names, 0, criterion=keyed_loss, dora=len(names) != 1)
    eager, losses = train(step)
    captured, actual = train(ft.compiled(lowering="whole", backend="eager", donate=True)(step))
    for part in ("params", "frozen", "opt_state", "slots"):
        assert_trees_near(getattr(captured, part), getattr(eager, part), names)
    assert actual == pytest.approx(losses, rel=1e-5)


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
    step = step_of(model, ft.lora(2, targets=["2"], dora=True), optimizer=ft.optim.sgd(0.5, momentum=0.9))
    actual, _ = train(ft.compiled(lowering=lowering, backend=backend, donate=True)(step))
    expected, _ = train(step)
    assert_trees_near(actual.params, expected.params, ())
    assert_equal(actual.frozen, expected.frozen)


CAPTURED = ft.compiled(lowering="whole", backend="eager")


def few(wrappers):
    """Options of `build`: a graph is captured of few adapters, those of the blocks, which are computed again."""
    return {"targets": ["*.up"], "optimizer": ft.optim.sgd(0.5)} if CAPTURED in wrappers else {}


@pytest.mark.parametrize(
    ("policy", "around"), [("full", []), ("dots", []), ("full", [CAPTURED])], ids=["full", "dots", "captured"]
)
def test_rematerialised_blocks_see_the_same_adapters_and_masks(policy, around):
    plain, _ = train(build((), 0, *around, **KINDS["dora"], **few(around))[1])
    again, _ = train(build((), 0, ft.remat(policy), *around, **KINDS["dora"], **few(around))[1])
    assert_equal(again, plain)


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2),), (CAPTURED,)], ids=["plain", "accumulate", "captured"])
def test_what_torch_recomputes_has_the_same_adapters(wrappers):
    def recomputing(model, batch):
        x = model.embed(batch["tokens"])
        for block in model.blocks:
            x = checkpoint(block, x, None, use_reentrant=False)
        return ft.losses.cross_entropy(model.head(x), batch["labels"])

    plain, _ = train(build((), 0, *wrappers, p=0.0, dora=True, **few(wrappers))[1])
    again, _ = train(build((), 0, *wrappers, criterion=recomputing, p=0.0, dora=True, **few(wrappers))[1])
    assert_equal(again, plain)


def test_a_target_may_be_a_block_itself():
    plain, _ = train(build((), 0, dropout=0.2)[1])
    again, _ = train(build((), 0, ft.remat(blocks=[torch.nn.Linear]), dropout=0.2)[1])
    assert_equal(again, plain)


def test_accumulation_is_the_full_batch():
    _, step = build((), 0, p=0.0, dora=True)
    whole, _ = train(step)
    pieces, _ = train(ft.accumulate(4)(step))
    assert_trees_near(pieces.params, whole.params, ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_bit(kind, tmp_path):
    data = [make_batch(index) for index in range(8)]

    def run(directory, steps):
        _, step = build(("remat", "ema", "clip"), 1, **KINDS[kind])
        checkpoints = ft.Checkpoints(tmp_path / directory, every=3)
        return ft.fit(step, step.init(), data, steps=steps, checkpoints=checkpoints, progress=False)[0]

    run("cut", 5)
    assert_equal(run("cut", 8), run("whole", 8))
