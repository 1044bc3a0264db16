"""`empty_cache(every=)`: after which steps, logged once where there is none, and nothing else changes."""

import dataclasses
import logging

import pytest
import torch

import ftrain as ft
from ftrain.backends import registry
from ftrain.errors import ComposeError


@pytest.fixture
def calls(monkeypatch):
    """The calls that empty the cache of the CPU, which has one in this test."""
    calls = []
    record = dataclasses.replace(ft.backends.get("cpu"), empty_cache=lambda: calls.append("empty_cache"))
    monkeypatch.setattr(registry, "_records", {**registry._records, "cpu": record})
    return calls


def product_sum(params, batch):
    return (params["w"] * batch).sum()


def make_step(*wrappers, loss=product_sum):
    return ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)


def init_state(step):
    return step.init({"w": torch.ones(3)})


def train(step, state, steps=1):
    for _ in range(steps):
        state, _ = step(state, torch.ones(3))
    return state


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("wrappers", [(), (ft.donated(),), (ft.compiled(backend="eager"),)])
def test_the_cache_is_emptied_after_every_nth_step_of_the_state(calls, every, wrappers):
    step = make_step(ft.empty_cache(every), *wrappers)
    state = init_state(step)
    for count in range(1, 8):
        calls.clear()
        state = train(step, state)
        assert len(calls) == (count % every == 0)
    # In a resumed run the number of the state counts, and not that of the steps since the start.
    resumed_step = make_step(ft.empty_cache(every), *wrappers)
    resumed = dataclasses.replace(init_state(resumed_step), step=torch.tensor(every - 1))
    calls.clear()
    train(resumed_step, resumed)
    assert len(calls) == 1


def test_the_cache_is_emptied_when_the_step_is_done(calls):
    calls_before_each_step = []

    def loss(params, batch):
        calls_before_each_step.append(len(calls))
        return product_sum(params, batch)

    step = make_step(ft.empty_cache(1), loss=loss)
    train(step, init_state(step), 3)
    assert calls_before_each_step == [0, 1, 2]


def test_a_step_that_fails_does_not_empty_the_cache(calls):
    def failing_loss(params, batch):
        raise ZeroDivisionError

    step = make_step(ft.empty_cache(1), loss=failing_loss)
    with pytest.raises(ZeroDivisionError):
        train(step, init_state(step))
    assert not calls


def test_on_a_device_without_a_cache_it_does_nothing_and_logs_that_once(caplog):
    step = make_step(ft.empty_cache(1))
    with caplog.at_level(logging.WARNING, logger="ftrain"):
        state = train(step, init_state(step), 3)
        init_state(step)
        state, _ = ft.fit(step, state, [torch.ones(3)] * 2, progress=False)
    assert int(state.step) == 5
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("empty_cache: does nothing on ")


def test_it_is_printed_and_applied_once():
    step = make_step(ft.empty_cache(5), ft.donated())
    assert repr(step).endswith("step    eager(donate) <- empty_cache(every=5)")
    with pytest.raises(ComposeError, match="already has the wrapper empty_cache"):
        ft.empty_cache(2)(step)
    with pytest.raises(ComposeError, match="needs the argument every"):
        ft.empty_cache(step)
