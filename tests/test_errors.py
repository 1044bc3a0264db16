"""The classes of errors, the line that a warning names, the rank that logs, and the values of flags and numbers."""

import inspect
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain.errors import FtrainError, OptionError, warn

PACKAGE_FILE = """
import contextlib
import torch
from ftrain.errors import OptionError, warn

def plainly():
    warn("careful")

@contextlib.contextmanager
def at_exit():
    yield
    warn("careful")

def in_torch():
    torch.vmap(lambda row: warn("careful") or row)(torch.ones(2))
"""


@pytest.fixture
def package():
    """Return functions that warn, by name, as if a file of the package defined them."""
    functions = {}
    exec(compile(PACKAGE_FILE, Path(ft.__file__).with_name("warning.py"), "exec"), functions)
    return functions


def test_a_warning_points_at_the_users_line(package):
    def directly():
        warn("careful")

    def plainly():
        package["plainly"]()

    def in_torch():
        package["in_torch"]()

    def at_exit():
        with package["at_exit"]():
            pass

    for call in (directly, plainly, in_torch, at_exit):
        with pytest.warns(UserWarning, match="careful") as caught:
            call()
        (warning,) = caught
        assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno + 1), call.__name__


def test_a_line_that_warns_again_is_shown_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("careful")
    assert len(caught) == 1


def test_only_the_first_rank_logs(caplog, monkeypatch):
    for rank in (None, "0", "1", "7"):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        ft.errors.log_on_first_rank("of %s", rank)
    assert caplog.messages == ["of None", "of 0"]


FLAGS = {
    "stochastic_rounding": lambda value: ft.optim.adamw(1e-3, stochastic_rounding=value),
    "nesterov": lambda value: ft.optim.muon(1e-3, nesterov=value),
    "decoupled_weight_decay": lambda value: ft.optim.radam(1e-3, decoupled_weight_decay=value),
    "allow_unused": lambda value: ft.train_step(lambda params, batch: params, ft.optim.sgd(1e-3), allow_unused=value),
    "donate": lambda value: ft.compiled(donate=value),
    "replay": lambda value: ft.compiled(replay=value),
    "dora": lambda value: ft.lora(2, targets=["*"], dora=value),
    "watch": lambda value: ft.with_amp("bf16", watch=value),
    "drop_last": lambda value: ft.data.loader([1, 2], 2, drop_last=value),
    "cut": lambda value: ft.data.packed(4, cut=value),
    "async_": lambda value: ft.Checkpoints("runs", every=1, async_=value),
}


def test_a_flag_of_a_measurement_or_a_run_must_be_a_bool(tmp_path):
    step = ft.train_step(lambda params, batch: (params * batch).sum(), ft.optim.sgd(0.1))
    state, batch = step.init(torch.ones(2)), torch.ones(2)
    calls = {
        "progress": lambda: ft.fit(step, state, [batch], progress="no"),
        "measure": lambda: ft.anatomy(step, state, batch, measure="no"),
        "stacked": lambda: ft.ladder(step, state, batch, stacked="no"),
        "best": lambda: ft.Checkpoints(tmp_path, every=1, best="loss").latest(best="no"),
    }
    for name, call in calls.items():
        with pytest.raises(OptionError, match=f"{name} is 'no', needs True or False"):
            call()


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_a_factory_must_be_a_bool(name):
    for value in (True, False, np.True_):
        FLAGS[name](value)
    with pytest.raises(OptionError, match=f"{name} is 'no', needs True or False"):
        FLAGS[name]("no")


def test_numbers_of_numpy_are_taken_as_those_of_python():
    def step(number):
        optimizer = ft.optim.adamw(number(0.25), b1=number(0.9), b2=number(0.999), weight_decay=number(0.1))
        base = ft.train_step(lambda params, batch: (params["w"] * batch).square().sum(), optimizer)
        return ft.compose(base, ft.clip(number(0.5)), ft.ema(number(0.9)), ft.accumulate(2))

    def trained(step):
        state = step.init({"w": torch.ones(3)})
        for _ in range(3):
            state, _ = step(state, torch.ones(4, 3))
        return state

    actual, expected = step(np.float32), step(lambda value: float(np.float32(value)))
    assert repr(actual) == repr(expected)
    for a, b in zip(ft.tree.leaves(trained(actual)), ft.tree.leaves(trained(expected)), strict=True):
        assert torch.equal(a, b)
    assert repr(ft.clip(np.int64(1))) == repr(ft.clip(1))
    assert len(ft.data.loader([1, 2], 2, num_workers=np.int64(0), timeout=np.float32(9))) == 1


def test_errors_are_also_builtin_errors():
    builtins = {
        "ComposeError": TypeError,
        "OptionError": ValueError,
        "RankError": RuntimeError,
        "LossError": ValueError,
        "BatchError": ValueError,
        "StructureError": ValueError,
        "ConsumedError": RuntimeError,
        "DeviceError": RuntimeError,
        "DataError": ValueError,
        "NonFiniteError": ArithmeticError,
        "TraceError": RuntimeError,
        "CheckpointError": RuntimeError,
        "UnreachableError": RuntimeError,
        "VersionError": ImportError,
    }
    classes = {name: value for name, value in vars(ft.errors).items() if inspect.isclass(value)}
    assert {name for name in classes if name.endswith("Error")} == {"FtrainError", *builtins}
    for name, builtin in builtins.items():
        assert issubclass(classes[name], FtrainError)
        assert issubclass(classes[name], builtin)


def test_an_error_that_fit_did_not_raise_has_no_result():
    assert FtrainError("x").result is None
