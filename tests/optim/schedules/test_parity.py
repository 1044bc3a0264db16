"""Schedules have the values of those of transformers and torch, over 200 steps."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ftrain.errors import OptionError
from ftrain.optim import schedules as s
from tests.exhaustive import exhaustive
from tests.optim.schedules.cases import STEPS, first_values

PEAK = 3e-4
TOTAL = 150


def scheduler_rates(make: Any, peak: float, steps: int = STEPS) -> list[float]:
    """Return the learning rates that the scheduler `make(optimizer)` of torch sets."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = make(optimizer)
    values = []
    for step in range(steps):
        values.append(scheduler.get_last_lr()[0])
        if step < steps - 1:
            optimizer.step()
            scheduler.step()
    return values


CONFIGURED: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    *(("cosine", {"num_cycles": waves}) for waves in (0.3, 1.0, 2.5)),
    ("cosine_with_restarts", {}),
    # With 22 cycles and some other numbers, rounding makes the rate of transformers 0 at some restarts.
    *(("cosine_with_restarts", {"num_cycles": cycles}) for cycles in (2, 3, 7, 21)),
    *(("cosine_with_min_lr", {"min_lr": end}) for end in (1e-5, 1e-7, 2.9e-4)),
    *(("cosine_with_min_lr", {"min_lr_rate": rate}) for rate in (0.1, 0.3)),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.4}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-5}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.4}),
    ("polynomial", {}),
    *(("polynomial", {"lr_end": end, "power": power}) for end, power in ((0.0, 1.0), (1e-5, 2.0), (1e-6, 0.5))),
    ("inverse_sqrt", {}),
    *(("inverse_sqrt", {"timescale": timescale}) for timescale in (1, 50, 5000)),
    *(("warmup_stable_decay", {"num_decay_steps": decay}) for decay in (0, 50)),
    ("warmup_stable_decay", {"num_decay_steps": 50, "num_stable_steps": 20}),
    # The shapes of the two sides are independent, so each shape occurs once on each side.
    *(
        ("warmup_stable_decay", {"num_decay_steps": 40, "warmup_type": up, "decay_type": down, "min_lr_ratio": ratio})
        for up, down in (("linear", "cosine"), ("cosine", "1-sqrt"), ("1-sqrt", "linear"))
        for ratio in (0.0, 0.3)
    ),
]
"""Name of a schedule in a configuration of transformers, and its options."""

RISE_AGAIN = {"cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr"}
"""Schedules that go on after `TOTAL` in transformers; those of ftrain hold their last value."""


class TestTransformers:
    @pytest.mark.parametrize(("name", "options"), CONFIGURED)
    @pytest.mark.parametrize("warmup", [0, 20, *exhaustive([1, 100])])
    def test_named_equals_get_scheduler(self, name: str, options: dict[str, Any], warmup: int) -> None:
        from transformers import get_scheduler
        from transformers.trainer_utils import SchedulerType

        arguments = {"num_warmup_steps": warmup, "num_training_steps": TOTAL, "scheduler_specific_kwargs": options}
        with warnings.catch_warnings():
            # The warning says that num_stable_steps overrides num_training_steps, as this test intends.
            warnings.simplefilter("ignore", UserWarning)
            expected = scheduler_rates(lambda optimizer: get_scheduler(name, optimizer, **arguments), PEAK)
        schedule = s.named(name, PEAK, warmup, TOTAL, **options)
        actual = first_values(schedule)
        assert actual[:TOTAL] == expected[:TOTAL]
        if name in RISE_AGAIN:
            assert len(set(actual[TOTAL:])) == 1
        else:
            assert actual[TOTAL:] == pytest.approx(expected[TOTAL:], rel=1e-15, abs=0)
        if name in {"cosine", "cosine_with_min_lr"}:
            assert actual[TOTAL] == pytest.approx(expected[TOTAL], rel=0, abs=math.ulp(PEAK))
        assert s.named(SchedulerType(name), PEAK, warmup=warmup, total=TOTAL, **options) == schedule
        assert eval(repr(schedule), vars(s).copy()) == schedule

    @pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "cosine_warmup_with_min_lr"])
    def test_a_run_of_warmup_alone(self, name: str) -> None:
        from transformers import get_scheduler

        options = {"min_lr": PEAK / 10} if "min" in name else {}
        counts = {"num_warmup_steps": TOTAL, "num_training_steps": TOTAL, "scheduler_specific_kwargs": options}
        expected = scheduler_rates(lambda optimizer: get_scheduler(name, optimizer, **counts), PEAK)
        assert first_values(s.named(name, PEAK, TOTAL, TOTAL, **options))[:TOTAL] == expected[:TOTAL]

    @pytest.mark.parametrize("warmup", [0, 1, 2, 20])
    def test_a_warmup_that_does_not_start_at_0_equals_that_of_transformers_up_to_rounding(self, warmup: int) -> None:
        from transformers import optimization

        options = {"min_lr_rate": 0.1, "warmup_lr_rate": 0.03}
        counts = {"num_warmup_steps": warmup, "num_training_steps": TOTAL}
        make = optimization.get_cosine_with_min_lr_schedule_with_warmup_lr_rate
        expected = scheduler_rates(lambda optimizer: make(optimizer, **counts, **options), PEAK)
        actual = s.named("cosine_warmup_with_min_lr", PEAK, warmup, TOTAL, **options)
        assert first_values(actual)[:TOTAL] == pytest.approx(expected[:TOTAL], rel=1e-15, abs=0)
        assert eval(repr(actual), vars(s).copy()) == actual

    def test_named_knows_all_names_of_transformers_except_those_that_need_metrics(self) -> None:
        from transformers.trainer_utils import SchedulerType

        with pytest.raises(OptionError) as caught:
            s.named("cosign", PEAK)
        names = set(str(caught.value).partition("choices are ")[2].rstrip(".").split(", "))
        needing_metrics = {"reduce_lr_on_plateau", "greedy"}
        assert names | needing_metrics >= {scheduler_type.value for scheduler_type in SchedulerType}
        assert names == {name for name, _ in CONFIGURED}


