"""Pretends that the CPU is less than it is."""

import dataclasses

import pytest

import ftrain as ft

LESS = {"unfused": {"fused_optimizers": False}, "unread": {"fused_optimizers": False, "immediate": False}}


@pytest.fixture
def pretend(monkeypatch):
    """Makes of the record of the CPU one without fused kernels, and one whose values are not to be read."""

    def apply(path):
        backend = dataclasses.replace(ft.backends.get("cpu"), **LESS.get(path, {}))
        monkeypatch.setattr(ft.backends.registry, "_records", {"cpu": backend})

    return apply
