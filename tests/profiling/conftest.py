"""Make races short for these tests, which do not depend on the measured times."""

import types

import pytest

from ftrain.profiling import timing


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    monkeypatch.setattr(timing, "TURN", 0.002)
    monkeypatch.setattr(timing, "gc", types.SimpleNamespace(collect=int))
