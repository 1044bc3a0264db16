"""Turns that are as short as they can be, and no collection before them: what they say is not asked here."""

import types

import pytest

from ftrain.profiling import timing


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    monkeypatch.setattr(timing, "TURN", 0.002)
    monkeypatch.setattr(timing, "gc", types.SimpleNamespace(collect=int))
