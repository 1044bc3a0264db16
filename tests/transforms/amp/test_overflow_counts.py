"""`with_amp(watch=True)` counts the overflows and underflows of each part exactly, and changes no bit of a step."""

import pytest
import torch
from torch import nn

import ftrain as ft
from tests.bits import assert_same_bits
from tests.exhaustive import choose
from tests.laws.models import make_batch, make_model, token_loss
from tests.transforms.amp.watched_models import FaultyNet, Times, build, metrics_of_one_step, parts_in, run, shares_in
from tests.transforms.modes import CAPTURED

CAPTURED_AND_DONATED = ft.compiled(lowering="whole", backend="eager", donate=True)
WRAPPERS = {
    "plain": ((), ()),
    "remat outside": ((), (ft.remat(blocks=["parts.1", "parts.3"]),)),
    "remat inside": ((ft.remat(blocks=["parts.1", "parts.3"]),), ()),
    "remat dots": ((), (ft.remat("dots", blocks=["parts.1", "parts.3"]),)),
    "remat budget": ((), (ft.remat(blocks=["parts.1", "parts.3"], budget=0.5),)),
    "accumulate": ((), (ft.accumulate(2),)),
    "accumulate inside": ((ft.accumulate(4), ft.clip(1.0)), ()),
    "donated": ((), (ft.donated(), ft.ema(0.9))),
    "whole": ((), (CAPTURED,)),
    "whole, donated": ((), (ft.remat(blocks=["parts.1"]), CAPTURED_AND_DONATED)),
    "split": ((), (ft.compiled(lowering="split", backend="aot_eager"),)),
}
"""Wrappers within and around `with_amp`."""

NOT_EXHAUSTIVE = "plain", "remat inside", "remat dots", "accumulate", "whole, donated", "split"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("wrappers", choose(WRAPPERS, NOT_EXHAUSTIVE))
def test_an_overflow_and_an_underflow_are_found_where_they_were_planted(wrappers):
    inner, outer = WRAPPERS[wrappers]
    metrics = metrics_of_one_step(*outer, inner=inner)
    assert all(isinstance(value, torch.Tensor) and value.shape == () for name, value in metrics.items() if "/" in name)
    shares = shares_in(metrics)
    # The part and the part that contains it, but no later part, which has infinite inputs.
    assert {name for name, share in shares.items() if name.startswith("overflow/") and share} == {
        "overflow/parts.1.2",
        "overflow/parts.1",
    }
    # Dropout made the other outputs zero.
    assert shares["overflow/parts.1.2"] > 0.5
    assert {name for name, share in shares.items() if name.startswith("underflow/") and share > 0.5} == {
        "underflow/parts.3.1",
        "underflow/parts.3",
    }
    assert shares["underflow/parts.3.1"] == 1.0
    # The gradient vanishes on its way back through the same part.
    assert shares["grad_underflow/parts.3.0"] == 1.0
    assert shares["grad_underflow/parts.3.1"] < 0.1
    rows = ft.precision_report(metrics).rows
    assert [row.part for row in rows[:2]] == ["parts.1.2", "parts.1"]
    assert {row.part for row in rows} == {
        "(model)",
        *(name for name, _ in FaultyNet().named_modules() if "parts." in name),
    }


