"""A step of a module computes what a plain torch loop does, in training and in evaluation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ftrain as ft
from ftrain.step.forward import Forward
from ftrain.step.value_and_grad import ValueAndGrad
from tests.exhaustive import exhaustive_rows
from tests.step.modules import (
    LR,
    all_cases,
    make_case,
    make_step,
    mean_square,
    seed_as_step,
    train,
    train_by_hand,
    vectors,
)
from tests.step.states import assert_same_bits, assert_unchanged, snapshot


@all_cases
def test_the_first_gradient_is_that_of_torch(name):
    module, make_batch, criterion = make_case(name)
    _, grads = train_by_hand(module, make_batch, criterion, steps=1)
    step = make_step(module, criterion)
    state = step.init()
    new, metrics = step(state, make_batch(0))
    for key, grad in grads.items():
        torch.testing.assert_close((state.params[key] - new.params[key]) / LR, grad, rtol=1e-9, atol=1e-12)
    assert metrics["loss"].dtype == torch.float64


@all_cases
def test_parameters_and_buffers_are_those_of_a_plain_loop(name):
    module, make_batch, criterion = make_case(name)
    expected, _ = train_by_hand(module, make_batch, criterion)
    state = train(make_step(module, criterion), make_batch)
    params = {key: param.detach() for key, param in expected.named_parameters()}
    assert list(state.params) == list(params)
    torch.testing.assert_close(state.params, params, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(state.buffers, dict(expected.named_buffers()), rtol=1e-12, atol=1e-14)


# Where Dynamo resumes after a graph break (a recurrent net is one), it asks every tensor for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("name", "lowering"),
    [
        # Not those with dropout: in a whole graph it draws from the key, and in eager mode from torch's generator.
        *((name, "whole") for name in ("weight_norm", "spectral_norm", "reassigned")),
        *((name, "split") for name in ("attention", "reassigned", "lstm")),
        *exhaustive_rows((name, "split") for name in ("net", "gru", "spectral_norm", "weight_norm")),
    ],
)
def test_a_compiled_step_computes_what_an_eager_one_does(name, lowering):
    module, make_batch, criterion = make_case(name)
    eager = make_step(module, criterion)
    compiled = make_step(module, criterion, ft.compiled(backend="eager", lowering=lowering))
    before = snapshot(module)
    state, expected = train(compiled, make_batch), train(eager, make_batch)
    torch.testing.assert_close(state.params, expected.params, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(state.buffers, expected.buffers, rtol=1e-9, atol=1e-12)
    assert_unchanged(module, before)


def test_the_gradient_function_gives_gradients_with_the_bits_of_torchs():
    module, make_batch, criterion = make_case("net")
    _, grads = train_by_hand(module, make_batch, criterion, steps=1)
    loss = ft.from_module(module, criterion)
    state = ft.train_step(loss, ft.optim.sgd(LR)).init()
    with torch.random.fork_rng(), loss.scope(True):
        seed_as_step(0)
        gradients = ValueAndGrad(Forward(loss.fn, "loss", {}), "loss")(state, make_batch(0), None)
    assert_same_bits(gradients.grads, grads)


def test_tied_weights_are_one_parameter():
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion)
    state = step.init()
    assert "head.weight" not in state.params
    assert sorted(state.params) == ["embed.weight", "norm.bias", "norm.weight"]
    state, _ = step(state, make_batch())
    trained = ft.to_module(module, state)
    assert trained.head.weight is trained.embed.weight


class Repeated(nn.Module):
    """Has one submodule under two names, and runs it twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = self.a

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def test_a_submodule_with_two_names_has_one_parameter():
    module = Repeated().double()
    _, grads = train_by_hand(module, vectors, mean_square, steps=1)
    step = make_step(module, mean_square)
    state = step.init()
    new, _ = step(state, vectors())
    assert list(state.params) == ["a.weight"]
    torch.testing.assert_close((state.params["a.weight"] - new.params["a.weight"]) / LR, grads["a.weight"])


def test_a_step_is_in_training_mode_and_an_evaluation_in_evaluation_mode():
    module, make_batch, criterion = make_case("net")
    modes = []

    def recording(model, batch):
        modes.append({part.training for part in model.modules()})
        return criterion(model, batch)

    loss = ft.from_module(module.eval(), recording)
    step = ft.train_step(loss, ft.optim.sgd(LR))
    state, _ = step(step.init(), make_batch())
    ft.eval_step(loss)(state, make_batch())
    assert modes == [{True}, {False}]


def test_an_evaluation_computes_what_torch_does_and_changes_nothing():
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion)
    state, _ = step(step.init(), make_batch())
    before, random_state = ft.tree.clone(state), torch.get_rng_state()
    means = ft.eval_step(step.loss)(state, make_batch())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_bits(state, before)
    # Torch takes the parameters and the statistics of the state.
    with torch.no_grad():
        expected = criterion(ft.to_module(copy.deepcopy(module), state).eval(), make_batch())
    assert float(means["loss"]) == float(expected)


def distillation(model, batch):
    return (model["student"](batch) - model["teacher"](batch)).square().mean()


