"""Directories of small checkpoints, and a damaged one."""

import pytest
import torch

import ftrain as ft

with_and_without_async = pytest.mark.parametrize("async_", [True, False], ids=["async", "sync"])


def parts_of(value):
    """Return the trees of one checkpoint, which hold the value."""
    return {"state": {"x": torch.full((3,), float(value))}, "run": {"step": value}}


def fill(directory, steps, metrics=None, **options):
    """Save a checkpoint of each step, with the metrics of some steps; return the closed `Checkpoints`."""
    with ft.Checkpoints(directory, every=1, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, parts_of(step), metrics=(metrics or {}).get(step))
    return ft.Checkpoints(directory, every=1, **options)


def damage(path):
    """Cut off the last byte of the state."""
    file = path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
