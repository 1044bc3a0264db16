"""`empty_cache(every=)`: after which steps, said once where there is none, and nothing else changes."""

import dataclasses
import logging

import pytest
import torch

import ftrain as ft
from ftrain.backends import registry
from ftrain.errors import ComposeError


@pytest.fixture
def emptied(monkeypatch):
    """A CPU with a cache: at which steps it is emptied."""
    calls = []
    record = dataclasses.replace(ft.backends.get("cpu"), empty_cache=lambda: calls.append("emptied"))
    monkeypatch.setattr(registry, "_records", {**registry._records, "cpu": record})
    return calls


def make(*wrappers):
    return ft.compose(ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1)), *wrappers)


def run(step, state, steps):
    actual = []
    for _ in range(steps):
        state, _ = step(state, torch.ones(3))
        actual.append(int(state.step))
    return state, actual


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("wrappers", [(), (ft.donated(),), (ft.compiled(backend="eager"),)])
def test_after_every_nth_step_of_the_state(emptied, every, wrappers):
    step = make(ft.empty_cache(every), *wrappers)
    state = step.init({"w": torch.ones(3)})
    for count in range(1, 8):
        before = len(emptied)
        state, _ = run(step, state, 1)
        assert len(emptied) - before == (count % every == 0)
    other = make(ft.empty_cache(every=every), *wrappers)
    resumed = other.init({"w": torch.ones(3)})
    resumed = dataclasses.replace(resumed, step=torch.tensor(every - 1))
    emptied.clear()
    run(other, resumed, 1)
    assert emptied == ["emptied"]


def test_when_the_step_is_done(emptied):
    seen = []

    def loss(params, batch):
        seen.append(len(emptied))
        return (params["w"] * batch).sum()

    step = ft.empty_cache(1)(ft.train_step(loss, ft.optim.sgd(0.1)))
    run(step, step.init({"w": torch.ones(3)}), 3)
    assert seen == [0, 1, 2]


def test_a_step_that_fails_empties_nothing(emptied):
    def loss(params, batch):
        raise ZeroDivisionError

    step = ft.empty_cache(1)(ft.train_step(loss, ft.optim.sgd(0.1)))
    with pytest.raises(ZeroDivisionError):
        run(step, step.init({"w": torch.ones(3)}), 1)
    assert emptied == []


def test_a_device_without_a_cache_is_said_once(caplog):
    step = make(ft.empty_cache(1))
    with caplog.at_level(logging.WARNING, logger="ftrain"):
        state, actual = run(step, step.init({"w": torch.ones(3)}), 3)
        step.init({"w": torch.ones(3)})
        ft.fit(step, state, [torch.ones(3)] * 2, progress=False)
    said = [record.getMessage() for record in caplog.records]
    assert actual == [1, 2, 3]
    assert len(said) == 1
    assert said[0].startswith("empty_cache: does nothing on ")


def test_it_is_printed_and_applied_once():
    step = make(ft.empty_cache(5), ft.donated())
    assert repr(step).endswith("step    eager(donate) <- empty_cache(every=5)")
    with pytest.raises(ComposeError, match="already has the wrapper empty_cache"):
        ft.empty_cache(2)(step)
    with pytest.raises(ComposeError, match="needs the argument every"):
        ft.empty_cache(step)
