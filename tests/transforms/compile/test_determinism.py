"""A step gives the same bits each time: with several threads, in another process, and with deterministic algorithms."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import functional

import ftrain as ft
from ftrain import backends
from ftrain.transforms.compile.settings import Compiler
from tests.exhaustive import choose


@pytest.fixture
def _two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def _deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def loss(params, batch):
    """A few rows get the gradients of thousands of tokens: threads that add as they arrive change the bits."""
    embedded = functional.embedding(batch, params["tokens"]) + params["indexed"][batch % 3]
    return (embedded * params["scale"]).tanh().square().mean()


def init_state(step):
    generator = torch.Generator().manual_seed(0)
    rows = {"tokens": 16, "indexed": 3, "scale": 1}
    return step.init({name: torch.rand(count, 64, generator=generator) for name, count in rows.items()})


def make_step(lowering):
    step = ft.train_step(loss, ft.optim.adamw(0.1))
    return step if lowering == "eager" else ft.compiled(lowering=lowering)(step)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("lowering", choose(["eager", "whole", "split"], ["eager", "whole"]))
def test_two_threads_give_the_same_bits_each_time(lowering):
    step, batch = make_step(lowering), torch.arange(8192).reshape(8, 1024) % 5
    state = init_state(step)
    # The moments of the gradients show their last bits; parameters after one step do not.
    first, *others = [ft.tree.leaves(step(state, batch)[0].opt_state) for _ in range(20)]
    for moments in others:
        assert all(torch.equal(a, b) for a, b in zip(moments, first, strict=True))
    assert lowering in repr(step)
    # The settings of torch are as before.
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.usefixtures("_deterministic_algorithms")
def test_a_user_of_deterministic_algorithms_still_gets_errors_and_not_warnings():
    with backends.get("cpu").deterministic():
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.are_deterministic_algorithms_enabled()


def test_the_step_of_another_thread_stays_deterministic_when_one_ends():
    step_that_ends, other_step = (backends.get("cpu").deterministic() for _ in range(2))
    with other_step, ThreadPoolExecutor(1) as thread:
        thread.submit(step_that_ends.__enter__).result()
    assert torch.are_deterministic_algorithms_enabled()
    step_that_ends.__exit__(None, None, None)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def devices_that_measure_no_code():
    """Return the types of devices for which Inductor compiles without a measurement of which code is fastest."""
    compiler = Compiler(
        backend="inductor", options={}, fullgraph=True, dynamic=False, replay=None, cache_dir=None, max_graphs=8
    )
    devices = [torch.device("meta"), torch.device("cpu")]
    return [device.type for device in devices if compiler.options_for(device).get("deterministic")]


def test_inductor_may_measure_code_by_default():
    assert not devices_that_measure_no_code()


@pytest.mark.usefixtures("_deterministic_algorithms")
def test_deterministic_algorithms_measure_no_code():
    """On the CPU ftrain asks for them itself, and Inductor measures nothing by default."""
    assert devices_that_measure_no_code() == ["meta"]


RUN = """
import os, signal, sys, torch, ftrain as ft
from tests.transforms.compile.test_determinism import init_state, make_step

directory, resume, killed_at = sys.argv[1:]
torch.set_num_threads(2)

class Batches:
    def __iter__(self):
        for step in range(6):
            if step == int(killed_at):
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.arange(8192).reshape(8, 1024) % (step + 5)

step = make_step("whole")
checkpoints = ft.Checkpoints(directory, every=1)
state, _ = ft.fit(step, init_state(step), Batches(), steps=6, checkpoints=checkpoints, resume=resume)
print([leaf.tolist() for leaf in ft.tree.leaves((state.params, state.opt_state))])
"""


def run_process(directory, resume, killed_at=-1):
    command = [sys.executable, "-c", RUN, str(directory), resume, str(killed_at)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory.parent / "cache")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.exhaustive
def test_a_killed_run_of_two_threads_ends_with_the_bits_of_another_process(tmp_path):
    killed = run_process(tmp_path / "killed", "never", killed_at=4)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_process(tmp_path / "killed", "must")
    undisturbed = run_process(tmp_path / "undisturbed", "never")
    assert undisturbed.stdout, undisturbed.stderr
    assert resumed.stdout == undisturbed.stdout, resumed.stderr
