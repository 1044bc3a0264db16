"""With several threads, a step adds gradients up in the same order each time."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

import ftrain as ft
from ftrain import backends
from ftrain.transforms.compile import capture
from tests.exhaustive import choose


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def loss(params, batch):
    """A few rows get the gradients of thousands of tokens: threads that add as they arrive change the bits."""
    embedded = functional.embedding(batch, params["tokens"]) + params["indexed"][batch % 3]
    return (embedded * params["scale"]).tanh().square().mean()


def init(step):
    draw = torch.Generator().manual_seed(0)
    rows = {"tokens": 16, "indexed": 3, "scale": 1}
    return step.init({name: torch.rand(count, 64, generator=draw) for name, count in rows.items()})


def make(lowering):
    step = ft.train_step(loss, ft.optim.adamw(0.1))
    return step if lowering == "eager" else ft.compiled(lowering=lowering)(step)


@pytest.mark.parametrize("lowering", choose(["eager", "whole", "split"], ["eager", "whole"]))
def test_two_threads_give_the_same_bits_each_time(lowering, two_threads):
    step, batch = make(lowering), torch.arange(8192).reshape(8, 1024) % 5
    state = init(step)
    # The moments of the gradients show their last bits; parameters after one step do not.
    moments = [ft.tree.leaves(step(state, batch)[0].opt_state) for _ in range(20)]
    assert all(torch.equal(a, b) for leaves in moments for a, b in zip(leaves, moments[0], strict=True))
    assert lowering in repr(step)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_who_asked_torch_for_deterministic_kernels_still_gets_errors():
    torch.use_deterministic_algorithms(True)
    try:
        with backends.get("cpu").deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_number_of_threads_is_another_graph(monkeypatch, two_threads):
    """What Inductor makes for two threads has room for the sums of two."""
    threads, compile_graph = [], capture.compile_graph

    def counting(*args):
        threads.append(torch.get_num_threads())
        return compile_graph(*args)

    monkeypatch.setattr(capture, "compile_graph", counting)
    step = ft.compiled(backend="eager")(ft.train_step(loss, ft.optim.sgd(0.1)))
    state, batch = init(step), torch.arange(8).reshape(2, 4)
    for number in (2, 2, 3, 2):
        torch.set_num_threads(number)
        state, _ = step(state, batch)
    assert threads == [2, 3]


RUN = """
import os, signal, sys, torch, ftrain as ft
from tests.transforms.compile.test_threads import init, make

directory, resume, killed_at = sys.argv[1:]
torch.set_num_threads(2)

class Batches:
    def __iter__(self):
        for step in range(6):
            if step == int(killed_at):
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.arange(8192).reshape(8, 1024) % (step + 5)

step = make("whole")
checkpoints = ft.Checkpoints(directory, every=1)
state, _ = ft.fit(step, init(step), Batches(), steps=6, checkpoints=checkpoints, resume=resume)
print([leaf.tolist() for leaf in ft.tree.leaves((state.params, state.opt_state))])
"""


def start(directory, resume, killed_at=-1):
    command = [sys.executable, "-c", RUN, str(directory), resume, str(killed_at)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory.parent / "cache")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.exhaustive
def test_a_killed_run_of_two_threads_ends_with_the_bits_of_another_process(tmp_path):
    killed = start(tmp_path / "killed", "never", killed_at=4)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed, undisturbed = start(tmp_path / "killed", "must"), start(tmp_path / "undisturbed", "never")
    assert undisturbed.stdout, undisturbed.stderr
    assert resumed.stdout == undisturbed.stdout, resumed.stderr
