"""Steps that are hard to capture: tied inputs, conjugates, checks, conditions, random draws, replaced data."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import TraceError
from tests.exhaustive import choose, exhaustive_rows
from tests.faults.problem import batch as regression_batch
from tests.faults.problem import make, params, squares

BACKENDS = ["eager", "aot_eager"]


def of_two(params, batch):
    return (params["w"].sum() * batch["x"] - batch["y"]).square().mean() + params["b"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("donate", [False, True])
def test_one_tensor_that_is_two_leaves_is_two_inputs_of_the_graph(backend, donate):
    step, eager = make(of_two, ft.compiled(backend=backend, donate=donate)), make(of_two)
    state, expected = step.init(params()), eager.init(params())
    x = torch.ones(4)
    for inputs in ({"x": x, "y": x}, {"x": torch.full((4,), 3.0), "y": torch.full((4,), 5.0)}):
        state, metrics = step(state, inputs)
        expected, expected_metrics = eager(expected, inputs)
        torch.testing.assert_close(metrics["loss"], expected_metrics["loss"])
    torch.testing.assert_close(state.params, expected.params)


def test_tensors_with_the_conj_or_neg_bit_are_other_inputs_than_tensors_without_it():
    def loss(params, z):
        return (z.real @ params["w"]).square().mean() + (z.imag @ params["w"]).sum() + params["b"]

    torch.manual_seed(0)
    z = torch.randn(2, 3, dtype=torch.complex64)
    step, eager = make(loss, ft.compiled(backend="eager", lowering="whole")), make(loss)
    state, expected = step.init(params()), eager.init(params())
    for batch in (z, z.conj(), z):
        (state, _), (expected, _) = step(state, batch), eager(expected, batch)
    torch.testing.assert_close(state.params, expected.params)

    evaluation = ft.eval_step(lambda params, x: (x @ params["w"]).sum())
    actual, expected_loss = (
        variant(state, z.conj().imag)["loss"] for variant in (ft.compiled()(evaluation), evaluation)
    )
    torch.testing.assert_close(actual.value, expected_loss.value)


def test_a_first_call_with_the_averages_does_not_tie_them_to_the_parameters():
    step, eager = make(squares, ft.ema(0.5), ft.compiled(backend="eager")), make(squares, ft.ema(0.5))
    inputs = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2)}
    step(ft.averaged(step.init(params())), inputs)
    state, expected = step.init(params()), eager.init(params())
    for _ in range(3):
        (state, _), (expected, _) = step(state, inputs), eager(expected, inputs)
    torch.testing.assert_close(state.slots["ema"], expected.slots["ema"])


def test_a_tensor_that_a_loss_keeps_from_a_capture_is_refused():
    cached = []

    def criterion(model, x):
        if not cached:
            cached.append(torch.arange(3.0))
        return model(x + cached[0]).sum()

    step = ft.train_step(ft.from_module(nn.Linear(3, 1), criterion), ft.optim.sgd(0.1))
    step = ft.compiled(backend="eager", lowering="whole")(step)
    state, _ = step(step.init(), torch.ones(2, 3))
    with pytest.raises(TraceError, match="created while another graph was captured"):
        step(state, torch.ones(4, 3))


@pytest.mark.parametrize("wrappers", [(ft.donated(),), (ft.compiled(backend="eager", donate=True),)])
def test_a_buffer_that_is_the_old_parameter_is_not_overwritten(wrappers):
    def loss(params, batch, *, buffers):
        return squares(params, batch), {}, {"previous": params["w"].detach()}

    inputs = {"x": torch.ones(2, 3), "y": torch.zeros(2)}
    step, plain = make(loss, *wrappers), make(loss)
    buffers = {"previous": torch.zeros(3)}
    (state, _), (expected, _) = (variant(variant.init(params(), buffers=buffers), inputs) for variant in (step, plain))
    assert torch.equal(state.buffers["previous"], params()["w"])
    assert torch.equal(expected.buffers["previous"], params()["w"])


def test_small_changes_of_averages_of_16_bit_parameters_are_not_lost():
    step = make(lambda params, batch: params["w"].sum(), ft.ema(0.999), optimizer=ft.optim.sgd(0.0))
    state = step.init({"w": torch.ones(1, dtype=torch.bfloat16)})
    state.slots["ema"]["w"].zero_()
    for _ in range(200):
        state, _ = step(state, torch.zeros(1))
    assert float(state.slots["ema"]["w"]) == pytest.approx(1 - 0.999**200, rel=1e-4)
    assert ft.averaged(state).params["w"].dtype == torch.bfloat16


def test_a_module_with_a_train_method_of_its_own_keeps_its_modes():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 1)

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x):
            return self.out(self.norm(x))

    step = ft.train_step(ft.from_module(Frozen(), lambda model, x: model(x).sum()), ft.optim.sgd(0.1))
    state, _ = step(step.init(), torch.arange(6.0).reshape(2, 3))
    assert torch.equal(state.buffers["norm.running_mean"], torch.zeros(3))


def test_init_with_parameters_keeps_frozen_ones_frozen():
    module = nn.Linear(3, 1)
    module.bias.requires_grad_(False)
    step = ft.train_step(ft.from_module(module, lambda model, x: model(x).sum()), ft.optim.sgd(0.1))
    state = step.init({"weight": torch.ones(1, 3), "bias": torch.ones(1)})
    assert state.params["bias"] is None
    assert torch.equal(state.frozen["bias"], torch.ones(1))


@pytest.mark.parametrize("donate", [False, True])
def test_a_check_of_values_runs_in_each_step(donate):
    def loss(params, batch):
        torch._check_tensor_all(batch["x"] > 0, lambda: "x must be positive")
        return of_two(params, batch)

    step = make(loss, ft.compiled(backend="aot_eager", lowering="whole", donate=donate))
    eager, evaluation = make(loss), ft.compiled(backend="aot_eager", lowering="whole")(ft.eval_step(loss))
    good, bad = {"x": torch.ones(4), "y": torch.zeros(4)}, {"x": torch.tensor([1.0, 1, 0, 1]), "y": torch.zeros(4)}
    expected, _ = eager(eager.init(params()), good)
    state, _ = step(step.init(params()), good)
    actual, expected_loss = (variant(state, good)["loss"] for variant in (evaluation, ft.eval_step(loss)))
    torch.testing.assert_close(actual.value, expected_loss.value)
    for run in (step, evaluation):
        with pytest.raises(RuntimeError, match=r"a check of values within the loss failed; the step without compiled"):
            run(state, bad)
    torch.testing.assert_close(state.params, expected.params)


@pytest.mark.parametrize("of_params", choose([False, True], [True]), ids=["of the batch", "of parameters"])
def test_a_condition_is_part_of_the_graph_of_a_step_and_of_an_evaluation(of_params):
    def loss(params, batch, condition=torch.cond):
        operand = params["w"] if of_params else batch["y"]
        (result,) = condition(batch["x"].sum() > 0, lambda y: (y * 2,), lambda y: (y + 3,), (operand,))
        return squares({**params, "w": result}, batch) if of_params else squares(params, {**batch, "y": result})

    def by_hand(params, batch):
        return loss(params, batch, lambda holds, yes, no, inputs: map(torch.where, [holds], yes(*inputs), no(*inputs)))

    step, eager = make(loss, ft.compiled(backend="aot_eager", lowering="whole")), make(by_hand)
    evaluation = ft.compiled(backend="aot_eager", lowering="whole")(ft.eval_step(loss))
    for sign in (1, -1):
        inputs = {"x": sign * regression_batch()["x"], "y": torch.ones(4)}
        state, expected = (variant(variant.init(params()), inputs)[0] for variant in (step, eager))
        torch.testing.assert_close(state.params, expected.params)
        actual, expected_loss = (variant(state, inputs)["loss"] for variant in (evaluation, ft.eval_step(by_hand)))
        torch.testing.assert_close(actual.value, expected_loss.value)


class Conditional(nn.Module):
    """A layer whose branches use its parameters without getting them as operands."""

    def __init__(self, branch, as_tuple=False):
        super().__init__()
        self.linear, self.branch, self.as_tuple = nn.Linear(3, 1), branch, as_tuple

    def forward(self, x):
        def wrap(result):
            return (result,) if self.as_tuple else result

        chosen = torch.cond(
            x.sum() > 0, lambda x: wrap(self.branch(self.linear(x))), lambda x: wrap(2 * self.linear(x)), (x,)
        )
        return chosen[0] if self.as_tuple else chosen


def of_module(module):
    torch.manual_seed(0)
    nn.init.normal_(module.linear.weight)
    return ft.from_module(module, lambda model, batch: (model(batch["x"])[:, 0] - batch["y"]).square().mean())


@pytest.mark.parametrize(
    ("backend", "as_tuple"),
    [("aot_eager", False), ("inductor", True), *exhaustive_rows([("aot_eager", True), ("inductor", False)])],
)
def test_branches_of_a_condition_may_use_parameters_and_run_eagerly_afterwards(backend, as_tuple):
    loss = of_module(Conditional(torch.sin, as_tuple))
    whole, eager = make(loss, ft.compiled(backend=backend, lowering="whole")), make(loss)
    state, expected = whole.init(), eager.init()
    for sign in (1, -1, 1):
        inputs = {"x": sign * regression_batch()["x"], "y": torch.ones(4)}
        (state, metrics), (expected, expected_metrics) = whole(state, inputs), eager(expected, inputs)
        torch.testing.assert_close(metrics["loss"], expected_metrics["loss"])
    torch.testing.assert_close(state.params, expected.params)


@pytest.mark.parametrize("as_tuple", choose([False, True], [False]))
def test_a_branch_that_draws_random_numbers_is_not_captured_since_it_would_not_draw_from_the_key(as_tuple, caplog):
    loss = of_module(Conditional(nn.Dropout(), as_tuple))
    inputs = {"x": regression_batch(64)["x"] + 1, "y": torch.ones(64)}
    whole = make(loss, ft.compiled(backend="aot_eager", lowering="whole"))
    with pytest.raises(TraceError, match="draws random numbers"):
        whole(whole.init(), inputs)
    step, eager = make(loss, ft.compiled(backend="aot_eager")), make(loss)
    before = torch.get_rng_state()
    torch.testing.assert_close(step(step.init(), inputs)[1], eager(eager.init(), inputs)[1])
    assert torch.equal(before, torch.get_rng_state())


class Counting(nn.Module):
    """A layer that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.data = self.calls + 1
        return self.linear(x) + self.calls