class TestTorch:
    def test_polynomial(self) -> None:
        expected = scheduler_rates(lambda o: lr_scheduler.PolynomialLR(o, total_iters=50, power=2.0), PEAK)
        assert first_values(s.polynomial(PEAK, 50, power=2)) == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("end", [0.0, 1e-5])
    def test_cosine(self, end: float) -> None:
        expected = scheduler_rates(
            lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL, eta_min=end), PEAK, TOTAL + 1
        )
        assert first_values(s.cosine(PEAK, TOTAL, end), TOTAL + 1) == pytest.approx(expected, rel=1e-10, abs=1e-18)

    @pytest.mark.parametrize(("every", "factor"), [(30, 0.1), (1, 0.97), (7, 0.5), (500, 0.1)])
    def test_step(self, every: int, factor: float) -> None:
        # Torch multiplies the current rate, which adds a rounding error each time; its closed form does not.
        expected = scheduler_rates(lambda o: lr_scheduler.StepLR(o, every, factor), PEAK)
        assert first_values(s.step_decay(PEAK, every, factor)) == pytest.approx(expected, rel=1e-13)
        assert first_values(s.step_decay(PEAK, every, factor)) == closed_form(
            lambda o: lr_scheduler.StepLR(o, every, factor)
        )

    @pytest.mark.parametrize("factor", [0.9, 0.999, 1.0])
    def test_exponential(self, factor: float) -> None:
        expected = scheduler_rates(lambda o: lr_scheduler.ExponentialLR(o, factor), PEAK)
        assert first_values(s.exponential(PEAK, factor)) == pytest.approx(expected, rel=1e-13)
        assert first_values(s.exponential(PEAK, factor)) == closed_form(lambda o: lr_scheduler.ExponentialLR(o, factor))

    def test_milestones(self) -> None:
        expected = scheduler_rates(lambda o: lr_scheduler.MultiStepLR(o, [30, 31, 120], 0.1), 1.0)
        actual = first_values(s.piecewise({0: 1.0, 30: 0.1, 31: 0.01, 120: 0.001}))
        assert actual == pytest.approx(expected, rel=1e-15)

    @pytest.mark.parametrize("total", [2, 10, 150, 200])
    @pytest.mark.parametrize(
        ("rise", "three_phase", "shape"),
        [(0.3, False, "cosine"), (0.3, True, "linear"), (0.07, False, "linear"), (0.5, True, "cosine")],
    )
    def test_one_cycle(self, total: int, shape: str, rise: float, three_phase: bool) -> None:
        def make(optimizer):
            options = {"pct_start": rise, "anneal_strategy": {"cosine": "cos", "linear": "linear"}[shape]}
            return lr_scheduler.OneCycleLR(
                optimizer, PEAK, total, three_phase=three_phase, cycle_momentum=False, **options
            )

        actual = first_values(s.one_cycle(PEAK, total, rise=rise, shape=shape, three_phase=three_phase))
        if rise * total == 1:
            # Torch divides by zero.
            assert actual[0] == PEAK
            return
        expected = scheduler_rates(make, PEAK, total)
        assert actual[:total] == expected
        assert set(actual[total:]) <= {expected[-1]}

    def test_one_cycle_with_other_ends(self) -> None:
        expected = scheduler_rates(
            lambda o: lr_scheduler.OneCycleLR(
                o, PEAK, STEPS, div_factor=10.0, final_div_factor=100.0, cycle_momentum=False
            ),
            PEAK,
        )
        assert first_values(s.one_cycle(PEAK, STEPS, start=PEAK / 10, end=PEAK / 10 / 100)) == expected

    @pytest.mark.parametrize("end", [0.0, 1e-5])
    def test_warm_restarts(self, end: float) -> None:
        expected = scheduler_rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50, eta_min=end), PEAK)
        actual = first_values(s.cosine_restarts(PEAK, STEPS, STEPS // 50, end))
        assert actual == pytest.approx(expected, rel=1e-12, abs=4 * math.ulp(PEAK))

    def test_warm_restarts_that_grow(self) -> None:
        expected = scheduler_rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 20, T_mult=2), PEAK)
        parts = [s.cosine(PEAK, 20 * 2**i) for i in range(4)]
        assert first_values(s.chain(parts, [20, 60, 140])) == pytest.approx(expected, rel=1e-12, abs=4 * math.ulp(PEAK))

    def test_chain_equals_a_sequential_scheduler(self) -> None:
        def make(optimizer):
            parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 1000), lr_scheduler.ExponentialLR(optimizer, 0.9)]
            return lr_scheduler.SequentialLR(optimizer, parts, [20])

        chained = s.chain([0.1 * PEAK, s.exponential(PEAK, 0.9)], [20])
        assert first_values(chained) == pytest.approx(scheduler_rates(make, PEAK), rel=1e-12)


def closed_form(make: Any) -> list[float]:
    """Return the learning rates that a scheduler of torch computes from the step alone."""
    scheduler = make(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK))
    values = []
    for step in range(STEPS):
        scheduler.last_epoch = step
        values.append(scheduler._get_closed_form_lr()[0])
    return values