def distillation_in_evaluation_mode(model, batch):
    model["teacher"].eval()
    return distillation(model, batch)


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("criterion", "num_messages"),
    [(distillation, 1), (distillation_in_evaluation_mode, 0)],
    ids=["training mode", "evaluation mode"],
)
def test_the_log_says_once_that_a_step_takes_a_teacher_out_of_evaluation_mode(
    criterion, num_messages, wrappers, caplog
):
    module = nn.ModuleDict({"student": nn.Linear(4, 3), "teacher": nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))})
    module["teacher"].eval().requires_grad_(False)
    train(make_step(module.double(), criterion, *wrappers), vectors)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("evaluation mode: teacher" in message for message in messages) == num_messages


def test_batchnorm_statistics_are_in_the_state_and_not_in_the_module():
    module, make_batch, criterion = make_case("net")
    step = make_step(module, criterion)
    state = step.init()
    assert sorted(state.buffers) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    states = [state]
    for _ in range(2):
        state, _ = step(state, make_batch())
        states.append(state)
    assert [int(state.buffers["norm.num_batches_tracked"]) for state in states] == [0, 1, 2]
    assert int(module.norm.num_batches_tracked) == 0
    initial, first, second = (state.buffers["norm.running_mean"] for state in states)
    assert torch.equal(initial, torch.zeros(4, dtype=torch.float64))
    assert not torch.equal(first, second)


def test_each_microbatch_updates_the_statistics_of_the_one_before():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    step = make_step(module, mean_square, ft.accumulate(2))
    state, _ = step(step.init(), vectors())
    expected = copy.deepcopy(module).train()
    for microbatch in vectors().chunk(2):
        expected(microbatch)
    torch.testing.assert_close(state.buffers, dict(expected.named_buffers()), rtol=1e-12, atol=0)


def test_a_criterion_may_take_a_key_and_return_metrics():
    module = nn.Linear(4, 3).double()
    keys = []

    def criterion(model, batch, rng):
        keys.append(rng.tolist())
        out = ft.random.dropout(rng, model(batch), 0.5)
        return ft.Mean(out.square().sum(), torch.tensor(2.0)), {"largest": out.max()}

    step = make_step(module, criterion)
    state, metrics = step(step.init(seed=3), vectors())
    step(state, vectors())
    assert set(metrics) == {"loss", "largest", "lr"}
    assert not metrics["largest"].requires_grad
    assert keys == [ft.random.fold_in(ft.random.key(3), index).tolist() for index in range(2)]


def test_two_steps_of_one_module_do_not_disturb_each_other():
    module, make_batch, criterion = make_case("net")
    alone = make_step(module, criterion)
    expected, _ = alone(alone.init(), make_batch())
    first, second = make_step(module, criterion), make_step(module, criterion, ft.clip(0.01))
    first_state, second_state = first.init(), second.init()
    second(second_state, make_batch())
    new, _ = first(first_state, make_batch())
    assert_same_bits(new.params, expected.params)


@pytest.mark.parametrize("wrappers", [(), (ft.remat(blocks=["1"]),)], ids=len)
def test_a_loss_may_run_within_itself(wrappers):
    """Such as a teacher: the loss runs the same model with other parameters between two layers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    teacher = {name: torch.full_like(param, 0.1) for name, param in model.named_parameters()}
    is_inside = False

    def criterion(model, batch):
        nonlocal is_inside
        hidden = model[0](batch)
        if is_inside:
            return model[1](hidden).mean()
        is_inside = True
        with torch.no_grad():
            target, _, _ = loss.fn(teacher, batch, rng=None, buffers={})
        is_inside = False
        return (model[1](hidden) - target.value).square().mean()

    def run_by_hand(params, batch):
        hidden = F.linear(batch, params["0.weight"], params["0.bias"])
        return F.linear(hidden, params["1.weight"], params["1.bias"])

    loss = ft.from_module(model, criterion)
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    state, batch = step.init(), torch.randn(4, 3)
    expected = (run_by_hand(state.params, batch) - run_by_hand(teacher, batch).mean()).square().mean()
    before = snapshot(model)
    _, metrics = step(state, batch)
    torch.testing.assert_close(metrics["loss"], expected)
    mean, _, _ = loss.fn(state.params, batch, rng=None, buffers={})
    torch.testing.assert_close(mean.value, expected)
    assert_unchanged(model, before)


def test_a_loss_and_an_optimizer_print_as_in_the_step():
    step = make_step(nn.Linear(3, 1), mean_square, optimizer=ft.optim.adamw(1e-3))
    assert (str(step.loss), str(step.optimizer)) == ("mean_square(Linear)", "adamw(constant(1e-3))")
    assert str(step.loss) in repr(step)
    assert str(step.optimizer) in repr(step)
    assert str(ft.from_module(nn.Linear(3, 1), lambda model, batch: model(batch).sum())) == "loss(Linear)"
    assert str(ft.optim.adamw(lambda k: 1e-3)) == "adamw(<lambda>)"


def test_a_deep_copy_of_a_step_is_the_step():
    # Tools deep-copy their configuration and the step in it. With a copy of the module, `remat` would wrap blocks that
    # the loss does not run.
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    step = make_step(module, mean_square)
    copied = ft.compose(copy.deepcopy(step), ft.remat(blocks=["0"]))
    batch = torch.ones(3, 2)
    assert torch.equal(copied(copied.init(), batch)[1]["loss"], step(step.init(), batch)[1]["loss"])
