"""Leave out garbage collection when memory runs out: it takes longer than a whole run of these tests."""

import types

import pytest


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    monkeypatch.setattr("ftrain.backends.oom.gc", types.SimpleNamespace(collect=int))
