"""When a step is compiled again: at another setting of torch or number of threads, but not for every length."""

import pytest
import torch

import ftrain as ft
from ftrain.transforms.compile import capture
from tests.transforms.compile.counting_backend import compiled_graphs


def loss(params, batch):
    return torch.tanh(batch @ params["w"]).square().mean()


def test_dynamic_compiles_few_graphs_for_any_number_of_lengths():
    """And needs no higher limit of graphs."""
    eager = ft.train_step(loss, ft.optim.adamw(0.1))
    compiled = ft.compiled(dynamic=True, backend="ftrain_counting")(eager)
    compiled_graphs.clear()
    params = {"w": torch.linspace(-1, 1, 6).view(3, 2)}
    state, expected = compiled.init(params), eager.init(params)
    for length in range(1, 30):
        batch = torch.linspace(0, 1, 3 * length).view(length, 3)
        state, _ = compiled(state, batch)
        expected, _ = eager(expected, batch)
    torch.testing.assert_close(state.params, expected.params)
    assert len(compiled_graphs) <= 3


@pytest.fixture
def _settings_put_back():
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_settings_put_back")
def test_another_number_of_threads_is_another_graph(monkeypatch):
    """The code that Inductor generates for two threads has memory for two sums."""
    thread_counts, compile_graph = [], capture.compile_graph

    def compile_recording(*args):
        thread_counts.append(torch.get_num_threads())
        return compile_graph(*args)

    monkeypatch.setattr(capture, "compile_graph", compile_recording)
    step = ft.compiled(backend="eager")(ft.train_step(loss, ft.optim.sgd(0.1)))
    state = step.init({"w": torch.ones(3, 2)})
    for count in (2, 2, 3, 2):
        torch.set_num_threads(count)
        state, _ = step(state, torch.ones(4, 3))
    assert thread_counts == [2, 3]


@pytest.mark.usefixtures("_settings_put_back")
@pytest.mark.filterwarnings("ignore:Step. called within torch.autocast")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_another_autocast_or_default_dtype_is_another_graph(backend):
    def loss_and_metric(params, batch):
        return (batch @ params["w"]).square().mean(), {"third": torch.tensor(1 / 3)}

    eager = ft.train_step(loss_and_metric, ft.optim.sgd(0.1))
    compiled = ft.compiled(backend=backend)(eager)
    state, batch = eager.init({"w": torch.rand(8, 2)}), torch.rand(4, 8)
    for autocast, default_dtype in [(False, torch.float32), (True, torch.float32), (False, torch.float64)] * 2:
        torch.set_default_dtype(default_dtype)
        with torch.autocast("cpu", enabled=autocast):
            (_, metrics), (_, expected) = compiled(state, batch), eager(state, batch)
        assert metrics == expected
        assert metrics["third"].dtype == default_dtype
    assert "compiled(whole)" in repr(compiled)
