"""`compiled(cache_dir=)`: a second start reads what the first one compiled, and the environment stays as it was."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import pick_vec_isa

import ftrain as ft

RUN = """
import json, sys, torch, ftrain as ft
from torch._dynamo.utils import counters

torch.set_num_threads(1)
step = ft.compose(
    ft.train_step(lambda params, batch: ((batch @ params["w"]) ** 2).mean(), ft.optim.adamw(0.1)),
    ft.compiled(cache_dir=sys.argv[1]),
)
state, metrics = step(step.init({"w": torch.ones(3, 2)}), torch.ones(4, 3))
state, metrics = step(state, torch.ones(4, 3))
counts = counters["inductor"]
print(json.dumps([metrics["loss"].item(), counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]]))
"""


def run_process(cache_dir, inductor_cache):
    """Return the last loss of `RUN` in a new process, and how many graphs were and were not in the cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(inductor_cache)}
    command = [sys.executable, "-c", RUN, str(cache_dir)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(process.stdout)


@pytest.mark.exhaustive
def test_a_second_start_compiles_nothing(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir()
    # Another cache of Inductor for each process, so that a hit can only come from the directory.
    loss, hits, misses = run_process(directory, tmp_path / "first")
    assert (hits, misses) == (0, 1)
    assert any(path.is_file() for path in directory.rglob("*"))
    assert run_process(directory, tmp_path / "second") == [loss, 1, 0]


def test_a_graph_is_read_from_the_directory_and_one_with_another_constant_is_not_taken_for_it(tmp_path):
    # Inductor compiles a program to find out which vectors a CPU has; in each new directory it would take ten seconds.
    pick_vec_isa()
    hits_and_misses = []
    for value in (2.0, 2.0, 3.0):
        # A tensor that a loss closes over is a constant of the graph.
        constant = torch.full((2,), value)
        torch.compiler.reset()
        counters.clear()
        step = ft.compiled(cache_dir=tmp_path)(
            ft.train_step(lambda params, batch: (params["w"] * batch * constant).sum(), ft.optim.sgd(1.0))  # noqa: B023
        )
        state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        hits_and_misses.append((counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]))
        assert metrics["loss"].item() == 2 * value
        assert state.params["w"].tolist() == [1 - value] * 2
        assert any(path.is_file() for path in tmp_path.rglob("*"))
    assert hits_and_misses[:2] == [(0, 1), (1, 0)]


RUN_ON_ANOTHER_CPU = """
import sys, torch, ftrain as ft

torch.set_num_threads(1)
step = ft.train_step(lambda params, batch: (params["w"] * batch).sin().sum(), ft.optim.adamw(0.1))
params, batch = {"w": torch.linspace(-2, 2, 1003)}, torch.linspace(-1, 3, 1003)
expected, _ = step(step.init(params), batch)
for lowering in ("whole", "split"):
    compiled = ft.compiled(lowering=lowering, cache_dir=sys.argv[1])(step)
    state, _ = compiled(compiled.init(params), batch)
    torch.testing.assert_close(state.params, expected.params)
"""


@pytest.mark.exhaustive
def test_cpus_with_other_vectors_share_a_directory(tmp_path):
    # As a CPU without AVX-512 compiles, and then as this one. It shows nothing if this one has no AVX-512 either.
    for capability in ("avx2", None, "avx2"):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        environment.pop("ATEN_CPU_CAPABILITY", None)
        if capability is not None:
            environment["ATEN_CPU_CAPABILITY"] = capability
        subprocess.run([sys.executable, "-c", RUN_ON_ANOTHER_CPU, str(tmp_path)], check=True, env=environment)


def test_the_environment_is_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "before"))
    step = ft.compiled(cache_dir=tmp_path / "cache", backend="aot_eager")(
        ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1))
    )
    step(step.init({"w": torch.ones(2)}), torch.ones(2))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "before")
