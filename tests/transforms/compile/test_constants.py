"""Python numbers that a compiled function reads beside its arguments: a changed one is another graph, as eagerly."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend

import ftrain as ft
from ftrain.errors import BatchError

graphs = []
GLOBAL = 1.0


@register_backend
def ftrain_counted_constants(graph, inputs):
    graphs.append(graph)
    return graph.forward


class Settings:
    of_class = 1.0

    def __init__(self):
        self.rate, self.steps_made = 1.0, 0


class Net(nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.power = nn.Linear(3, 2), nn.Dropout(0.0), 1
        self.options = {"shift": 0.0, "not read": 1}
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self._last(self.drop(self.linear(x))) * self.scale + self.options["shift"]

    def _last(self, x):
        return x**self.power

    def set_power(self, power):
        self.power = power


class Owner:
    """As a module of Lightning: the loss is a method, which reads some attributes of its object."""

    def __init__(self):
        self.weight, self.epoch = 1.0, 0

    def loss(self, model, batch):
        return model(batch).square().mean() * self.weight


def of_closure():
    weight = 1.0

    def criterion(model, batch):
        return model(batch).square().mean() * weight

    def change():
        nonlocal weight
        weight = 3.0

    return Net(), criterion, change


def of_settings(change):
    settings = Settings()

    def criterion(model, batch):
        return model(batch).square().mean() * settings.rate * settings.of_class

    return Net(), criterion, functools.partial(change, settings)


def of_tensor():
    weight = torch.tensor(1.0)

    def criterion(model, batch):
        return model(batch).square().mean() * weight

    def change():
        nonlocal weight
        weight = torch.tensor(3.0)

    return Net(), criterion, change


def of_global():
    def criterion(model, batch):
        return helper(model, batch)

    def helper(model, batch):
        return model(batch).square().mean() * GLOBAL

    return Net(), criterion, lambda: globals().update(GLOBAL=GLOBAL + 1)


def of_partial():
    settings = {"weight": 1.0}

    def criterion(model, batch, weights, sign):
        return model(batch).square().mean() * weights["weight"] * sign

    return Net(), functools.partial(criterion, weights=settings, sign=1), lambda: settings.update(weight=2.0)


def of_method():
    owner = Owner()
    return Net(), owner.loss, lambda: setattr(owner, "weight", 2.0)


def of_net(change):
    net = Net()
    return net, lambda model, batch: model(batch).square().mean(), lambda: change(net)


CHANGES = {
    "a closure": of_closure,
    "a tensor in a closure": of_tensor,
    "a global that a helper reads": of_global,
    "a dict in a partial": of_partial,
    "the object of a method": of_method,
    "an object": lambda: of_settings(lambda settings: setattr(settings, "rate", 2.0)),
    "a class": lambda: of_settings(lambda settings: setattr(settings, "of_class", 2.0)),
    "dropout": lambda: of_net(lambda net: setattr(net.drop, "p", 1.0)),
    "a method of the module": lambda: of_net(lambda net: net.set_power(2)),
    "a class attribute of the module": lambda: of_net(lambda net: setattr(net, "scale", 2.0)),
    "a dict of the module": lambda: of_net(lambda net: net.options.update(shift=1.0)),
    "a number that becomes a tensor": lambda: of_net(lambda net: setattr(net, "scale", torch.tensor([2.0, 3.0]))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_number_is_read_again_as_eagerly(name, caplog):
    model, criterion, change = CHANGES[name]()
    loss = ft.from_module(model, criterion)
    eager, x = ft.train_step(loss, ft.optim.sgd(0.1)), torch.randn(4, 3)
    step = ft.compiled(backend="ftrain_counted_constants", lowering="whole")(eager)
    evaluation = ft.compiled(backend="ftrain_counted_constants", lowering="whole")(ft.eval_step(loss))
    state = step.init()

    def losses():
        return [float(each(state, x)[1]["loss"]) for each in (step, eager)], evaluation(state, x)["loss"].value

    (compiled, expected), evaluated = losses()
    assert compiled == pytest.approx(expected)
    graphs.clear()
    losses()
    assert not graphs
    change()
    (compiled, changed), evaluated_again = losses()
    assert changed != expected
    assert compiled == pytest.approx(changed)
    # Dropout does nothing in an evaluation.
    assert (float(evaluated) == float(evaluated_again)) == (name == "dropout")
    assert float(evaluated_again) == pytest.approx(float(ft.eval_step(loss)(state, x)["loss"].value))
    assert "is compiled again, since" in caplog.text


def test_what_the_loss_does_not_read_or_writes_itself_needs_no_other_graph():
    owner, model, written = Owner(), Net(), {"calls": 0}

    def criterion(model, batch):
        written["calls"] += 1
        return owner.loss(model, batch)

    loss = ft.from_module(model, criterion)
    step = ft.compiled(backend="ftrain_counted_constants")(ft.train_step(loss, ft.optim.sgd(0.1)))
    state, x = step.init(), torch.randn(4, 3)
    state, _ = step(state, x)
    graphs.clear()
    for epoch in range(3):
        owner.epoch = epoch
        ft.eval_step(loss)(state, x)  # Runs `forward`, which counts its calls.
        model.options["not read"] = epoch
        state, _ = step(state, x)
    assert not graphs
    assert model.calls == written["calls"] - 1 == 3


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_number_that_changes_in_each_step_is_an_error_that_names_it(accumulates, caplog):
    settings = SimpleNamespace(weight=0)
    loss = ft.from_module(Net(), lambda model, batch: model(batch).square().mean() * settings.weight)
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *([ft.accumulate(2)] if accumulates else []))
    step = ft.compiled(backend="ftrain_counted_constants", max_graphs=2)(step)
    state, x = step.init(), torch.randn(4, 3)

    def losses():
        settings.weight += 1
        mean = loss.fn(state.params, x, rng=None, buffers={})[0]
        return float(step(state, x)[1]["loss"]), float(mean.total)

    for _ in range(2):
        found, expected = losses()
        assert found == pytest.approx(expected)
    assert "settings.weight is 2 and was 1" in caplog.text
    with pytest.raises(BatchError, match=r"constants.*settings.weight came as '?1"):
        [losses() for _ in range(3)]


def test_a_plain_function_reads_a_changed_number_again():
    weight = 2.0
    function = ft.compiled(backend="ftrain_counted_constants")(lambda state, batch: (state + weight * batch, {}))
    assert float(function(torch.ones(()), torch.ones(()))[0]) == 3
    weight = 5.0
    assert float(function(torch.ones(()), torch.ones(()))[0]) == 6
