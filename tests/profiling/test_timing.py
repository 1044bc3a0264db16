"""Turns, intervals, and sources of data: what is counted, and what happens to who fails."""

import dataclasses
import itertools
import math
import statistics
import types

import pytest
import torch

import ftrain as ft
from ftrain.errors import DataError
from ftrain.profiling import timing
from ftrain.profiling.timing import Interval, Loading, Racer, interval, loading, race
from tests.profiling.problem import batch, make

HOST = torch.device("cpu")


def test_an_interval_holds_the_median_as_often_as_it_says():
    draw = torch.Generator().manual_seed(0)
    for count in (6, 9, 15, 30):
        samples = torch.rand(4000, count, generator=draw).exp().tolist()
        held = sum(each.low <= math.exp(0.5) <= each.high for each in map(interval, samples)) / len(samples)
        assert held > 0.94, count
    assert interval([2.0]) == Interval(2.0, 2.0, 2.0)
    assert interval([3.0, 1.0]) == Interval(1.0, 2.0, 3.0)


class Scripted(Racer):
    """A racer that notes its turns."""

    def __init__(self, name, calls, *outcomes):
        self.name, self.said, self.outcomes, self.device = (
            name,
            calls,
            itertools.chain(outcomes, itertools.repeat(1.0)),
            HOST,
        )
        self.closed, self._state, self._needs = 0, None, 0

    def turn(self):
        self.said.append(self.name)
        outcome = next(self.outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self):
        self.closed += 1


def never(name, error):
    return False


def always(name, error):
    return True


def test_racers_take_turns_back_and_forth_and_the_first_round_does_not_count():
    calls = []
    racers = {name: Scripted(name, calls, 9.0, 1.0, 2.0, 3.0) for name in "abc"}
    seconds = race(racers, 3, is_result=never)
    assert "".join(calls) == "abccbaabccba"
    assert seconds == {name: [1.0, 2.0, 3.0] for name in "abc"}
    assert all(racer.closed == 1 for racer in racers.values())


def test_out_of_memory_is_tried_again_when_the_others_have_given_theirs_back():
    calls, oom = [], torch.OutOfMemoryError("on purpose")
    racers = {"a": Scripted("a", calls), "b": Scripted("b", calls, oom)}
    assert race(racers, 1, is_result=never) == {"a": [1.0], "b": [1.0]}
    assert "".join(calls) == "abbba"
    assert racers["a"].closed == 2


def test_who_runs_out_of_memory_alone_is_out_and_the_others_go_on():
    calls, oom = [], torch.OutOfMemoryError("on purpose")
    racers = {"a": Scripted("a", calls), "b": Scripted("b", calls, oom, oom)}
    actual = race(racers, 2, is_result=always)
    assert actual["a"] == [1.0, 1.0]
    assert actual["b"] is oom
    assert "".join(calls) == "abbaa"


def test_states_that_do_not_fit_beside_each_other_come_one_after_the_other(monkeypatch):
    """A host that runs out of memory says nothing: the kernel ends the process."""
    total, most, alive = 100, [0], {}

    class Large(Scripted):
        def turn(self):
            alive[self.name] = self._needs
            most[0] = max(most[0], sum(alive.values()))
            self._state = self
            return super().turn()

        def close(self):
            super().close()
            alive.pop(self.name, None)
            self._state = None

    record = dataclasses.replace(ft.backends.get("cpu"), free=lambda: total - sum(alive.values()))
    monkeypatch.setitem(ft.backends.registry._records, "cpu", record)
    racers = {name: Large(name, []) for name in "abc"}
    for racer, needs in zip(racers.values(), (40, 50, 60), strict=True):
        racer._needs, racer._state = needs, None
    actual = race(racers, 2, is_result=never)
    assert actual == {name: [1.0, 1.0] for name in "abc"}
    assert most[0] == 90  # The first two stay beside each other.


def test_errors_that_are_no_results_are_raised():
    racers = {"a": Scripted("a", [], ValueError("broken"))}
    with pytest.raises(ValueError, match="broken"):
        race(racers, 1, is_result=never)
    assert isinstance(race({"a": Scripted("a", [], ValueError("broken"))}, 1, is_result=always)["a"], ValueError)


def test_a_racer_runs_on_a_state_of_its_own_and_fills_its_turns(monkeypatch):
    monkeypatch.setattr(timing, "TURN", 0.1)
    clock = itertools.count()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: next(clock) * 0.02))
    step, states = make(), []

    def begin():
        states.append(step.init())
        return states[-1]

    calls = []

    def counted(state, batch):
        calls.append(int(state.step))
        return step(state, batch)

    racer = Racer(counted, begin, batch(4), HOST)
    # A step takes 0.02 s by that clock, so that five of them fill a turn.
    assert racer.turn() == pytest.approx(0.02 / 5)
    assert calls == list(range(timing.WARM_UP + 1 + 5))
    racer.turn()
    assert len(states) == 1
    racer.close()
    racer.turn()
    assert len(states) == 2
    assert calls[-timing.WARM_UP - 5 :] == list(range(timing.WARM_UP + 5))
    assert int(states[0].step) == 0


def test_a_source_of_data_is_left_where_it_was():
    data = ft.data.loader(ft.data.arrays(batch(64)), 8, seed=0)
    batches = iter(data)
    next(batches)
    data.load_state_dict(data.state_dict())
    before = data.state_dict()
    step = make()
    actual = loading(step, step.init(), data, HOST)
    assert data.state_dict() == before
    assert min(actual) > 0


def test_shuffled_data_of_torch_takes_no_random_number_of_the_program():
    rows = batch(64)
    data = torch.utils.data.DataLoader(torch.utils.data.StackDataset(**rows), 8, shuffle=True)
    step, before = make(), torch.get_rng_state()
    loading(step, step.init(), data, HOST)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_source_of_data_is_left_where_it_was_when_a_step_fails():
    data = ft.data.loader(ft.data.arrays(batch(64)), 8, seed=0)
    data.load_state_dict({**data.state_dict(), "batch": 3})
    before, runs = data.state_dict(), itertools.count()

    def step(state, batch):
        if next(runs) == timing.WARM_UP + 2:
            raise ZeroDivisionError
        return state, {}

    with pytest.raises(ZeroDivisionError):
        loading(step, None, data, HOST)
    assert data.state_dict() == before


def test_how_long_the_device_waits():
    assert Loading(1.0, 3.0, 4.0).waiting == 0.25
    assert Loading(1.0, 4.0, 3.9).waiting == 0.0
    # What the machine did beside it was not the data.
    assert Loading(0.1, 4.0, 5.0).waiting == pytest.approx(0.02)


def test_the_parts_of_loading_are_told_apart(monkeypatch):
    """By a clock that goes on where work is done, and nowhere else."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(list):
        def __iter__(self):
            for each in list.__iter__(self):
                now[0] += 2.0
                yield each

    def step(state, batch):
        now[0] += 3.0
        return state, {}

    actual = loading(step, None, Slow([batch(2)] * 5), HOST)
    assert actual == pytest.approx(Loading(alone=2.0, ready=3.0, together=5.0))
    assert actual.waiting == pytest.approx(0.4)


@pytest.mark.parametrize("data", [iter([1, 2]), (each for each in (1, 2)), 3, []])
def test_data_that_cannot_be_timed(data):
    with pytest.raises(DataError, match=r"data is|data has fewer than two"):
        loading(make(), None, data, HOST)


def test_statistics_are_those_of_python():
    assert interval([5.0, 1.0, 4.0]).median == statistics.median([5.0, 1.0, 4.0])
