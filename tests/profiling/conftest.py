"""Turns that are as short as they can be: what they say is not asked here."""

import pytest

from ftrain.profiling import timing


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch):
    monkeypatch.setattr(timing, "TURN", 0.002)