@pytest.mark.parametrize(
    ("wrappers", "dtype"),
    [
        *((wrappers, "fp16") for wrappers in WRAPPERS if wrappers not in ("whole", "split")),
        ("plain", "bf16"),
        # "whole, donated" is captured as well.
        pytest.param("whole", "fp16", marks=pytest.mark.exhaustive),
    ],
)
def test_a_watched_step_is_the_same_to_the_bit(wrappers, dtype):
    inner, outer = WRAPPERS[wrappers]
    options = {"inner": inner, "model": FaultyNet(1.0, 1.0), "dtype": dtype}
    watched, history = run(build(*outer, **options), 3)
    unwatched, expected_history = run(build(*outer, **options, watch=False), 3)
    assert_same_bits(watched, unwatched)
    for metrics, expected in zip(history, expected_history, strict=True):
        assert_same_bits({name: value for name, value in metrics.items() if "/" not in name}, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_split_step_runs_a_watched_loss_uncompiled():
    model, (_, outer) = FaultyNet(1.0, 1.0), WRAPPERS["split"]
    torch._dynamo.utils.counters.clear()
    watched, _ = run(build(*outer, model=model), 3)
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    eager, _ = run(build(model=model, watch=False), 3)
    torch.testing.assert_close(watched.params, eager.params)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_buffers_ties_and_metrics_of_the_loss_stay_as_they_are(policy, dtype):
    """With blocks that are recomputed, BatchNorm advances once, and dropout draws the same bits."""

    def run_tiny(watch):
        loss_fn = ft.from_module(make_model(0.3, torch.float32), token_loss)
        step = ft.compose(
            ft.train_step(loss_fn, ft.optim.adamw(0.05)),
            ft.remat(policy),
            ft.with_amp(dtype, watch=watch),
            ft.accumulate(2),
        )
        state = step.init()
        for index in range(3):
            state, metrics = step(state, make_batch(index))
        return state, metrics

    watched, metrics = run_tiny(watch=True)
    unwatched, expected = run_tiny(watch=False)
    assert_same_bits(watched, unwatched)
    assert float(metrics["accuracy"]) == float(expected["accuracy"])
    assert parts_in(metrics) >= {"embed", "blocks.0", "blocks.1.up", "head"}


def test_shares_are_exact():
    """Compared with counts by hand, for a part that is called twice, on tensors of different sizes."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.times = Times(torch.tensor([2.0**10, 1.0, 2.0**-10, 2.0**-20, 1.0, 1.0], dtype=torch.float16))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.times(x.half() * self.scale.half()), self.times(x[:1].half() * self.scale.half())

    def bounded_sum(model, batch):
        return sum(output.float().clamp(max=1.0).sum() for output in model(batch)) / 1e3

    # In float16, 128 * 2**10 is infinite, 2**-10 * 2**-10 subnormal, and 2**-10 * 2**-20 zero. 2**-40 is zero already
    # as an input. The first row, which the second call has alone, does not overflow.
    x = torch.tensor([128.0, 1.0, 2.0**-10, 2.0**-10, 2.0**-40, 0.0]).repeat(4, 1)
    x[0, 0] = 1.0
    step = ft.train_step(ft.from_module(Twice(), bounded_sum), ft.optim.sgd(0.0))
    step = ft.with_amp("fp16", watch=True)(step)
    _, metrics = step(step.init(), x)
    # Of 6 elements in each of 4 + 1 rows.
    assert float(metrics["overflow/times"]) == pytest.approx(3 / 30)
    assert float(metrics["underflow/times"]) == pytest.approx((5 + 5) / 30)


def test_gradients_are_counted_with_the_loss_scale():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4, bias=False), Times(1.0)

        def forward(self, x):
            return self.down(self.up(x))

    # Times the loss scale 2**16, 2**-15 is subnormal, 2**-9 is not, 0 does not count, and 2**16 is infinite.
    factors = torch.tensor([2.0**-31, 2.0**-25, 0.0, 1.0])
    loss_fn = ft.from_module(Scaled(), lambda model, batch: (model(batch).float() * factors).sum())
    step = ft.compose(ft.train_step(loss_fn, ft.optim.sgd(0.0)), ft.with_amp("fp16", watch=True))
    _, metrics = step(step.init(), torch.ones(2, 4))
    assert float(metrics["grad_underflow/down"]) == pytest.approx(1 / 3)
    assert float(metrics["grad_overflow/down"]) == pytest.approx(1 / 4)
    assert bool(metrics["skipped"])


def test_outputs_that_are_not_finite_in_float32_either_do_not_count():
    model = nn.Sequential(nn.Linear(8, 8), Times(float("nan")), nn.Linear(8, 1))
    shares = shares_in(metrics_of_one_step(model=model))
    assert shares["overflow/1"] == 0
    assert all(share == 0 for name, share in shares.items() if name.startswith(("overflow/", "underflow/")))


def test_bfloat16_has_the_range_of_float32():
    shares = shares_in(metrics_of_one_step(dtype="bf16"))
    assert all(share == 0 for name, share in shares.items() if "overflow/" in name)
    assert shares["underflow/parts.3.1"] == 0
    # But no more than that.
    shares = shares_in(metrics_of_one_step(dtype="bf16", model=FaultyNet(1.0, 1e-39)))
    assert shares["underflow/parts.3.1"] == 1
