"""`with_amp(watch=True)`: which part of a model a narrow dtype breaks, whatever else a step does."""

import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain import tree
from ftrain.errors import ComposeError, LossError, OptionError
from ftrain.training import progress
from tests.exhaustive import choose
from tests.faults.problem import assert_bitwise, failing, make, squares
from tests.laws.models import make_batch, make_model, token_loss
from tests.laws.pipelines import assert_equal

KINDS = "overflow", "underflow", "grad_overflow", "grad_underflow"


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Broken(nn.Module):
    """What part 1.2 returns overflows in float16, and what 3.1 returns vanishes."""

    def __init__(self, large=1e6, small=1e-9):
        super().__init__()
        wide = nn.Linear(8, 8)
        nn.init.ones_(wide.weight)
        self.parts = nn.ModuleList(
            [
                nn.Linear(8, 8),
                nn.Sequential(nn.Dropout(0.25), wide, Times(large)),
                nn.Tanh(),
                nn.Sequential(nn.Linear(8, 8), Times(small)),
                nn.Linear(8, 4),
            ]
        )

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def criterion(model, batch):
    return ft.Mean(model(batch).float().nan_to_num().square().sum(), torch.tensor(float(len(batch))))


def build(*wrappers, model=None, dtype="fp16", watch=True, inner=()):
    torch.manual_seed(0)
    loss = ft.from_module(Broken() if model is None else model, criterion)
    step = ft.train_step(loss, ft.optim.sgd(0.1, momentum=0.9))
    return ft.compose(step, *inner, ft.with_amp(dtype, watch=watch), *wrappers)


def data(count=3):
    return list(torch.randn(count, 8, 8, generator=torch.Generator().manual_seed(1)).abs().unbind())


def run(step, count=3):
    state, seen = step.init(), []
    for batch in data(count):
        state, metrics = step(state, batch)
        seen.append(metrics)
    return state, seen


WAYS = {
    "plain": ((), ()),
    "remat outside": ((), (ft.remat(blocks=["parts.1", "parts.3"]),)),
    "remat inside": ((ft.remat(blocks=["parts.1", "parts.3"]),), ()),
    "remat dots": ((), (ft.remat("dots", blocks=["parts.1", "parts.3"]),)),
    "remat budget": ((), (ft.remat(blocks=["parts.1", "parts.3"], budget=0.5),)),
    "accumulate": ((), (ft.accumulate(2),)),
    "accumulate inside": ((ft.accumulate(4), ft.clip(1.0)), ()),
    "donated": ((), (ft.donated(), ft.ema(0.9))),
    "whole": ((), (ft.compiled(lowering="whole", backend="eager"),)),
    "whole, donated": ((), (ft.remat(blocks=["parts.1"]), ft.compiled(lowering="whole", backend="eager", donate=True))),
    "split": ((), (ft.compiled(lowering="split", backend="aot_eager"),)),
}
FEW = "plain", "remat inside", "remat dots", "accumulate", "whole, donated", "split"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("way", choose(WAYS, FEW))
def test_an_overflow_and_an_underflow_are_found_where_they_were_planted(way):
    inner, outer = WAYS[way]
    _, seen = run(build(*outer, inner=inner), 1)
    (metrics,) = seen
    shares = {name: float(value) for name, value in metrics.items() if "/" in name}
    assert all(isinstance(value, torch.Tensor) and value.shape == () for name, value in metrics.items() if "/" in name)
    overflow = {name for name, share in shares.items() if name.startswith("overflow/") and share}
    # And what it is a part of; not what comes after it.
    assert overflow == {"overflow/parts.1.2", "overflow/parts.1"}
    assert shares["overflow/parts.1.2"] > 0.5  # The rest was dropped.
    underflow = {name: share for name, share in shares.items() if name.startswith("underflow/") and share > 0.5}
    assert set(underflow) == {"underflow/parts.3.1", "underflow/parts.3"}
    assert underflow["underflow/parts.3.1"] == 1.0
    # The gradient vanishes on its way back through the same part.
    assert shares["grad_underflow/parts.3.0"] == 1.0
    assert shares["grad_underflow/parts.3.1"] < 0.1
    rows = ft.precision_report(metrics).rows
    assert [row.part for row in rows[:2]] == ["parts.1.2", "parts.1"]
    assert {row.part for row in rows} == {
        "(model)",
        *(name for name, _ in Broken().named_modules() if "parts." in name),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *((way, "fp16") for way in WAYS if way != "whole"),
        ("plain", "bf16"),
        # "whole, donated" is captured as well.
        pytest.param("whole", "fp16", marks=pytest.mark.exhaustive),
    ],
)
def test_a_watched_step_is_the_same_to_the_bit(way, dtype):
    inner, outer = WAYS[way]
    model = Broken(1.0, 1.0)
    random_state = torch.get_rng_state()
    watched, actual = run(build(*outer, inner=inner, model=model, dtype=dtype))
    torch.set_rng_state(random_state)
    if way == "split":  # The loss that is watched is not compiled.
        plain, expected = run(build(model=model, watch=False))
        torch.testing.assert_close(tree.leaves(watched.params), tree.leaves(plain.params))
        return
    plain, expected = run(build(*outer, inner=inner, model=model, dtype=dtype, watch=False))
    assert_bitwise(watched, plain)
    for a, b in zip(actual, expected, strict=True):
        assert_equal({name: value for name, value in a.items() if "/" not in name}, b)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_split_step_runs_a_watched_loss_uncompiled():
    torch._dynamo.utils.counters.clear()
    run(build(ft.compiled(lowering="split", backend="eager")), 1)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_buffers_ties_and_other_losses_stay_as_they_are(policy):
    """BatchNorm advances once, dropout draws what it would, and metrics of the loss's own are there too."""
    for dtype in ("bf16", "fp16"):
        steps = [
            ft.compose(
                ft.train_step(ft.from_module(make_model(0.3, torch.float32), token_loss), ft.optim.adamw(0.05)),
                ft.remat(policy),
                ft.with_amp(dtype, watch=watch),
                ft.accumulate(2),
            )
            for watch in (True, False)
        ]
        states = [step.init() for step in steps]
        for index in range(3):
            states, metrics = zip(
                *(step(state, make_batch(index)) for step, state in zip(steps, states, strict=True)), strict=True
            )
        assert_bitwise(*states)
        assert float(metrics[0]["accuracy"]) == float(metrics[1]["accuracy"])
        assert {name.split("/")[1] for name in metrics[0] if "/" in name} >= {
            "embed",
            "blocks.0",
            "blocks.1.up",
            "head",
        }