def test_a_loss_that_replaces_data_is_not_captured_since_the_graph_would_keep_the_old_values():
    loss, inputs = of_module(Counting()), regression_batch()
    whole = make(loss, ft.compiled(backend="aot_eager", lowering="whole"))
    with pytest.raises(TraceError, match=r"replaces the data of a tensor \(x\.data = y\)"):
        whole(whole.init(), inputs)
    step, eager = make(loss, ft.compiled(backend="aot_eager")), make(loss)
    state, expected = step.init(), eager.init()
    for _ in range(2):
        state, expected = step(state, inputs)[0], eager(expected, inputs)[0]
    torch.testing.assert_close((state.params, state.buffers), (expected.params, expected.buffers))
    assert float(state.buffers["calls"]) == 2


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_a_loss_that_draws_from_python_or_numpy_is_not_captured(draw, caplog):
    def loss(params, batch):
        return squares(params, batch) * (1 + draw())

    inputs = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2)}
    step = make(loss, ft.compiled(backend="eager", lowering="whole"))
    with pytest.raises(TraceError, match="draws from the generator of Python or NumPy"):
        step(step.init(params()), inputs)
    step = make(loss, ft.compiled(backend="eager"))
    state = step.init(params())
    assert len({float(step(state, inputs)[1]["loss"]) for _ in range(4)}) == 4
    assert any("the generator of Python or NumPy" in message for message in caplog.messages)


KEPT = {"python": random.Random(0), "generator": np.random.default_rng(0), "random_state": np.random.RandomState(0)}


@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_a_loss_that_draws_from_a_generator_that_it_keeps_is_not_captured(kept):
    inputs = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2)}

    class Augmented:
        def __init__(self):
            self.generator = kept

        def __call__(self, params, batch):
            return squares(params, batch) * (1 + self.generator.uniform(0, 1))

    for loss in (lambda params, batch: squares(params, batch) * (1 + kept.uniform(0, 1)), Augmented()):
        step = make(loss, ft.compiled(backend="eager", lowering="whole"))
        with pytest.raises(TraceError, match="draws from the generator of Python or NumPy"):
            step(step.init(params()), inputs)


def test_a_generator_that_a_loss_keeps_and_does_not_draw_from_changes_nothing():
    kept = [random.SystemRandom(), np.random.default_rng(0), random.Random(0)]

    def loss(params, batch):
        return squares(params, batch) * len(kept)

    step = make(loss, ft.compiled(backend="eager", lowering="whole"))
    step(step.init(params()), {"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2)})
