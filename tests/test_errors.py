"""Where warnings point, and which rank logs."""

import warnings
from pathlib import Path

import pytest

import ftrain as ft
from ftrain.errors import warn

OF_THE_PACKAGE = """
import contextlib
import torch
from ftrain.errors import warn

def plainly():
    warn("found")

@contextlib.contextmanager
def at_exit():
    yield
    warn("found")

def in_torch():
    torch.vmap(lambda row: warn("found") or row)(torch.ones(2))
"""


@pytest.fixture
def package():
    """Functions that warn, as if they were in a file of the package."""
    names = {}
    exec(compile(OF_THE_PACKAGE, Path(ft.__file__).with_name("warning.py"), "exec"), names)
    return names


def test_a_warning_points_at_the_users_line(package):
    def here():
        warn("found")

    def plainly():
        package["plainly"]()

    def in_torch():
        package["in_torch"]()

    def at_exit():
        with package["at_exit"]():
            pass

    for call in (here, plainly, in_torch, at_exit):
        with pytest.warns(UserWarning, match="found") as caught:
            call()
        (one,) = caught
        assert (one.filename, one.lineno) == (__file__, call.__code__.co_firstlineno + 1), call.__name__


def test_a_line_warns_once_by_default():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("found")
    assert len(caught) == 1


def test_of_many_ranks_the_first_logs_what_all_know(caplog, monkeypatch):
    for rank in (None, "0", "1", "7"):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        ft.errors.log_on_first_rank("of %s", rank)
    assert caplog.messages == ["of None", "of 0"]