def test_shares_are_exact():
    """Against counts by hand, of a part that is called twice, on tensors of different sizes."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.times = Times(torch.tensor([2.0**10, 1.0, 2.0**-10, 2.0**-20, 1.0, 1.0], dtype=torch.float16))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.times(x.half() * self.scale.half()), self.times(x[:1].half() * self.scale.half())

    # In float16: 128 * 1024 is too much, 2**-10 * 2**-10 subnormal, 2**-10 * 2**-20 zero, and 2**-40 is it before.
    x = torch.tensor([128.0, 1.0, 2.0**-10, 2.0**-10, 2.0**-40, 0.0]).repeat(4, 1)
    x[0, 0] = 1.0
    loss = ft.from_module(
        Twice(), lambda model, batch: sum(part.float().clamp(max=1.0).sum() for part in model(batch)) / 1e3
    )
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.0)), ft.with_amp("fp16", watch=True))
    _, metrics = step(step.init(), x)
    assert float(metrics["overflow/times"]) == pytest.approx(3 / 30)
    assert float(metrics["underflow/times"]) == pytest.approx(10 / 30)


def test_gradients_are_judged_as_they_arrive_scaled():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4, bias=False), Times(1.0)

        def forward(self, x):
            return self.down(self.up(x))

    factors = torch.tensor([2.0**-31, 2.0**-25, 0.0, 1.0])
    loss = ft.from_module(Root(), lambda model, batch: (model(batch).float() * factors).sum())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.0)), ft.with_amp("fp16", watch=True))
    state = step.init()
    _, metrics = step(state, torch.ones(2, 4))
    # Times 2**16: 2**-15 is subnormal, 2**-9 is not, 0 says nothing, and 2**16 is infinite.
    assert float(metrics["grad_underflow/down"]) == pytest.approx(1 / 3)
    assert float(metrics["grad_overflow/down"]) == pytest.approx(1 / 4)
    assert bool(metrics["skipped"])


def test_what_is_not_finite_in_float32_either_is_no_fault_of_the_dtype():
    _, (metrics,) = run(build(model=nn.Sequential(nn.Linear(8, 8), Times(float("nan")), nn.Linear(8, 1))), 1)
    assert all(float(value) == 0 for name, value in metrics.items() if name.startswith(("overflow/", "underflow/")))


def test_bfloat16_has_the_range_of_float32():
    _, (metrics,) = run(build(dtype="bf16"), 1)
    assert all(float(value) == 0 for name, value in metrics.items() if "overflow/" in name)
    assert float(metrics["underflow/parts.3.1"]) == 0
    _, (metrics,) = run(build(dtype="bf16", model=Broken(1.0, 1e-39)), 1)
    assert float(metrics["underflow/parts.3.1"]) == 1


def test_marked_functions_of_a_pure_loss():
    @ft.block
    def layer(w, x, factor):
        return torch.tanh(x @ w) * factor

    def loss(params, batch):
        x = batch
        for w, factor in zip(params["w"], (1.0, 1e6, 1e-9), strict=True):
            x = layer(w, x, factor).nan_to_num(posinf=1.0, neginf=-1.0)
        return x.float().square().mean() + params["w"][2].square().mean()

    for more in ((), (ft.remat(),), (ft.accumulate(2),), (ft.compiled(backend="aot_eager"),)):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.with_amp("fp16", watch=True), *more)
        state = step.init({"w": [torch.eye(8) for _ in range(3)]})
        _, metrics = step(state, data()[0])
        shares = {name: float(value) for name, value in metrics.items() if name.startswith(("overflow", "underflow"))}
        assert {name for name, share in shares.items() if share > 0.5} == {"overflow/layer.1", "underflow/layer.2"}
        assert len(shares) == 6


def test_a_pure_loss_without_marks():
    step = make(squares, ft.with_amp("bf16", watch=True))
    state = step.init({"w": torch.ones(3), "b": torch.zeros(())})
    with failing(ComposeError, "watch=True", "squares", "ft.block"):
        step(state, {"x": torch.ones(2, 3), "y": torch.ones(2)})


def test_marked_functions_that_cannot_be_run_twice():
    @ft.block
    def layer(w, x, cache):
        return x @ w

    step = ft.compose(
        ft.train_step(lambda params, batch: layer(params["w"], batch, object()).sum(), ft.optim.sgd(0.1)),
        ft.with_amp("bf16", watch=True),
    )
    with failing(ComposeError, "watch=True", "no part that can be watched"):
        step(step.init({"w": torch.eye(8)}), data()[0])


def test_adapters_are_watched_where_they_are():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    step = ft.compose(
        ft.train_step(ft.from_module(model, criterion), ft.optim.sgd(0.1)),
        ft.lora(2, targets=["0"]),
        ft.with_amp("fp16", watch=True),
    )
    state = step.init()
    big = tree.map(lambda leaf: torch.full_like(leaf, 500.0), state.params)
    _, metrics = step(ft.types.replace(state, params=big), data()[0])
    assert float(metrics["overflow/0"]) > 0.9
    assert float(metrics["overflow/1"]) == 0


def test_what_would_be_written_twice_is_not_run_twice():
    """A cache, as those of transformers; a part that writes its input in place."""

    class Cache:
        calls = 0

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x, cache):
            cache.calls += 1
            return self.inner(x)

    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2.0)

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.part, self.act = nn.Linear(8, 8), Remembers(), nn.ReLU(inplace=True)
            self.twice = Doubles()

        def forward(self, x):
            return self.act(self.part(self.first(self.twice(x + 0.0)), cache))

    cache = Cache()
    model = InPlace()
    watched, (metrics,) = run(build(model=model, dtype="bf16"), 1)
    assert cache.calls == 1 + 1  # The whole runs twice.
    assert {name.split("/")[1] for name in metrics if "/" in name} == {
        "(model)",
        "first",
        "part.inner",
        "act",
        "twice",
    }
    plain, (other,) = run(build(model=model, dtype="bf16", watch=False), 1)
    assert_bitwise(watched, plain)
    assert torch.equal(metrics["loss"], other["loss"])


def test_what_a_part_keeps_is_what_it_keeps_unwatched():
    """A mask that is made when a part first runs, in the dtype that it runs in."""

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

    seen = []
    for watch in (True, False):
        model = nn.Sequential(Table(), nn.Sequential(), nn.Linear(8, 8))
        state, _ = run(build(model=model, dtype="bf16", watch=watch), 2)
        seen.append((state, model[0].table, model[0].runs))
    assert_bitwise(seen[0][0], seen[1][0])
    assert seen[0][1].dtype == seen[1][1].dtype == torch.bfloat16
    assert seen[0][2] == seen[1][2] == [0, 1]


def test_a_part_that_does_not_run_in_float32():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        def forward(self, x):
            return torch.mm(x.half(), self.weight) if x.dtype == torch.float32 else x @ self.weight

    step = build(model=Halves())
    with failing(LossError, "watch=True", "a second time in float32", "(model)"):
        step(step.init(), data()[0])


def test_an_evaluation_of_a_watched_loss():
    step = build()
    state = step.init()
    actual = ft.evaluate(ft.eval_step(step.loss), state, data())
    assert actual["overflow/parts.1.2"] > 0.9
    assert actual["underflow/parts.3.1"] == 1.0
    assert not any("grad" in name for name in actual)
    assert ft.precision_report(actual).rows[0].part == "parts.1.2"


def test_the_history_of_a_run_makes_a_table():
    step = build(model=Broken(1.0, 1e-9), inner=())
    batches = data(4)
    batches[2] = batches[2] * 1e5
    _, history = ft.fit(step, step.init(), batches, progress=False)
    report = ft.precision_report(history)
    assert report.rows[0].part == "parts.0"
    assert report.rows[0].first == 3
    assert report.rows[0].overflow == pytest.approx(history["overflow/parts.0"][2] / 4)
    shown = repr(report).splitlines()
    assert " ".join(shown[0].split()) == "part overflow underflow grad overflow grad underflow first step"
    assert shown[1].startswith("parts.0")
    assert "lose nothing" in shown[-1]
    assert isinstance(report, ft.PrecisionReport)


def test_the_order_of_the_table():
    report = ft.precision_report(
        [
            {"step": 1, "overflow/a": 0.0, "overflow/a.b": 0.0, "overflow/c": 0.0, "overflow/(model)": 0.0},
            {"step": 2, "overflow/a": 0.9, "overflow/a.b": 0.2, "overflow/c": 0.0, "overflow/(model)": 1.0},
            {"step": 3, "overflow/a": 0.9, "overflow/a.b": 0.2, "overflow/c": 0.8, "overflow/(model)": 1.0},
            {
                "step": 3,
                "underflow/d": 0.5,
                "grad_underflow/e": 0.75,
                "grad_overflow/f": 0.1,
                "underflow/g": float("nan"),
            },
        ]
    )
    # Where it begins, by the step; what has it within, from inner to outer; what vanishes, by how much; the rest.
    assert [row.part for row in report.rows] == ["a.b", "c", "(model)", "a", "f", "e", "d", "g"]
    assert report.rows[-1][1:] == (0.0, 0.0, 0.0, 0.0, None)
    assert "<0.01%" in repr(ft.precision_report({"overflow/x": 1e-9}))


@pytest.mark.parametrize("actual", [{}, [], {"loss": 1.0}, {"overflow": 1.0}])
def test_nothing_to_report(actual):
    with failing(OptionError, "precision_report", "watch=True"):
        ft.precision_report(actual)


@pytest.mark.parametrize("actual", [ft.fit, None, 5, "overflow/a", [None], [{"overflow/a": 1.0}, 3]])
def test_what_is_no_metrics(actual):
    with failing(OptionError, "precision_report", "needs the metrics of a step, or the history of ft.fit"):
        ft.precision_report(actual)


def test_tf32_is_not_watched():
    with failing(OptionError, "with_amp", "tf32", "watch bf16 or fp16"):
        ft.with_amp("tf32", watch=True)


def test_it_prints_and_the_display_leaves_it_out():
    assert "with_amp(fp16, watch)" in repr(build())
    metrics = {"loss": 1.0, "overflow/a": 0.5, "grad_underflow/b": 0.5}
    assert "flow" not in progress.describe(metrics, {}, 1.0, 0)


def test_a_metric_of_that_name_is_refused():
    def loss(model, batch):
        return criterion(model, batch), {"overflow/parts.0": torch.ones(())}

    step = ft.compose(ft.train_step(ft.from_module(Broken(), loss), ft.optim.sgd(0.1)), ft.with_amp("fp16", watch=True))
    with failing(LossError, "with_amp", "overflow/parts.0"):
        step(step.init(), data()[0])
