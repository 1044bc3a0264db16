"""Resuming: a run that was interrupted at any step has the bits of an uninterrupted run."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain.checkpoint import files
from ftrain.errors import CheckpointError, ConsumedError
from tests.training.interrupted_runs import (
    EVERY,
    STEPS,
    Positioned,
    assert_results_equal,
    batches,
    fit,
    fit_until_killed,
    make,
)

STACKS = {
    "plain": (),
    "ema-clip": (ft.clip(1.0), ft.ema(0.9)),
    "fp16-skip-accumulate": (ft.with_amp("fp16"), ft.accumulate(2), ft.skip_nonfinite(), ft.ema(0.9)),
    "compiled": (ft.clip(1.0), ft.compiled(backend="eager")),
    "remat-donated": (ft.remat(blocks=[nn.Linear]), ft.donated()),
}


@pytest.mark.parametrize(("stack", "data_class"), [("plain", list), *((stack, Positioned) for stack in STACKS)])
def test_a_run_in_pieces_is_the_whole_run(stack, data_class, tmp_path):
    expected = fit(make(*STACKS[stack]), data_class(batches()))
    # One step for all pieces: it holds no state of the run, and compiling it takes longer than the run.
    step = make(*STACKS[stack])
    # Before the first save, right after one, within a pass, at the end of a pass.
    for at in (2, 3, 8, 10, 11):
        fit_until_killed(step, data_class(batches()), at, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    actual = fit(step, data_class(batches()), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_results_equal(actual, expected)
    assert actual.history.stopped == "steps"


def test_a_finished_run_is_only_read_and_makes_no_step(tmp_path):
    expected = fit(make(), Positioned(batches()), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    data = Positioned(batches())
    actual = fit(make(), data, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_results_equal(actual, expected)
    assert data.read == 0


def test_a_finished_run_goes_on_to_more_steps(tmp_path):
    fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    actual = fit(make(), batches(), steps=STEPS + 4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_results_equal(actual, fit(make(), batches(), steps=STEPS + 4))


def test_a_plain_function_resumes_too(tmp_path):
    generator, critic = make(), make(ft.clip(1.0))

    def train_both(states, batch):
        generator_state, metrics = generator(states["generator"], batch)
        critic_state, _ = critic(states["critic"], batch)
        return {"generator": generator_state, "critic": critic_state}, {"loss": metrics["loss"]}

    def start():
        return {"generator": generator.init(seed=1), "critic": critic.init(seed=2)}

    expected = fit(train_both, batches(), start(), steps=8)
    fit_until_killed(train_both, batches(), 5, state=start(), steps=8, checkpoints=ft.Checkpoints(tmp_path, every=2))
    actual = fit(train_both, batches(), start(), steps=8, checkpoints=ft.Checkpoints(tmp_path, every=2))
    assert_results_equal(actual, expected)


def test_an_error_in_a_step_leaves_the_last_checkpoint(tmp_path):
    with_wrong_shape = batches()
    with_wrong_shape[4] = torch.ones(4, 9)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        fit(make(), with_wrong_shape, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    actual = fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_results_equal(actual, fit(make(), batches()))


class FailedError(Exception):
    """Raised by one of the functions that are arguments of `fit`."""


FAILING = {
    "logger": (5, lambda record: record["step"]),
    "evaluate": (4, lambda state: int(state.step)),
    "stop": (4, lambda history: history[-1]["step"]),
    "adapt": (4, lambda state, history: int(state.step)),
}
"""Argument of `fit` -> the step after which it fails, and how it knows the step from its arguments."""


@pytest.mark.parametrize("failing_part", FAILING)
def test_an_error_between_steps_loses_nothing(failing_part, tmp_path):
    """The step is saved, and the resumed run makes the calls that were missing after it."""
    rule = ft.schedules.reduce_on_plateau(factor=0.5, patience=0)
    at, step_of = FAILING[failing_part]

    def run(directory=None, *, fails=False):
        def may_fail(name, function):
            def call(*args):
                if fails and name == failing_part and step_of(*args) == at:
                    raise FailedError
                return function(*args)

            return call

        checkpoints, loggers = None, [may_fail("logger", lambda record: None)]
        if directory is not None:
            checkpoints = ft.Checkpoints(directory / "run", every=7)
            loggers.append(ft.loggers.jsonl(directory / "log.jsonl"))
        return fit(
            make(optimizer=ft.optim.adjustable(ft.optim.adamw(0.05))),
            Positioned(batches()),
            log_every=5,
            evaluate=may_fail("evaluate", lambda state: {"score": float(-(state.step % 3))}),
            evaluate_every=2,
            stop=may_fail("stop", ft.patience("eval_score", 3)),
            adapt=may_fail("adapt", ft.plateau("eval_score", rule)),
            loggers=loggers,
            checkpoints=checkpoints,
        )

    expected = run()
    # The rate falls and the run stops early, so that both calls matter.
    assert len(set(expected.history["lr"])) > 2
    assert expected.history.stopped == "patience(eval_score)"
    with pytest.raises(FailedError) as caught:
        run(tmp_path, fails=True)
    assert caught.value.result.history[-1]["step"] == at
    assert ft.Checkpoints(tmp_path / "run", every=7).steps() == [at]
    actual = run(tmp_path)
    assert_results_equal(actual, expected)
    assert actual.history.stopped == expected.history.stopped
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows == list(actual.history)


@pytest.mark.parametrize("steps", [EVERY, EVERY + 1])
def test_a_disk_that_is_full_at_the_end_loses_nothing(steps, tmp_path, monkeypatch):
    step = make()
    monkeypatch.setattr(files, "free_bytes", lambda path: 10)
    with pytest.raises(CheckpointError, match="10 are free") as caught:
        ft.fit(step, step.init(), batches(), steps=steps, checkpoints=ft.Checkpoints(tmp_path / "run", every=EVERY))
    assert int(caught.value.result.state.step) == steps
    assert len(caught.value.result.history["loss"]) == steps


def test_early_stopping_and_the_best_go_on(tmp_path):
    values = [5.0, 3.0, 4.0, 4.5, 3.5, 1.0]

    def evaluate(state):
        return {"eval_loss": values[int(state.step) // 2 - 1]}

    options = {"evaluate": evaluate, "evaluate_every": 2, "stop": ft.patience("eval_loss", 3)}
    expected = fit(make(), batches(), **options)
    assert expected.history.stopped == "patience(eval_loss)"
    assert expected.history["eval_loss"] == values[:5]

    def checkpoints():
        return ft.Checkpoints(tmp_path, every=2, keep=1, best="eval_loss")

    fit_until_killed(make(), batches(), 7, checkpoints=checkpoints(), **options)
    actual = fit(make(), batches(), checkpoints=checkpoints(), **options)
    assert_results_equal(actual, expected)
    assert actual.history.stopped == "patience(eval_loss)"
    assert checkpoints().steps() == [4, 10]
    assert checkpoints().latest(best=True).step == 4
    after_the_end = fit(make(), batches(), checkpoints=checkpoints(), **options)
    assert_results_equal(after_the_end, expected)


def addresses(state):
    return [leaf.data_ptr() for leaf in ft.tree.leaves((state.params, state.buffers, state.opt_state))]


def test_a_resumed_state_takes_the_memory_of_a_new_state_that_is_passed(tmp_path):
    expected = fit(make(), batches(), steps=4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    step = make()
    new_state = step.init(seed=3)
    before = addresses(new_state)
    actual = fit(step, batches(), new_state, steps=4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert addresses(actual.state) == before
    assert_results_equal(actual, expected)
    with pytest.raises(ConsumedError):
        _ = new_state.params


def test_resuming_does_not_overwrite_a_state_that_other_code_may_hold(tmp_path):
    """The memory of a state is only taken if `init` has made it; here it is a copy."""
    expected = fit(make(), batches(), steps=4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    step = make()
    state = ft.tree.clone(step.init(seed=3))
    before = ft.tree.clone(state)
    actual = fit(step, batches(), state, steps=4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_results_equal(actual, expected)
    for a, b in zip(ft.tree.leaves(state), ft.tree.leaves(before), strict=True):
        assert torch.equal(a, b)


def test_saving_and_resuming_a_plain_run_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (4, 8):
            fit(make(), batches(), steps=steps, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))


ROOT = Path(ft.__file__).parents[1]

SAVE_FROM_A_CHECKOUT = """
import importlib.metadata, sys, torch
import ftrain as ft

assert not list(importlib.metadata.distributions(name="ftrain"))
step = ft.train_step(lambda params, batch: (batch @ params["w"]).square().mean(), ft.optim.sgd(0.1))
checkpoints = ft.Checkpoints(sys.argv[1], every=1)
ft.fit(step, step.init({"w": torch.ones(4)}), [torch.ones(2, 4)], checkpoints=checkpoints, progress=False)
print(checkpoints.latest().environment["ftrain"])
"""


def test_a_checkout_that_is_not_installed_saves(tmp_path):
    """The import path has every installed package, and ftrain as sources without the metadata of an installation."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for installed in Path(torch.__file__).parents[1].iterdir():
        if "ftrain" not in installed.name:
            (packages / installed.name).symlink_to(installed)
    # Not ROOT itself: installing leaves a folder of metadata beside the sources.
    (packages / "ftrain").symlink_to(ROOT / "ftrain")
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-S", "-c", SAVE_FROM_A_CHECKOUT, str(tmp_path / "run")]
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout.strip()) == (0, ft.__version__), process.stderr
