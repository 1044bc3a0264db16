"""Gradients are sent while the backward pass computes those of earlier layers."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain.parallel import gradient_sums
from ftrain.step.rank_backward import announced
from tests.parallel.ranks import run
from tests.profiling.live_memory import LivePeak

WIDTH, LAYERS = 16, 8


class Order(TorchDispatchMode):
    """Context that records the order of products and of collectives; collectives of single numbers have other names."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.operations.append("product")
        elif function.namespace == "_c10d_functional":
            operation = "wait" if name == "wait_tensor" else "collective"
            self.operations.append(operation if args[0].numel() >= WIDTH else f"{operation} of numbers")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("level", "microbatches", "copies", "started"),
    # The last of four buckets is complete only at the end. With copies, the first is also summed over them, while two
    # others are being sent.
    [(0, 1, 1, 3), (1, 1, 1, 3), (2, 2, 1, 3), (1, 1, 2, 3 + 1)],
)
def test_the_gradients_of_the_last_layers_are_sent_first(level, microbatches, copies, started, monkeypatch):
    monkeypatch.setattr(gradient_sums, "SMALLEST_BUCKET", WIDTH * WIDTH * 4)

    def rank(_):
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        loss = ft.from_module(nn.Sequential(*layers), lambda model, batch: model(batch["x"]).square().mean())
        wrappers = [ft.accumulate(microbatches)] if microbatches > 1 else []
        mesh = ft.parallel.mesh(replicate=copies)
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers, ft.sharded(mesh, level), ft.donated())
        state, batch = step.init(seed=0), {"x": torch.ones(4 * microbatches, WIDTH)}
        state, _ = step(state, batch)  # In the first step ranks compare more.
        with Order() as order:
            step(state, batch)
        return order.operations

    operations = run(2 * copies, rank)[0]
    products = [index for index, operation in enumerate(operations) if operation == "product"]
    # The last backward pass: each layer has two products, but the first one, because the batch needs no gradient.
    first, last = products[1 - 2 * LAYERS], products[-1]
    assert operations[first:last].count("collective") == started


@pytest.mark.parametrize("level", range(4))
def test_the_loss_is_sent_while_the_backward_pass_runs(level):
    def rank(_):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        loss = ft.from_module(nn.Sequential(*layers), lambda model, batch: model(batch["x"]).square().mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), level))
        state, batch = step.init(seed=0), {"x": torch.ones(4, WIDTH)}
        state, _ = step(state, batch)
        with Order() as order:
            step(state, batch)
        return order.operations

    operations = run(2, rank)[0]
    start, wait = operations.index("collective of numbers"), operations.index("wait of numbers")
    assert operations.count("collective of numbers") == 1
    assert operations[:start].count("product") == LAYERS
    assert operations[start:wait].count("product") == 2 * LAYERS - 1


def test_level_2_keeps_a_part_of_the_gradients_between_microbatches_where_level_1_keeps_all(monkeypatch):
    """By the bytes of all live tensors of a rank; gathered parameters count at both levels."""
    monkeypatch.setattr(gradient_sums, "SMALLEST_BUCKET", WIDTH * WIDTH * 4)
    monkeypatch.setattr(gradient_sums, "BUCKETS", LAYERS)
    size, width = 2, 4 * WIDTH
    gradients = LAYERS * width * width * 4

    def rank(level):
        layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        loss = ft.from_module(nn.Sequential(*layers), lambda model, batch: model(batch["x"]).square().mean())
        step = ft.compose(
            ft.train_step(loss, ft.optim.sgd(0.1)), ft.accumulate(2), ft.sharded(ft.parallel.mesh(), level)
        )
        state, batch = step.init(seed=0), {"x": torch.ones(2 * size, width)}
        state, _ = step(state, batch)  # In the first step ranks compare more.
        with LivePeak((state, batch)) as live:
            step(state, batch)
        return live.peak

    first, second = (run(size, lambda _, level=level: rank(level))[0] for level in (1, 2))
    # Beside the buckets that are being sent, level 1 has the whole sum, and level 2 half of it.
    assert first - second > gradients / 3


@pytest.mark.parametrize("level", [0, 3])
def test_after_a_loss_that_fails_no_gradients_are_announced(level):
    def failing(model, batch):
        model(batch["x"])
        raise ValueError("no loss")

    def rank(_):
        step = ft.train_step(ft.from_module(nn.Linear(WIDTH, WIDTH), failing), ft.optim.sgd(0.1))
        step = ft.sharded(ft.parallel.mesh(), level)(step)
        with pytest.raises(ValueError, match="no loss"):
            step(step.init(seed=0), {"x": torch.ones(4, WIDTH)})
        return announced()

    assert run(2, rank) == [None, None]


@pytest.mark.parametrize("level", [0, 2, 3])
def test_no_cycle_of_references_keeps_gradients(level):
    def rank(_):
        loss = ft.from_module(nn.Linear(WIDTH, WIDTH), lambda model, batch: model(batch["x"]).square().mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), level))
        state = step.init(seed=0)
        for _ in range(2):
            state, _ = step(state, {"x": torch.ones(4, WIDTH)})

    def count():
        return sum(type(value) is gradient_sums.GradientSums for value in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = count()
        run(2, rank)
        assert count() == before
    finally:
        gc.enable()
