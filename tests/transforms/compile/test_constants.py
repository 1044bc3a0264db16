"""Python numbers that a compiled function reads beside its arguments: a changed one is another graph, as eagerly."""

import dataclasses
import enum
import functools
import gc
import weakref
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend

import ftrain as ft
from ftrain.errors import BatchError
from ftrain.transforms.compile.constants import Constants

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
    eager, x = ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)), torch.randn(4, 3)
    step = ft.compiled(backend="ftrain_counted_constants", lowering="whole")(eager)
    state = step.init()

    def losses():
        return [float(each(state, x)[1]["loss"]) for each in (step, eager)]

    compiled, expected = losses()
    assert compiled == pytest.approx(expected)
    graphs.clear()
    losses()
    assert not graphs
    change()
    compiled, changed = losses()
    assert changed != expected
    assert compiled == pytest.approx(changed)
    assert "is compiled again, since" in caplog.text


@pytest.mark.parametrize("name", ["a closure", "dropout"])
def test_a_changed_number_is_read_again_by_an_evaluation(name):
    model, criterion, change = CHANGES[name]()
    eager, x = ft.eval_step(ft.from_module(model, criterion)), torch.randn(4, 3)
    compiled = ft.compiled(backend="ftrain_counted_constants", lowering="whole")(eager)
    state = ft.train_step(eager.loss, ft.optim.sgd(0.1)).init()
    before = float(compiled(state, x)["loss"])
    change()
    after = float(compiled(state, x)["loss"])
    assert after == pytest.approx(float(eager(state, x)["loss"]))
    # Dropout does nothing in an evaluation.
    assert (after == before) == (name == "dropout")


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
    assert model.calls == 3


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
        actual, expected = losses()
        assert actual == pytest.approx(expected)
    assert "settings.weight is 2 and was 1" in caplog.text
    with pytest.raises(BatchError, match=r"constants.*settings.weight came as '?1"):
        [losses() for _ in range(3)]


def test_a_plain_function_reads_a_changed_number_again():
    weight = 2.0
    function = ft.compiled(backend="ftrain_counted_constants")(lambda state, batch: (state + weight * batch, {}))
    assert float(function(torch.ones(()), torch.ones(()))[0]) == 3
    weight = 5.0
    assert float(function(torch.ones(()), torch.ones(()))[0]) == 6


@dataclasses.dataclass(frozen=True)
class Frozen:
    rate: float = 1.0
    epoch: int = 0


@dataclasses.dataclass(slots=True)
class Slots:
    rate: float = 1.0


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


class Scaled:
    def __init__(self):
        self.rate = 1.0

    def scaled(self, x):
        return x * self.rate

    def __rmul__(self, x):
        return x * self.rate


class Overriding(Scaled):
    _twice = functools.partialmethod(Scaled.scaled)

    def scaled(self, x):
        return super().scaled(x)


class Dynamic:
    """As a configuration of omegaconf."""

    def __init__(self):
        self._content = {"rate": 1.0}

    def __getattr__(self, name):
        return self.__dict__["_content"][name]


def boxed(value, read, change):
    box = SimpleNamespace(it=value)
    return (lambda x: read(box.it, x)), (lambda: change(box))


def replaced(old, new, read):
    return boxed(old, read, lambda box: setattr(box, "it", new))


def changed(value, read, change):
    return boxed(value, read, lambda box: change(box.it))


def set_rate(owner):
    owner.rate = 2.0


KEY = "rate"
CHANGES_WITHIN = {
    "a frozen object in place of another": lambda: replaced(Frozen(), Frozen(2.0), lambda it, x: x * it.rate),
    "a dict in place of another": lambda: replaced({"rate": 1.0}, {"rate": 2.0}, lambda it, x: x * it["rate"]),
    "a tuple in place of another": lambda: replaced((1.0, 1.0), (2.0, 1.0), lambda it, x: x * it[0]),
    "None that becomes a number": lambda: replaced(None, 2.0, lambda it, x: x if it is None else x * it),
    "a whole number that becomes a float": lambda: replaced(1, 1.0, lambda it, x: x.long() * it),
    "zero and its negative": lambda: replaced(0.0, -0.0, lambda it, x: x / it),
    "an enum": lambda: replaced(Mode.SUM, Mode.MEAN, lambda it, x: x.sum() if it is Mode.SUM else x.mean()),
    "a function of torch": lambda: replaced(torch.exp, torch.tanh, lambda it, x: it(x)),
    "another function": lambda: replaced(lambda x: x, lambda x: 2 * x, lambda it, x: it(x)),
    "a dtype": lambda: replaced(torch.float32, torch.float64, lambda it, x: x.to(it)),
    "a number in a list": lambda: changed([1.0], lambda it, x: x * it[0], lambda it: it.__setitem__(0, 2.0)),
    "slots": lambda: changed(Slots(), lambda it, x: x * it.rate, set_rate),
    "a method that another calls by super": lambda: changed(Overriding(), lambda it, x: it.scaled(x), set_rate),
    "a partial method": lambda: changed(Overriding(), lambda it, x: it._twice(x), set_rate),
    "an operator": lambda: changed(Scaled(), lambda it, x: x.sum() * it, set_rate),
    "attributes in a dict": lambda: changed(
        Dynamic(), lambda it, x: x * it.rate, lambda it: it._content.update(rate=2.0)
    ),
    "a dict in an object": lambda: changed(
        UserDict(rate=1.0), lambda it, x: x * it["rate"], lambda it: it.update(rate=2.0)
    ),
    "a whole number as key": lambda: changed({0: 1.0}, lambda it, x: x * it[0], lambda it: it.update({0: 2.0})),
    "a name in a variable": lambda: changed(Scaled(), lambda it, x: x * getattr(it, KEY), set_rate),
    "names in a loop": lambda: changed(
        {"rate": 1.0}, lambda it, x: sum(x * it[key] for key in ("rate",)), lambda it: it.update(rate=2.0)
    ),
}


