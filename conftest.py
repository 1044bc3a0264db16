"""Hides GPUs from the tests, and collects the Markdown pages, so that `pytest README.md docs` runs their code."""

import gc
import os
import signal

import pytest
import torch

from tests.pages import Page

torch.set_num_threads(1)

# Torch, its compiler and the trees of the tests are a million objects: to look through them as often as Python does by
# itself is a tenth of the time that the tests take.
gc.set_threshold(20_000, 20, 20)

# A shell starts what runs in the background (`make test &`) with this signal ignored; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Hide GPUs, which would be the default device, unless the user chose some or asks for the tests of a GPU."""
    if not any("test_cuda.py" in argument for argument in config.args):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


def pytest_collect_file(file_path, parent):
    """Return the page when the file is one; its Python blocks are one test."""
    return Page.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None


def pytest_collection_modifyitems(items):
    """Refuse tests whose name has an address in it: two processes would collect different ones."""
    named = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if named:
        raise pytest.UsageError(f"give these tests ids= that do not change: {named[0]}")
