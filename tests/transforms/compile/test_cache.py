"""A second start finds what the first one compiled."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import pick_vec_isa

import ftrain as ft
from ftrain import tree

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
found = counters["inductor"]
print(json.dumps([metrics["loss"].item(), found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]))
"""


def start(directory, tmp_path):
    # A cache of the process's own, so that a hit can only come from the directory that was given.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"other{len(list(tmp_path.iterdir()))}")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(directory)], capture_output=True, text=True, check=True, env=environment
    )
    return json.loads(done.stdout)


def test_what_was_compiled_is_read_from_the_directory_that_was_given(tmp_path):
    # What Inductor compiles once to find out which vectors a CPU has would take ten seconds in each new directory.
    pick_vec_isa()
    seen = []
    for value in (2.0, 2.0, 3.0):
        constant = torch.full((2,), value)
        torch.compiler.reset()
        counters.clear()
        step = ft.compiled(cache_dir=tmp_path)(
            ft.train_step(lambda params, batch: (params["w"] * batch * constant).sum(), ft.optim.sgd(1.0))  # noqa: B023
        )
        state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        counted = counters["inductor"]
        seen.append((counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"]))
        # What a loss closes over is no argument, and a graph with another value is not taken for this one.
        assert metrics["loss"].item() == 2 * value
        assert state.params["w"].tolist() == [1 - value] * 2
        assert any(path.is_file() for path in tmp_path.rglob("*"))
    assert seen[:2] == [(0, 1), (1, 0)]


OTHER_CPU = """
import sys, torch, ftrain as ft

torch.set_num_threads(1)
step = ft.train_step(lambda params, batch: (params["w"] * batch).sin().sum(), ft.optim.adamw(0.1))
params, batch = {"w": torch.linspace(-2, 2, 1003)}, torch.linspace(-1, 3, 1003)
needed, _ = step(step.init(params), batch)
for lowering in ("whole", "split"):
    compiled = ft.compiled(lowering=lowering, cache_dir=sys.argv[1])(step)
    found, _ = compiled(compiled.init(params), batch)
    torch.testing.assert_close(found.params, needed.params)
"""


@pytest.mark.exhaustive
def test_cpus_with_other_vectors_share_a_directory(tmp_path):
    # As a CPU without AVX-512 compiles, and then as this one: nothing is shown where this one has none either.
    for capability in ("avx2", None, "avx2"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability or "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        if capability is None:
            del environment["ATEN_CPU_CAPABILITY"]
        subprocess.run([sys.executable, "-c", OTHER_CPU, str(tmp_path)], check=True, env=environment)


@pytest.mark.exhaustive
def test_a_second_start_compiles_nothing(tmp_path):
    directory = tmp_path / "kept"
    directory.mkdir()
    loss, hits, misses = start(directory, tmp_path)
    assert (hits, misses) == (0, 1)
    assert any(path.is_file() for path in directory.rglob("*"))
    assert start(directory, tmp_path) == [loss, 1, 0]


def test_the_environment_is_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    step = ft.compiled(cache_dir=tmp_path / "given", backend="aot_eager")(
        ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1))
    )
    step(step.init({"w": torch.ones(2)}), torch.ones(2))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")


def test_fit_keeps_one_copy_of_the_state():
    """Compiled, donated by `fit`, with everything that has a state of its own."""
    step = ft.compose(
        ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adamw(0.1)),
        ft.clip(1.0),
        ft.ema(0.9),
        ft.compiled(backend="eager"),
    )
    state = step.init({"w": torch.ones(64)})

    def addresses(of):
        return [leaf.data_ptr() for leaf in tree.leaves((of.params, of.opt_state, of.slots))]

    before = addresses(state)
    state, _ = ft.fit(step, state, [torch.ones(64)] * 5, progress=False)
    assert addresses(state) == before


class Recurrent(torch.nn.Module):
    """Carries its hidden state from step to step, in a buffer or in an attribute, which no compiled step keeps."""

    def __init__(self, in_buffer):
        super().__init__()
        self.cell, self.hidden = torch.nn.RNN(2, 3, batch_first=True), None
        if in_buffer:
            del self.hidden
            self.register_buffer("hidden", torch.zeros(1, 4, 3))

    def forward(self, x):
        output, hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return output.square().mean()


@pytest.mark.parametrize(("in_buffer", "wrappers"), [(True, ()), (False, ()), (False, (ft.accumulate(2),))])
def test_the_log_says_once_which_attribute_a_compiled_step_does_not_keep(in_buffer, wrappers, caplog):
    loss = ft.from_module(Recurrent(in_buffer), lambda model, batch: model(batch))
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers, ft.compiled(backend="eager"))
    state = step.init()
    for length in (5, 5, 6):
        state, _ = step(state, torch.ones(4, length, 2))
    said = [record.getMessage() for record in caplog.records if "the loss sets hidden" in record.getMessage()]
    assert len(said) == (not in_buffer)


def test_the_log_names_a_count_that_a_compiled_step_does_not_keep(caplog):
    class Counting(torch.nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls

    loss = ft.from_module(Counting(2, 1), lambda model, batch: model(batch).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.compiled(backend="eager"))
    step(step.init(), torch.ones(4, 2))
    assert "the loss sets calls" in caplog.text


@pytest.mark.filterwarnings("ignore:Step. called within torch.autocast")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_setting_of_torch_that_changes_between_steps_is_another_graph(backend):
    def loss(params, batch):
        return (batch @ params["w"]).square().mean(), {"third": torch.tensor(1 / 3)}

    eager = ft.train_step(loss, ft.optim.sgd(0.1))
    compiled, state, batch = ft.compiled(backend=backend)(eager), eager.init({"w": torch.rand(8, 2)}), torch.rand(4, 8)
    try:
        for autocast, default in [(False, torch.float32), (True, torch.float32), (False, torch.float64)] * 2:
            torch.set_default_dtype(default)
            with torch.autocast("cpu", enabled=autocast):
                (_, actual), (_, expected) = compiled(state, batch), eager(state, batch)
            assert actual == expected
            assert actual["third"].dtype == default
    finally:
        torch.set_default_dtype(torch.float32)
    assert "compiled(whole)" in repr(compiled)