@pytest.mark.parametrize("name", CHANGES_WITHIN)
def test_a_change_within_objects_is_read_again(name):
    read, change = CHANGES_WITHIN[name]()
    function = ft.compiled(backend="ftrain_counted_constants")(lambda state, x: (state, {"loss": read(x)}))
    state, x = torch.ones(()), torch.tensor([1.0, 2.0])
    old = function(state, x)[1]["loss"]
    assert torch.equal(old, read(x))
    change()
    expected = read(x)
    assert old.dtype != expected.dtype or not torch.equal(old, expected)
    assert function(state, x)[1]["loss"].dtype == expected.dtype
    assert torch.equal(function(state, x)[1]["loss"], expected)


def test_a_hook_reads_a_changed_number_again():
    model, settings = nn.Linear(3, 1), Settings()
    model.register_forward_hook(lambda module, inputs, output: output * settings.rate)
    constants = Constants(model)
    old = constants.values()
    assert constants.values() is old
    settings.rate = 2.0
    assert constants.values() != old


def test_equal_settings_need_no_other_graph():
    box = SimpleNamespace(settings=Frozen(), bound=float("nan"))
    constants = Constants(lambda x: x * box.settings.rate + box.bound)
    old = constants.values()
    for epoch in range(3):
        box.settings, box.bound = dataclasses.replace(box.settings, epoch=epoch), float("nan")
        assert constants.values() is old


def test_what_fails_when_it_is_read_is_not_read():
    class Failing:
        def __get__(self, owner, kind):
            raise RuntimeError("computed")

    class Owner:
        failing = Failing()

    owner = Owner()
    assert not Constants(lambda: owner.failing).values()


def test_an_object_that_fails_when_it_is_looked_at_has_no_constants():
    class Unbound:
        @property
        def __class__(self):
            raise RuntimeError("not bound")

        @property
        def __dict__(self):
            raise RuntimeError("not bound")

    unbound, rate = Unbound(), 2.0
    assert [*Constants(lambda x: x * rate if unbound is None else x).values().values()] == ["2.0"]


def test_an_object_without_settings_is_no_reason_to_search_again():
    trainer = SimpleNamespace(batch={"x": torch.ones(1)}, rate=1.0)
    assert Constants(lambda: trainer.batch["x"] * trainer.rate).values().keys() == {
        "<lambda>.trainer",
        "<lambda>.trainer.rate",
    }


def test_a_replaced_object_is_not_kept():
    box = SimpleNamespace(it=Settings())
    constants, old = Constants(lambda: box.it.rate), weakref.ref(box.it)
    constants.values()
    box.it = Settings()
    constants.values()
    gc.collect()
    assert old() is None


def test_a_number_of_the_same_name_that_the_loss_does_not_read_is_ignored_after_one_capture():
    """The names in the code of the loss say little of whose attributes they are."""
    trainer, captures = SimpleNamespace(weight=2.0, x=0), []

    def criterion(model, batch):
        captures.append(None)
        made = torch.tensor([1.0, 2.0]), torch.tensor([], dtype=torch.complex64), torch.tensor([True, False]).bfloat16()
        return (model(batch["x"]) * sum(each.sum().abs() for each in made)).square().mean() * trainer.weight

    loss = ft.from_module(Net(), criterion)
    step = ft.compiled(backend="ftrain_counted_constants", max_graphs=2)(ft.train_step(loss, ft.optim.sgd(0.1)))
    state, batch = step.init(), {"x": torch.randn(4, 3)}
    graphs.clear()
    for trainer.x in range(5):
        state, _ = step(state, batch)
    assert (len(graphs), len(captures)) == (1, 2)
    trainer.weight = 3.0
    _, metrics = step(state, batch)
    expected = loss.fn(state.params, batch, rng=None, buffers={})[0].total
    assert float(metrics["loss"]) == pytest.approx(float(expected))
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("first", "second"), [(slice(0, 1), slice(0, 2)), (range(1), range(2))], ids=["slice", "range"]
)
def test_a_slice_and_a_range_are_numbers_too(first, second):
    part = SimpleNamespace(rows=first)

    def loss(params, batch):
        rows = part.rows if isinstance(part.rows, slice) else [*part.rows]
        return (batch["x"][rows] * params["w"]).sum()

    step = ft.compiled(backend="aot_eager")(ft.train_step(loss, ft.optim.sgd(0.0)))
    state, batch = step.init({"w": torch.ones(())}), {"x": torch.tensor([1.0, 2.0])}
    assert step(state, batch)[1]["loss"] == 1.0
    part.rows = second
    assert step(state, batch)[1]["loss"] == 3.0


def test_graphs_that_make_other_tensors_are_not_the_same():
    values = {"made": [1.0, 2.0]}
    step = ft.compiled(backend="aot_eager")(
        ft.train_step(lambda params, batch: (torch.tensor(values["made"]) * params["w"]).sum(), ft.optim.sgd(0.0))
    )
    state, batch = step.init({"w": torch.ones(())}), {"x": torch.ones(1)}
    for last in (2.0, 3.0, 2.0):
        values["made"][1] = last
        assert step(state, batch)[1]["loss"] == 1.0 + last
