"""`compiled(dynamic=True)`: one graph of the loss for batches of any length."""

import torch
from torch._dynamo import register_backend

import ftrain as ft

compiled_graphs = []


@register_backend
def ftrain_counted(graph, inputs):
    compiled_graphs.append(graph)
    return graph.forward


def loss(params, batch):
    return torch.tanh(batch @ params["w"]).square().mean()


def test_any_number_of_lengths_needs_few_graphs_and_no_raised_limit():
    eager = ft.train_step(loss, ft.optim.adamw(0.1))
    step = ft.compiled(dynamic=True, backend="ftrain_counted")(eager)
    compiled_graphs.clear()
    state, expected = (each.init({"w": torch.linspace(-1, 1, 6).view(3, 2)}) for each in (step, eager))
    for length in range(1, 30):
        batch = torch.linspace(0, 1, 3 * length).view(length, 3)
        state, _ = step(state, batch)
        expected, _ = eager(expected, batch)
    torch.testing.assert_close(state.params, expected.params)
    assert len(compiled_graphs) <= 3
