"""Short races, whose measured times the tests do not depend on; and ladders and trials whose times are given."""

import types

import pytest

import ftrain as ft
from ftrain.profiling import ladder, timing, tuning
from ftrain.profiling.comparison import Original
from tests.profiling.problem import scripted, with_cache


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    monkeypatch.setattr(timing, "TURN", 0.002)
    monkeypatch.setattr(timing, "gc", types.SimpleNamespace(collect=int))


def predict(function, step, state, batch):
    """Stand in for `anatomy_for`, with a cache."""
    return with_cache(ft.anatomy)(step, state, batch, measure=False)


@pytest.fixture
def timed_ladder(monkeypatch):
    """Return a `ft.ladder` with given times, without hints, and with predicted memory unless `measured`."""

    def run(step, inputs, times=None, *, measured=False, state=None, **options):
        monkeypatch.setattr(ladder.run, "race", scripted(times or {}))
        monkeypatch.setattr(ladder.run, "anatomy_for", predict)
        monkeypatch.setattr(ladder.run, "run_rules", lambda facts: [])
        if not measured:
            monkeypatch.setattr(Original, "measured_peak", lambda self, variant, batch, at_rest: None)
        return ft.ladder(step, state or step.init(), inputs, **{"rounds": 3, **options})

    return run


@pytest.fixture
def timed_trials(monkeypatch):
    """Return a `ft.trials` without hints, whose times are given for texts that the printed step contains."""

    def run(step, inputs, times=None, *, state=None, **options):
        def time_of(name, racer):
            text = " ".join(str(racer._step).split())
            return next((result for part, result in (times or {}).items() if part in text), 1.0)

        monkeypatch.setattr(tuning.run, "race", scripted(time_of))
        monkeypatch.setattr(tuning.run, "measured_hints", lambda *args, **options: [])
        for module in (tuning.run, tuning.search):
            monkeypatch.setattr(module, "anatomy_for", predict)
        return ft.trials(step, state or step.init(), inputs, **options)

    return run
