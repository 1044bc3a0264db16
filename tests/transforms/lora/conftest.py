"""Fixtures for the files of adapters, which ftrain and peft share."""

import pytest

import ftrain as ft
from tests.transforms.lora.adapter_files import without_warnings
from tests.transforms.lora.models import TARGETS, make_model, make_step, train


@pytest.fixture
def saved_adapter(tmp_path):
    """Return a step with adapters, its state after training, and the directory where the adapters are saved."""
    step = make_step(make_model(), ft.lora(3, 5, targets=TARGETS))
    state, _ = train(step)
    ft.adapters.save(tmp_path / "adapter", step, state)
    return step, state, tmp_path / "adapter"


@pytest.fixture(scope="module")
def peft():
    with without_warnings():
        return pytest.importorskip("peft", reason="peft computes what ftrain is compared with")
