"""The laws for every optimizer: donation, accumulation, skipped steps, compilation, parameters that are one tensor."""

import pytest
import torch

import ftrain as ft
from ftrain import tree
from tests.bits import assert_same_bits
from tests.exhaustive import choose
from tests.laws.optimizer_steps import F64, build, loss, make_batch, make_params, train
from tests.laws.optimizers import COMBINED, MATRICES_ONLY, OPTIMIZERS

EVERY = [*OPTIMIZERS, *COMBINED]
every_optimizer = pytest.mark.parametrize("name", EVERY)
not_combined = pytest.mark.parametrize("name", OPTIMIZERS)


def assert_near(actual, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-12}
    for part in ("params", "opt_state"):
        torch.testing.assert_close(
            tree.leaves(getattr(actual, part)), tree.leaves(getattr(expected, part)), **tolerance
        )


@every_optimizer
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_donation_changes_no_bit(name, dtype):
    step = build(name)
    assert_same_bits(train(ft.donated(step), dtype), train(step, dtype))


@every_optimizer
def test_accumulation_equals_the_full_batch(name):
    assert_near(train(build(name, ft.accumulate(4))), train(build(name)))


@every_optimizer
def test_a_step_is_pure_and_changes_every_parameter(name):
    step = build(name)
    state = train(step, steps=1)
    kept = tree.clone(state)
    new, _ = step(state, make_batch(1))
    assert_same_bits(state, kept)
    assert_same_bits(step(state, make_batch(1))[0], new)
    assert all(not torch.equal(new.params[key], leaf) for key, leaf in state.params.items() if leaf.numel())


@every_optimizer
def test_a_resumed_run_is_the_same_to_the_bit(name, tmp_path):
    step = ft.donated(build(name))
    state = train(step, torch.float32, steps=2)
    ft.checkpoint.save(tmp_path / "saved", state)
    resumed = ft.checkpoint.load(tmp_path / "saved", like=step.init(make_params(torch.float32), seed=1))
    for index in (2, 3):
        state, _ = step(state, make_batch(index, dtype=torch.float32))
        resumed, _ = step(resumed, make_batch(index, dtype=torch.float32))
        assert_same_bits(resumed, state)


def poisoned(params, batch):
    mean = loss(params, batch)
    return ft.Mean(mean.total * batch["poison"], mean.weight)


GUARDS = {"fp16": lambda: ft.with_amp("fp16"), "skip": lambda: ft.skip_nonfinite()}


# Every optimizer with NaN and one of the two wrappers; AdamW with the other values and both wrappers.
@pytest.mark.parametrize(
    ("name", "wrapper", "poison"),
    [
        *((name, ("fp16", "skip")[index % 2], float("nan")) for index, name in enumerate(OPTIMIZERS | COMBINED)),
        *(("adamw", wrapper, poison) for wrapper in GUARDS for poison in (float("inf"), 3e38)),
    ],
)
def test_a_bad_step_changes_nothing(name, wrapper, poison):
    step = build(name, GUARDS[wrapper](), criterion=poisoned)
    state = step.init(make_params(torch.float32))
    batch = make_batch(0, dtype=torch.float32)
    good = {**batch, "poison": torch.tensor(1.0)}
    # With large weights, the total overflows where the factor is 3e38.
    bad = {**batch, "weight": 1e3 * batch["weight"], "poison": torch.tensor(poison)}
    state, _ = step(state, good)
    after, metrics = step(state, bad)
    if float(metrics["skipped"]):
        assert_same_bits((after.params, after.opt_state), (state.params, state.opt_state))
    assert float(metrics["skipped"]) or poison == 3e38
    after, metrics = step(after, good)
    assert not float(metrics["skipped"])
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves((after.params, after.opt_state)))


# "nested" takes three times as long as the optimizers that it is made of.
@pytest.mark.parametrize("name", choose(EVERY, [name for name in EVERY if name != "nested"]))
def test_compiled_equals_eager(name):
    actual = train(build(name, ft.compiled(lowering="whole", backend="eager", donate=True)))
    assert_near(actual, train(build(name)))


@pytest.mark.parametrize("name", choose(EVERY, ["amsgrad", "lookahead"]))
def test_functionalised_graph_equals_eager(name):
    actual = train(build(name, ft.compiled(lowering="whole", backend="aot_eager", donate=True)))
    assert_near(actual, train(build(name)))


@pytest.mark.parametrize("name", choose(EVERY, ["stochastic"]))
def test_donation_changes_no_bit_of_a_graph(name):
    donated, plain = (build(name, ft.compiled(lowering="whole", backend="eager", donate=d)) for d in (True, False))
    assert_same_bits(train(donated), train(plain))


@not_combined
def test_two_parameters_that_are_one_tensor_are_updated_separately(name):
    weight = torch.ones(2, 2, dtype=F64)
    step = ft.train_step(lambda params, batch: (params["a"] * batch).sum() - params["b"].sum(), OPTIMIZERS[name]())
    batch = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=F64)
    expected, _ = step(step.init({"a": weight, "b": weight.clone()}), batch)
    for wrapped in (step, ft.donated(step)):
        actual, _ = wrapped(wrapped.init({"a": weight, "b": weight}), batch)
        assert_same_bits(actual.params, expected.params)
    assert torch.equal(weight, torch.ones(2, 2, dtype=F64))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@not_combined
def test_an_update_under_vmap_equals_those_of_the_single_runs(name):
    """A sweep needs it: several runs at once, each with its own learning rate."""
    optimizer = OPTIMIZERS[name](weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    params, grads = ({"w": torch.randn(3, 4, 2, generator=draw, dtype=F64)} for _ in range(2))
    rates = torch.tensor([0.1, 0.0, 0.01], dtype=F64)
    state = torch.func.vmap(optimizer.init)(params)
    state = {key: part if isinstance(part, dict) else part.expand(3).clone() for key, part in state.items()}

    def update(grads, state, params, rate):
        return optimizer.update(grads, state, params, {"lr": rate, "rng": ft.random.key(0)})

    actual = torch.func.vmap(update)(grads, state, params, rates)
    for index in range(3):
        inputs_of_run = tree.map(lambda leaf, index=index: leaf[index], (grads, state, params))
        expected = update(*inputs_of_run, rates[index])
        actual_of_run = tree.map(lambda leaf, index=index: leaf[index], actual)
        # A batched product in bfloat16 rounds in another way than a single one.
        tolerance = {"rtol": 0.0, "atol": 3e-3} if name in MATRICES_ONLY else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(actual_of_run, expected, **tolerance)
