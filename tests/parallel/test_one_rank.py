"""On a mesh of one rank a step has the results that it has without a mesh, and costs no more."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from tests.exhaustive import exhaustive_rows
from tests.parallel import models
from tests.parallel.ranks import run

WRAPPERS = {
    "alone": list,
    "clip": lambda: [ft.clip(0.05)],
    "accumulate": lambda: [ft.accumulate(2)],
    "unequal microbatches": lambda: [ft.accumulate(4)],
    "skip_nonfinite": lambda: [ft.skip_nonfinite()],
    "bf16": lambda: [ft.with_amp("bf16")],
}


class Names(TorchDispatchMode):
    """Context that keeps the names of the operations that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def number(model, batch):
    return model(batch["x"]).square().mean()


def mean_with_metrics(model, batch):
    squares = model(batch["x"]).square().sum(-1)
    weight = batch["weight"].sum()
    metrics = {"size": squares.detach().mean(), "sizes": ft.Mean(squares.detach().sum(), weight), "calls": 1}
    return ft.Mean((squares * batch["weight"]).sum(), weight), metrics


def third_step(criterion, wrappers, with_mesh):
    """Return the operations, the state and the metrics of the third step; the first step checks more."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    step = ft.compose(ft.train_step(ft.from_module(model, criterion), ft.optim.adamw(1e-2)), *wrappers)
    step = ft.sharded(ft.parallel.mesh(), level=0)(step) if with_mesh else step
    state, batch = step.init(seed=0), {"x": torch.randn(10, 4), "weight": torch.rand(10)}
    for _ in range(2):
        state, _ = step(state, batch)
    with Names() as called:
        state, metrics = step(state, batch)
    return called.names, state, metrics


@pytest.mark.parametrize("wrappers", WRAPPERS)
@pytest.mark.parametrize("criterion", [number, mean_with_metrics])
def test_a_step_dispatches_the_same_operations_as_without_a_mesh(criterion, wrappers):
    names, state, metrics = third_step(criterion, WRAPPERS[wrappers](), with_mesh=False)
    ((on_rank, *results),) = run(1, lambda _: third_step(criterion, WRAPPERS[wrappers](), with_mesh=True))
    # The check that nothing has drawn from torch's generator.
    assert [name for name in on_rank if name != "aten.equal.default"] == names
    assert len(on_rank) == len(names) + 1
    for part in ("params", "buffers", "opt_state", "slots"):
        torch.testing.assert_close(getattr(results[0], part), getattr(state, part), rtol=0, atol=0)
    assert results[1] == metrics
    assert type(results[1]["loss"]) is type(metrics["loss"])


def test_a_batch_of_microbatches_is_not_copied():
    def rank(_):
        pointers = []

        def loss(params, batch):
            pointers.append(batch["x"].untyped_storage().data_ptr())
            return (params["w"] * batch["x"]).square().mean()

        step = ft.compose(
            ft.train_step(loss, ft.optim.sgd(0.1)), ft.accumulate(2), ft.sharded(ft.parallel.mesh(), level=0)
        )
        batch = {"x": torch.randn(6, 4)}
        step(step.init({"w": torch.ones(4)}), batch)
        assert pointers == [batch["x"].untyped_storage().data_ptr()] * 2

    run(1, rank)


@pytest.mark.parametrize(
    ("microbatches", "criterion"),
    [(1, models.plain_loss), (2, models.loss), *exhaustive_rows([(1, models.loss), (2, models.plain_loss)])],
)
def test_a_batch_is_split_down_to_single_examples(criterion, microbatches):
    """The batches have eleven examples, which two microbatches do not divide."""

    def trained(limit):
        def short_of_memory(model, batch):
            if torch.is_grad_enabled() and len(batch["x"]) > limit:
                raise torch.OutOfMemoryError("tried to allocate 3 GiB")
            return criterion(model, batch)

        wrappers = [ft.accumulate(microbatches)] if microbatches > 1 else []
        step = models.step_of(*wrappers, ft.sharded(ft.parallel.mesh(), 1), criterion=short_of_memory)
        data = list(models.batches(3, length=11))
        state, history = ft.fit(step, step.init(seed=5), data, on_oom="split", progress=False)
        return ft.parallel.whole(state).params, history["loss"]

    (params, losses), (reference, expected) = run(1, lambda _: trained(1))[0], run(1, lambda _: trained(11))[0]
    torch.testing.assert_close(params, reference, rtol=1e-12, atol=1e-12)
    assert losses == pytest.approx(expected, rel=1e-12)
