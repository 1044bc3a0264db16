"""Numbers that a loss reads beside its arguments: a compiled step reads a changed one again, as an eager step does."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.errors import BatchError
from tests.transforms.compile.counting_backend import compiled_graphs

GLOBAL = 1.0


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


class Settings:
    of_class = 1.0

    def __init__(self):
        self.rate = 1.0


class Trainer:
    """Like a module of Lightning: the loss is a method, which reads some attributes of its object."""

    def __init__(self):
        self.weight, self.epoch = 1.0, 0

    def loss(self, model, batch):
        return model(batch).square().mean() * self.weight


def by_closure(value, new_value):
    def criterion(model, batch):
        return model(batch).square().mean() * value

    def change():
        nonlocal value
        value = new_value

    return Net(), criterion, change


def by_settings(**new_attributes):
    settings = Settings()

    def criterion(model, batch):
        return model(batch).square().mean() * settings.rate * settings.of_class

    return Net(), criterion, lambda: vars(settings).update(new_attributes)


def by_global():
    def criterion(model, batch):
        return helper(model, batch)

    def helper(model, batch):
        return model(batch).square().mean() * GLOBAL

    return Net(), criterion, lambda: globals().update(GLOBAL=GLOBAL + 1)


def by_partial():
    weights = {"weight": 1.0}

    def criterion(model, batch, weights, sign):
        return model(batch).square().mean() * weights["weight"] * sign

    return Net(), functools.partial(criterion, weights=weights, sign=1), lambda: weights.update(weight=2.0)


def by_method():
    trainer = Trainer()
    return Net(), trainer.loss, lambda: setattr(trainer, "weight", 2.0)


def by_module(change):
    model = Net()
    return model, lambda model, batch: model(batch).square().mean(), lambda: change(model)


CHANGES = {
    "a closure": lambda: by_closure(1.0, 3.0),
    "a tensor in a closure": lambda: by_closure(torch.tensor(1.0), torch.tensor(3.0)),
    "a global that a helper reads": by_global,
    "a dict in a partial": by_partial,
    "the object of a method": by_method,
    "an object": lambda: by_settings(rate=2.0),
    "a class": lambda: by_settings(of_class=2.0),
    "dropout": lambda: by_module(lambda model: setattr(model.drop, "p", 1.0)),
    "a method of the module": lambda: by_module(lambda model: model.set_power(2)),
    "a class attribute of the module": lambda: by_module(lambda model: setattr(model, "scale", 2.0)),
    "a dict of the module": lambda: by_module(lambda model: model.options.update(shift=1.0)),
    "a number that becomes a tensor": lambda: by_module(
        lambda model: setattr(model, "scale", torch.tensor([2.0, 3.0]))
    ),
}
"""Functions that return a module, its loss, and a function that changes a number that these read."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_number_is_read_again_as_eagerly(name, caplog):
    model, criterion, change = CHANGES[name]()
    eager, batch = ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)), torch.randn(4, 3)
    compiled = ft.compiled(backend="ftrain_counting", lowering="whole")(eager)
    state = eager.init()

    def losses():
        return tuple(float(step(state, batch)[1]["loss"]) for step in (compiled, eager))

    actual, expected = losses()
    assert actual == pytest.approx(expected)
    compiled_graphs.clear()
    losses()
    assert not compiled_graphs
    change()
    actual, changed = losses()
    assert changed != expected
    assert actual == pytest.approx(changed)
    assert "is compiled again, since" in caplog.text


@pytest.mark.parametrize("name", ["a closure", "dropout"])
def test_a_changed_number_is_read_again_by_an_evaluation(name):
    model, criterion, change = CHANGES[name]()
    eager, batch = ft.eval_step(ft.from_module(model, criterion)), torch.randn(4, 3)
    compiled = ft.compiled(backend="ftrain_counting", lowering="whole")(eager)
    state = ft.train_step(eager.loss, ft.optim.sgd(0.1)).init()
    before = float(compiled(state, batch)["loss"])
    change()
    after = float(compiled(state, batch)["loss"])
    assert after == pytest.approx(float(eager(state, batch)["loss"]))
    # Dropout does nothing in an evaluation.
    assert (after == before) == (name == "dropout")


def test_a_plain_function_reads_a_changed_number_again():
    weight = 2.0
    function = ft.compiled(backend="ftrain_counting")(lambda state, batch: (state + weight * batch, {}))
    assert float(function(torch.ones(()), torch.ones(()))[0]) == 3
    weight = 5.0
    assert float(function(torch.ones(()), torch.ones(()))[0]) == 6


