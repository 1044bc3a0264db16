"""The fixture that replaces the record of the CPU by that of a device with fewer abilities."""

import dataclasses

import pytest

import ftrain as ft

MISSING = {"unfused": {"fused_optimizers": False}, "unread": {"fused_optimizers": False, "immediate": False}}


@pytest.fixture
def pretend(monkeypatch):
    """Return a function that registers, for a path of an update, a CPU without the abilities in `MISSING`.

    `unfused` has no fused kernels; `unread` in addition has values that must not be read during the step.
    For every other path the CPU is as it is.
    """

    def apply(path):
        backend = dataclasses.replace(ft.backends.get("cpu"), **MISSING.get(path, {}))
        monkeypatch.setattr(ft.backends.registry, "_records", {"cpu": backend})

    return apply
