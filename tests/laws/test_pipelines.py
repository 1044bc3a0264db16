"""Every wrapper, every ordered pair and the full stacks equal the hand-written oracle, are pure, and may donate."""

import pytest
import torch

import ftrain as ft
from tests.bits import assert_same_bits
from tests.exhaustive import choose, exhaustive_rows
from tests.laws import oracle
from tests.laws.models import keyed_loss, make_batch
from tests.laws.pipelines import STEPS, assert_near, assert_trees_near, blocks_for, build, label, train, train_on
from tests.laws.registry import ALONE, PAIRS, SAME_ARROW, STACKS, is_guarded, is_narrow

ALL = [*ALONE, *PAIRS, *STACKS]
# Wrappers of different arrows commute by construction, and the stacks combine them.
INTERACTING = [*ALONE, *SAME_ARROW, *STACKS]


interacting = pytest.mark.parametrize("names", choose(ALL, INTERACTING), ids=label)
# Purity and donation depend on what each wrapper writes in place, and not on its neighbours.
combined = pytest.mark.parametrize("names", choose(ALL, [*ALONE, *STACKS]), ids=label)


@interacting
def test_a_pipeline_equals_the_hand_written_oracle(names):
    model, step = build(names)
    state, metrics = train(step)
    expected = oracle.run(model, names, [make_batch(index) for index in range(STEPS)])
    assert_near(state.params, expected["params"], names)
    assert_near(state.buffers, expected["buffers"], names)
    assert_near(state.opt_state["mu"], expected["mu"], names)
    assert_near(state.opt_state["nu"], expected["nu"], names)
    if "ema" in names or "ema_schedule" in names:
        assert_near(state.slots["ema"], expected["ema"], names)
    if "swa" in names:
        assert_near(state.slots["swa"]["params"], expected["swa"], names)
    if "fp16" in names:
        assert float(state.slots["with_amp"]["scale"]) == expected["scale"]
    assert [values["loss"] for values in metrics] == pytest.approx(
        expected["losses"], rel=2e-3 if is_narrow(names) else 1e-9
    )
    if "spikes" in names or "spikes_clip" in names:
        assert [bool(values["spike"]) for values in metrics] == expected["spikes"]


@combined
def test_a_step_is_pure(names):
    _, step = build(names)
    state, _ = train(step, 1)
    kept, batch, random_state = ft.tree.clone(state), make_batch(7), torch.get_rng_state()
    first, second = step(state, batch), step(state, batch)
    assert_same_bits(first, second)
    assert_same_bits(state, kept)
    assert_same_bits(batch, make_batch(7))
    assert torch.equal(torch.get_rng_state(), random_state)


@combined
def test_donation_changes_no_bit(names):
    _, step = build(names)
    assert_same_bits(train(ft.donated(step))[0], train(step)[0])


# `make test` captures STACKS[5] here and STACKS[3] in `test_compiled`, so only the wrappers in neither alone.
NOT_IN_STACKS = [names for names in ALONE if not {*names} & {*STACKS[3], *STACKS[5]}]


@pytest.mark.parametrize("names", choose(INTERACTING, [*NOT_IN_STACKS, STACKS[5]]), ids=label)
def test_a_captured_step_equals_the_eager_one(names):
    # Counter-based dropout draws the same bits in both; stock dropout does not.
    _, step = build(names, criterion=keyed_loss, blocks=blocks_for(names))
    eager, eager_metrics = train(step)
    state, metrics = train(ft.compiled(lowering="whole", backend="eager", donate=True)(step))
    for part in ("params", "buffers", "opt_state", "slots"):
        assert_trees_near(getattr(state, part), getattr(eager, part), names)
    assert metrics[-1]["loss"] == pytest.approx(eager_metrics[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("names", choose([*ALONE, *STACKS], [("ema",)]), ids=label)
def test_donation_changes_no_bit_of_a_graph(names):
    _, step = build(names, p=0.0, blocks=blocks_for(names))
    donated, plain = (
        train(ft.compiled(lowering="whole", backend="eager", donate=donate)(step))[0] for donate in (True, False)
    )
    assert_same_bits(donated, plain)


@pytest.mark.parametrize("names", [*ALONE, *STACKS], ids=label)
def test_a_bad_step_changes_only_the_counters(names):
    _, step = build(names if is_guarded(names) else (*names, "skip"), criterion=poisoned_loss)
    state, _ = train_on(step, [make_batch(0)])
    bad = {**make_batch(1), "poison": torch.tensor(float("nan"))}
    after, metrics = step(state, bad)
    assert float(metrics["skipped"]) == 1
    assert int(after.step) == int(state.step) + 1
    counters = {"with_amp", "skip_nonfinite"}
    for part in ("params", "buffers", "opt_state", "frozen", "rng"):
        assert_same_bits(getattr(after, part), getattr(state, part))
    for name in state.slots:
        if name not in counters:
            assert_same_bits(after.slots[name], state.slots[name])
    if "skip_nonfinite" in state.slots:
        assert int(after.slots["skip_nonfinite"]["in_a_row"]) == 1
    if "fp16" in names:
        assert float(after.slots["with_amp"]["scale"]) == float(state.slots["with_amp"]["scale"]) / 2


def poisoned_loss(model, batch):
    loss = ft.losses.cross_entropy(model(batch["tokens"]), batch["labels"])
    return ft.Mean(loss.total * batch.get("poison", 1.0), loss.weight)


@pytest.mark.parametrize(
    ("lowering", "policy"),
    [
        ("eager", "full"),
        ("eager", "dots"),
        # `test_a_captured_step_equals_the_eager_one` captures it, and `test_remat` some of its policies.
        *exhaustive_rows([("captured", "full"), ("captured", "dots")]),
    ],
)
def test_remat_changes_no_bit(policy, lowering):
    plain, rematerialised = build(())[1], build((), ft.remat(policy))[1]
    if lowering == "captured":
        capture = ft.compiled(lowering="whole", backend="eager")
        plain, rematerialised = capture(plain), capture(rematerialised)
    assert_same_bits(train(rematerialised)[0], train(plain)[0])