def test_numbers_that_the_loss_does_not_read_or_that_it_writes_need_no_other_graph():
    trainer, model, written = Trainer(), Net(), {"calls": 0}

    def criterion(model, batch):
        written["calls"] += 1
        return trainer.loss(model, batch)

    loss_fn = ft.from_module(model, criterion)
    step = ft.compiled(backend="ftrain_counting")(ft.train_step(loss_fn, ft.optim.sgd(0.1)))
    state, batch = step.init(), torch.randn(4, 3)
    state, _ = step(state, batch)
    compiled_graphs.clear()
    for epoch in range(3):
        trainer.epoch = epoch
        ft.eval_step(loss_fn)(state, batch)  # Runs `forward`, which counts its calls.
        model.options["not read"] = epoch
        state, _ = step(state, batch)
    assert not compiled_graphs
    assert model.calls == 3


def test_an_attribute_of_the_name_of_another_one_is_ignored_after_one_capture():
    """The code of the loss has the name `x` without the object of the attribute: here it is a key of the batch."""
    trainer, captures = SimpleNamespace(weight=2.0, x=0), []

    def criterion(model, batch):
        captures.append(None)
        # Tensors that the loss makes are constants of its graph; these have the same values in each capture.
        made = torch.tensor([1.0, 2.0]), torch.tensor([], dtype=torch.complex64), torch.tensor([True, False]).bfloat16()
        factor = sum(tensor.sum().abs() for tensor in made)
        return (model(batch["x"]) * factor).square().mean() * trainer.weight

    loss_fn = ft.from_module(Net(), criterion)
    step = ft.compiled(backend="ftrain_counting", max_graphs=2)(ft.train_step(loss_fn, ft.optim.sgd(0.1)))
    state, batch = step.init(), {"x": torch.randn(4, 3)}
    compiled_graphs.clear()
    for epoch in range(5):
        trainer.x = epoch
        state, _ = step(state, batch)
    assert (len(compiled_graphs), len(captures)) == (1, 2)
    trainer.weight = 3.0
    _, metrics = step(state, batch)
    expected = loss_fn.fn(state.params, batch, rng=None, buffers={})[0].total
    assert float(metrics["loss"]) == pytest.approx(float(expected))
    assert len(compiled_graphs) == 2


@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2),)], ids=["plain", "accumulate"])
def test_a_number_that_changes_in_each_step_is_an_error_that_names_it(wrappers, caplog):
    settings = SimpleNamespace(weight=0)
    loss_fn = ft.from_module(Net(), lambda model, batch: model(batch).square().mean() * settings.weight)
    step = ft.compose(
        ft.train_step(loss_fn, ft.optim.sgd(0.1)), *wrappers, ft.compiled(backend="ftrain_counting", max_graphs=2)
    )
    state, batch = step.init(), torch.randn(4, 3)
    for weight in (1, 2):
        settings.weight = weight
        _, metrics = step(state, batch)
        expected = loss_fn.fn(state.params, batch, rng=None, buffers={})[0].total
        assert float(metrics["loss"]) == pytest.approx(float(expected))
    assert "settings.weight is 2 and was 1" in caplog.text
    settings.weight = 3
    with pytest.raises(BatchError, match=r"constants.*settings.weight came as '?1"):
        step(state, batch)


@pytest.mark.parametrize(
    ("first", "second"), [(slice(0, 1), slice(0, 2)), (range(1), range(2))], ids=["slice", "range"]
)
def test_a_changed_slice_or_range_is_read_again(first, second):
    settings = SimpleNamespace(rows=first)

    def loss(params, batch):
        rows = settings.rows if isinstance(settings.rows, slice) else [*settings.rows]
        return (batch["x"][rows] * params["w"]).sum()

    step = ft.compiled(backend="aot_eager")(ft.train_step(loss, ft.optim.sgd(0.0)))
    state, batch = step.init({"w": torch.ones(())}), {"x": torch.tensor([1.0, 2.0])}
    assert step(state, batch)[1]["loss"] == 1.0
    settings.rows = second
    assert step(state, batch)[1]["loss"] == 3.0


def test_a_changed_list_of_which_the_loss_makes_a_tensor_is_read_again():
    values = [1.0, 2.0]
    step = ft.compiled(backend="aot_eager")(
        ft.train_step(lambda params, batch: (torch.tensor(values) * params["w"]).sum(), ft.optim.sgd(0.0))
    )
    state, batch = step.init({"w": torch.ones(())}), {"x": torch.ones(1)}
    for last in (2.0, 3.0, 2.0):
        values[1] = last
        assert step(state, batch)[1]["loss"] == 1.0 + last
