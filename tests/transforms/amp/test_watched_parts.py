"""Which parts `with_amp(watch=True)` watches: marked functions, adapters, and no part that cannot run twice."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, LossError, OptionError
from tests.bits import assert_same_bits
from tests.faults.problem import failing, make, squares
from tests.transforms.amp.watched_models import (
    FaultyNet,
    build,
    criterion,
    make_batches,
    parts_in,
    run,
    shares_in,
)


@pytest.mark.parametrize(
    "outer",
    [(), (ft.remat(),), (ft.accumulate(2),), (ft.compiled(backend="aot_eager"),)],
    ids=["plain", "remat", "accumulate", "compiled"],
)
def test_marked_functions_of_a_pure_loss_are_watched(outer):
    @ft.block
    def layer(w, x, factor):
        return torch.tanh(x @ w) * factor

    def loss(params, batch):
        x = batch
        for w, factor in zip(params["w"], (1.0, 1e6, 1e-9), strict=True):
            x = layer(w, x, factor).nan_to_num(posinf=1.0, neginf=-1.0)
        return x.float().square().mean() + params["w"][2].square().mean()

    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.with_amp("fp16", watch=True), *outer)
    state = step.init({"w": [torch.eye(8) for _ in range(3)]})
    _, metrics = step(state, make_batches(1)[0])
    shares = {name: share for name, share in shares_in(metrics).items() if name.startswith(("overflow", "underflow"))}
    assert {name for name, share in shares.items() if share > 0.5} == {"overflow/layer.1", "underflow/layer.2"}
    assert len(shares) == 6


def test_a_pure_loss_without_marks_is_refused():
    step = make(squares, ft.with_amp("bf16", watch=True))
    state = step.init({"w": torch.ones(3), "b": torch.zeros(())})
    with failing(ComposeError, "watch=True", "squares", "ft.block"):
        step(state, {"x": torch.ones(2, 3), "y": torch.ones(2)})


def test_marked_functions_that_may_write_to_an_argument_are_not_watched():
    @ft.block
    def layer(w, x, cache):
        return x @ w

    step = make(lambda params, batch: layer(params["w"], batch, object()).sum(), ft.with_amp("bf16", watch=True))
    with failing(ComposeError, "watch=True", "no part that can be watched"):
        step(step.init({"w": torch.eye(8)}), make_batches(1)[0])


def test_adapters_are_watched_in_their_modules():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    step = ft.compose(
        ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)),
        ft.lora(2, targets=["0"]),
        ft.with_amp("fp16", watch=True),
    )
    state = step.init()
    overflowing = tree.map(lambda leaf: torch.full_like(leaf, 500.0), state.params)
    _, metrics = step(ft.types.replace(state, params=overflowing), make_batches(1)[0])
    assert float(metrics["overflow/0"]) > 0.9
    assert float(metrics["overflow/1"]) == 0


def assert_equal_unwatched(model, state, metrics):
    """Check that an unwatched step in bf16 gives this state and loss."""
    expected, (expected_metrics,) = run(build(model=model, dtype="bf16", watch=False), 1)
    assert_same_bits(state, expected)
    assert torch.equal(metrics["loss"], expected_metrics["loss"])


def test_a_part_with_a_cache_among_its_arguments_is_not_watched():
    """As those of transformers have: a second run would write to the cache again."""

    class Cache:
        calls = 0

    cache = Cache()

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x, cache):
            cache.calls += 1
            return self.inner(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cached = Cached()

        def forward(self, x):
            return self.cached(x, cache)

    model = Model()
    state, (metrics,) = run(build(model=model, dtype="bf16"), 1)
    # Once itself, and once when the whole model runs in float32.
    assert cache.calls == 2
    assert parts_in(metrics) == {"(model)", "cached.inner"}
    assert_equal_unwatched(model, state, metrics)


def test_parts_that_write_to_their_input_compute_the_same():
    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2.0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.doubles, self.linear, self.act = Doubles(), nn.Linear(8, 8), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.act(self.linear(self.doubles(x + 0.0)))

    model = Model()
    state, (metrics,) = run(build(model=model, dtype="bf16"), 1)
    assert parts_in(metrics) == {"(model)", "doubles", "linear", "act"}
    assert_equal_unwatched(model, state, metrics)


def test_the_attributes_that_a_part_sets_are_those_of_its_run_in_the_narrow_dtype():
    """Such as a mask that is made in the dtype of the first run."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.table, self.runs = nn.Linear(8, 8), None, []

        def forward(self, x):
            self.runs.append(len(self.runs))
            x = self.inner(x)
            if self.table is None:
                self.table = torch.full((8,), 1 / 3, dtype=x.dtype)
            return x * self.table

    def run_table(watch):
        model = nn.Sequential(Table(), nn.Sequential(), nn.Linear(8, 8))
        state, _ = run(build(model=model, dtype="bf16", watch=watch), 2)
        return state, model[0]

    (watched, watched_table), (unwatched, table) = run_table(watch=True), run_table(watch=False)
    assert_same_bits(watched, unwatched)
    assert watched_table.table.dtype == table.table.dtype == torch.bfloat16
    assert watched_table.runs == table.runs == [0, 1]


def test_a_part_that_fails_in_float32_is_an_error_that_names_it():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        def forward(self, x):
            return torch.mm(x.half(), self.weight) if x.dtype == torch.float32 else x @ self.weight

    step = build(model=Halves())
    with failing(LossError, "watch=True", "a second time in float32", "(model)"):
        step(step.init(), make_batches(1)[0])


def test_tf32_is_not_watched():
    with failing(OptionError, "with_amp", "tf32", "watch bf16 or fp16"):
        ft.with_amp("tf32", watch=True)


def test_it_prints_that_it_watches():
    assert "with_amp(fp16, watch)" in repr(build())


def test_a_metric_of_the_loss_with_the_name_of_a_share_is_refused():
    def loss(model, batch):
        return criterion(model, batch), {"overflow/parts.0": torch.ones(())}

    loss_fn = ft.from_module(FaultyNet(), loss)
    step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.1)), ft.with_amp("fp16", watch=True))
    with failing(LossError, "with_amp", "overflow/parts.0"):
        step(step.init(), make_batches(1)[0])


class KeepsOutputs(nn.Module):
    """Adds the squares of what a hook has kept of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.kept = []
        for layer in self.layers:
            layer[0].register_forward_hook(lambda layer, args, output: self.kept.append(output))

    def forward(self, x):
        self.kept.clear()
        for layer in self.layers:
            x = layer(x)
        return sum(output.float().square().mean() for output in self.kept)


def test_the_second_run_of_a_part_leaves_nothing_in_the_attributes_that_a_hook_writes():
    def loss_of(**options):
        torch.manual_seed(0)
        base = ft.train_step(ft.from_module(KeepsOutputs(), lambda model, batch: model(batch)), ft.optim.sgd(0.1))
        step = ft.compose(base, ft.with_amp("bf16", **options))
        state, metrics = step(step.init(), make_batches(1)[0])
        return state.params, metrics["loss"]

    assert_same_bits(loss_of(watch=True), loss_of())
