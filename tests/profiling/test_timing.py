"""Races between steps, confidence intervals, and the timing of data."""

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


def test_an_interval_holds_the_median_in_95_percent_of_samples():
    draw = torch.Generator().manual_seed(0)
    for count in (6, 9, 15, 30):
        samples = torch.rand(4000, count, generator=draw).exp().tolist()
        intervals = [interval(sample) for sample in samples]
        covered = sum(low <= math.exp(0.5) <= high for low, _, high in intervals)
        assert covered / len(samples) > 0.94, count
    assert interval([2.0]) == Interval(2.0, 2.0, 2.0)
    assert interval([3.0, 1.0]) == Interval(1.0, 2.0, 3.0)


class Scripted(Racer):
    """A racer with given results: seconds or errors, and then 1 second; adds its name to `calls` in each turn."""

    def __init__(self, name, calls, *outcomes):
        self.name, self.calls, self.device = name, calls, HOST
        self.outcomes = itertools.chain(outcomes, itertools.repeat(1.0))
        self.closed, self._state, self._needs = 0, None, 0

    def turn(self):
        self.calls.append(self.name)
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


def test_every_second_round_is_in_reverse_order_and_the_first_round_does_not_count():
    calls = []
    racers = {name: Scripted(name, calls, 9.0, 1.0, 2.0, 3.0) for name in "abc"}
    seconds = race(racers, 3, is_result=never)
    assert "".join(calls) == "abccbaabccba"
    assert seconds == {name: [1.0, 2.0, 3.0] for name in "abc"}
    assert all(racer.closed == 1 for racer in racers.values())


def test_a_racer_that_runs_out_of_memory_tries_again_after_the_others_release_theirs():
    calls, oom = [], torch.OutOfMemoryError("on purpose")
    racers = {"a": Scripted("a", calls), "b": Scripted("b", calls, oom)}
    assert race(racers, 1, is_result=never) == {"a": [1.0], "b": [1.0]}
    assert "".join(calls) == "abbba"
    assert racers["a"].closed == 2


def test_a_racer_that_runs_out_of_memory_alone_is_out_and_the_others_go_on():
    calls, oom = [], torch.OutOfMemoryError("on purpose")
    racers = {"a": Scripted("a", calls), "b": Scripted("b", calls, oom, oom)}
    results = race(racers, 2, is_result=always)
    assert results["a"] == [1.0, 1.0]
    assert results["b"] is oom
    assert "".join(calls) == "abbaa"


def test_states_that_do_not_fit_together_are_not_in_memory_together(monkeypatch):
    """A host that runs out of memory raises no error: its kernel kills the process."""
    total, peaks, alive = 100, [], {}

    class Large(Scripted):
        def turn(self):
            alive[self.name] = self._needs
            peaks.append(sum(alive.values()))
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
    assert max(peaks) == 90  # The first two fit together.


def test_an_error_is_raised_unless_it_is_a_result():
    racers = {"a": Scripted("a", [], ValueError("broken"))}
    with pytest.raises(ValueError, match="broken"):
        race(racers, 1, is_result=never)
    assert isinstance(race({"a": Scripted("a", [], ValueError("broken"))}, 1, is_result=always)["a"], ValueError)


def test_a_racer_has_its_own_state_and_runs_as_many_steps_as_fill_a_turn(monkeypatch):
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
    # The clock goes on by 0.02 s per reading, so the first step seems to take 0.02 s, and five of them fill a turn.
    assert racer.turn() == pytest.approx(0.02 / 5)
    assert calls == list(range(timing.WARM_UP + 1 + 5))
    racer.turn()
    assert len(states) == 1
    racer.close()
    racer.turn()
    assert len(states) == 2
    assert calls[-timing.WARM_UP - 5 :] == list(range(timing.WARM_UP + 5))
    assert int(states[0].step) == 0


def test_timing_restores_the_position_of_the_data():
    data = ft.data.loader(ft.data.arrays(batch(64)), 8, seed=0)
    batches = iter(data)
    next(batches)
    data.load_state_dict(data.state_dict())
    before = data.state_dict()
    step = make()
    actual = loading(step, step.init(), data, HOST)
    assert data.state_dict() == before
    assert min(actual) > 0


def test_timing_restores_the_random_state_that_a_shuffle_of_torch_changes():
    rows = batch(64)
    data = torch.utils.data.DataLoader(torch.utils.data.StackDataset(**rows), 8, shuffle=True)
    step, before = make(), torch.get_rng_state()
    loading(step, step.init(), data, HOST)
    assert torch.equal(torch.get_rng_state(), before)


def test_timing_restores_the_position_of_the_data_when_a_step_fails():
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


def test_the_share_of_the_time_that_the_device_waits():
    assert Loading(1.0, 3.0, 4.0).waiting == 0.25
    assert Loading(1.0, 4.0, 3.9).waiting == 0.0
    # The rest of the slowdown is other work of the machine: loading alone takes only 2% of the time.
    assert Loading(0.1, 4.0, 5.0).waiting == pytest.approx(0.02)


def test_loading_times_the_data_the_step_and_both(monkeypatch):
    """With a clock that only the data and the step advance."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(list):
        def __iter__(self):
            for item in list.__iter__(self):
                now[0] += 2.0
                yield item

    def step(state, batch):
        now[0] += 3.0
        return state, {}

    actual = loading(step, None, Slow([batch(2)] * 5), HOST)
    assert actual == pytest.approx(Loading(alone=2.0, ready=3.0, together=5.0))
    assert actual.waiting == pytest.approx(0.4)


@pytest.mark.parametrize("data", [iter([1, 2]), (number for number in (1, 2)), 3, []])
def test_data_that_cannot_be_timed_is_refused(data):
    with pytest.raises(DataError, match=r"data is|data has fewer than two"):
        loading(make(), None, data, HOST)


def test_the_median_is_that_of_python():
    assert interval([5.0, 1.0, 4.0]).median == statistics.median([5.0, 1.0, 4.0])
