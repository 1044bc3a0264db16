"""A module with a sparse buffer, such as the adjacency matrix of a graph, trains as one with the dense buffer."""

import math

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree

MATRIX = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 3.0, 1.0]])


class Graph(nn.Module):
    def __init__(self, adjacency):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        return self.linear(self.adjacency @ x)


def train(adjacency, wrappers, scale=1.0):
    torch.manual_seed(0)
    loss_fn = ft.from_module(Graph(adjacency), lambda module, batch: module(batch).square().mean())
    step = ft.compose(ft.train_step(loss_fn, ft.optim.adamw(0.1)), *wrappers)
    data = [scale * torch.arange(6.0).view(3, 2) + number for number in range(3)]
    return ft.fit(step, step.init(seed=0), data, steps=3)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize(
    "wrappers",
    [
        pytest.param((), id="plain"),
        pytest.param((ft.ema(0.9),), id="ema"),
        pytest.param((ft.sam(0.1),), id="sam"),
        pytest.param((ft.skip_nonfinite(3),), id="skip_nonfinite"),
        pytest.param((ft.compiled(backend="eager"),), id="compiled"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_buffer_trains_as_a_dense_one(layout, wrappers):
    state, history = train(MATRIX.to_sparse(layout=layout), wrappers)
    expected, dense_history = train(MATRIX, wrappers)
    assert [r["loss"] for r in history] == pytest.approx([r["loss"] for r in dense_history], rel=1e-5)
    for name, leaf in state.params.items():
        torch.testing.assert_close(leaf, expected.params[name])
    assert state.buffers["adjacency"].layout == layout
    assert torch.equal(state.buffers["adjacency"].to_dense(), MATRIX)


def test_a_skipped_step_keeps_a_sparse_buffer():
    state, history = train(MATRIX.to_sparse(), (ft.skip_nonfinite(5),), scale=math.nan)
    assert history[-1]["skipped"] == 1
    assert torch.equal(state.buffers["adjacency"].to_dense(), MATRIX)


def test_take_copies_a_sparse_tensor():
    matrix = MATRIX.to_sparse()
    assert tree.take([matrix])[0].values().data_ptr() != matrix.values().data_ptr()
