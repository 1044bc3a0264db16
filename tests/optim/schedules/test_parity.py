"""The values of transformers and torch, over 200 steps."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ftrain.errors import OptionError
from ftrain.optim import schedules as s
from tests.exhaustive import exhaustive
from tests.optim.schedules.cases import STEPS, ours

PEAK = 3e-4
TOTAL = 150


def values_of(make: Any, peak: float, steps: int = STEPS) -> list[float]:
    """The learning rates that one of torch's schedulers sets."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = make(optimizer)
    values = []
    for step in range(steps):
        values.append(scheduler.get_last_lr()[0])
        if step < steps - 1:
            optimizer.step()
            scheduler.step()
    return values


# What a transformers configuration may hold: name, options of the schedule.
CONFIGURED: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("linear", {}),
    ("cosine", {}),
    *(("cosine", {"num_cycles": waves}) for waves in (0.3, 1.0, 2.5)),
    ("cosine_with_restarts", {}),
    # In 22 cycles and in others transformers has 0 at some restarts, where floats do not quite reach them.
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
    # The two shapes do not meet: each occurs once on each side.
    *(
        ("warmup_stable_decay", {"num_decay_steps": 40, "warmup_type": up, "decay_type": down, "min_lr_ratio": ratio})
        for up, down in (("linear", "cosine"), ("cosine", "1-sqrt"), ("1-sqrt", "linear"))
        for ratio in (0.0, 0.3)
    ),
]
RISE_AGAIN = {"cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr"}
"""Theirs goes on after `TOTAL`, where ours holds the end."""


class TestTransformers:
    @pytest.mark.parametrize(("name", "options"), CONFIGURED)
    @pytest.mark.parametrize("warmup", [0, 20, *exhaustive([1, 100])])
    def test_values_of_get_scheduler(self, name: str, options: dict[str, Any], warmup: int) -> None:
        from transformers import get_scheduler
        from transformers.trainer_utils import SchedulerType

        arguments = {"num_warmup_steps": warmup, "num_training_steps": TOTAL, "scheduler_specific_kwargs": options}
        with warnings.catch_warnings():
            # That num_stable_steps counts more than num_training_steps, as it does here.
            warnings.simplefilter("ignore", UserWarning)
            theirs = values_of(lambda optimizer: get_scheduler(name, optimizer, **arguments), PEAK)
        schedule = s.named(name, PEAK, warmup, TOTAL, **options)
        actual = ours(schedule)
        assert actual[:TOTAL] == theirs[:TOTAL]
        if name in RISE_AGAIN:
            assert len(set(actual[TOTAL:])) == 1
        else:
            assert actual[TOTAL:] == pytest.approx(theirs[TOTAL:], rel=1e-15, abs=0)
        if name in {"cosine", "cosine_with_min_lr"}:
            assert actual[TOTAL] == pytest.approx(theirs[TOTAL], rel=0, abs=math.ulp(PEAK))
        assert s.named(SchedulerType(name), PEAK, warmup=warmup, total=TOTAL, **options) == schedule
        assert eval(repr(schedule), vars(s).copy()) == schedule

    @pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "cosine_warmup_with_min_lr"])
    def test_a_run_that_is_all_warmup(self, name: str) -> None:
        from transformers import get_scheduler

        options = {"min_lr": PEAK / 10} if "min" in name else {}
        counts = {"num_warmup_steps": TOTAL, "num_training_steps": TOTAL, "scheduler_specific_kwargs": options}
        theirs = values_of(lambda optimizer: get_scheduler(name, optimizer, **counts), PEAK)
        assert ours(s.named(name, PEAK, TOTAL, TOTAL, **options))[:TOTAL] == theirs[:TOTAL]

    @pytest.mark.parametrize("warmup", [0, 1, 2, 20])
    def test_a_warmup_that_begins_elsewhere_to_the_last_bit_but_one(self, warmup: int) -> None:
        from transformers import optimization

        options = {"min_lr_rate": 0.1, "warmup_lr_rate": 0.03}
        counts = {"num_warmup_steps": warmup, "num_training_steps": TOTAL}
        make = optimization.get_cosine_with_min_lr_schedule_with_warmup_lr_rate
        theirs = values_of(lambda optimizer: make(optimizer, **counts, **options), PEAK)
        actual = s.named("cosine_warmup_with_min_lr", PEAK, warmup, TOTAL, **options)
        assert ours(actual)[:TOTAL] == pytest.approx(theirs[:TOTAL], rel=1e-15, abs=0)
        assert eval(repr(actual), vars(s).copy()) == actual

    def test_all_names_but_those_that_need_more_than_the_step(self) -> None:
        from transformers.trainer_utils import SchedulerType

        with pytest.raises(OptionError) as caught:
            s.named("cosign", PEAK)
        ours = set(str(caught.value).partition("choices are ")[2].rstrip(".").split(", "))
        others = {"reduce_lr_on_plateau", "greedy"}
        assert ours | others >= {each.value for each in SchedulerType}
        assert ours == {name for name, _ in CONFIGURED}


class TestTorch:
    def test_polynomial(self) -> None:
        theirs = values_of(lambda o: lr_scheduler.PolynomialLR(o, total_iters=50, power=2.0), PEAK)
        assert ours(s.polynomial(PEAK, 50, power=2)) == pytest.approx(theirs, rel=1e-12)

    @pytest.mark.parametrize("end", [0.0, 1e-5])
    def test_cosine(self, end: float) -> None:
        theirs = values_of(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL, eta_min=end), PEAK, TOTAL + 1)
        assert ours(s.cosine(PEAK, TOTAL, end), TOTAL + 1) == pytest.approx(theirs, rel=1e-10, abs=1e-18)

    @pytest.mark.parametrize(("every", "factor"), [(30, 0.1), (1, 0.97), (7, 0.5), (500, 0.1)])
    def test_step(self, every: int, factor: float) -> None:
        # Theirs multiplies the rate that is there, which adds a rounding each time; its closed form does not.
        theirs = values_of(lambda o: lr_scheduler.StepLR(o, every, factor), PEAK)
        assert ours(s.step_decay(PEAK, every, factor)) == pytest.approx(theirs, rel=1e-13)
        assert ours(s.step_decay(PEAK, every, factor)) == closed_form(lambda o: lr_scheduler.StepLR(o, every, factor))

    @pytest.mark.parametrize("factor", [0.9, 0.999, 1.0])
    def test_exponential(self, factor: float) -> None:
        theirs = values_of(lambda o: lr_scheduler.ExponentialLR(o, factor), PEAK)
        assert ours(s.exponential(PEAK, factor)) == pytest.approx(theirs, rel=1e-13)
        assert ours(s.exponential(PEAK, factor)) == closed_form(lambda o: lr_scheduler.ExponentialLR(o, factor))

    def test_milestones(self) -> None:
        theirs = values_of(lambda o: lr_scheduler.MultiStepLR(o, [30, 31, 120], 0.1), 1.0)
        actual = ours(s.piecewise({0: 1.0, 30: 0.1, 31: 0.01, 120: 0.001}))
        assert actual == pytest.approx(theirs, rel=1e-15)

    @pytest.mark.parametrize("total", [2, 10, 150, 200])
    @pytest.mark.parametrize(
        ("rise", "three_phase", "shape"),
        [(0.3, False, "cosine"), (0.3, True, "linear"), (0.07, False, "linear"), (0.5, True, "cosine")],
    )
    def test_one_cycle(self, total: int, shape: str, rise: float, three_phase: bool) -> None:
        def make(optimizer):
            options = {"pct_start": rise, "anneal_strategy": shape[:3] if shape == "cosine" else shape}
            return lr_scheduler.OneCycleLR(
                optimizer, PEAK, total, three_phase=three_phase, cycle_momentum=False, **options
            )

        actual = ours(s.one_cycle(PEAK, total, rise=rise, shape=shape, three_phase=three_phase))
        if rise * total == 1:
            assert actual[0] == PEAK, "where torch divides by zero"
            return
        theirs = values_of(make, PEAK, total)
        assert actual[:total] == theirs
        assert set(actual[total:]) <= {theirs[-1]}

    def test_one_cycle_with_other_ends(self) -> None:
        theirs = values_of(
            lambda o: lr_scheduler.OneCycleLR(
                o, PEAK, STEPS, div_factor=10.0, final_div_factor=100.0, cycle_momentum=False
            ),
            PEAK,
        )
        assert ours(s.one_cycle(PEAK, STEPS, start=PEAK / 10, end=PEAK / 10 / 100)) == theirs

    @pytest.mark.parametrize("end", [0.0, 1e-5])
    def test_warm_restarts(self, end: float) -> None:
        theirs = values_of(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50, eta_min=end), PEAK)
        actual = ours(s.cosine_restarts(PEAK, STEPS, STEPS // 50, end))
        assert actual == pytest.approx(theirs, rel=1e-12, abs=4 * math.ulp(PEAK))

    def test_warm_restarts_that_grow(self) -> None:
        theirs = values_of(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 20, T_mult=2), PEAK)
        parts = [s.cosine(PEAK, 20 * 2**i) for i in range(4)]
        assert ours(s.chain(parts, [20, 60, 140])) == pytest.approx(theirs, rel=1e-12, abs=4 * math.ulp(PEAK))

    def test_sequence(self) -> None:
        def make(optimizer):
            parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 1000), lr_scheduler.ExponentialLR(optimizer, 0.9)]
            return lr_scheduler.SequentialLR(optimizer, parts, [20])

        chained = s.chain([0.1 * PEAK, s.exponential(PEAK, 0.9)], [20])
        assert ours(chained) == pytest.approx(values_of(make, PEAK), rel=1e-12)


def closed_form(make: Any) -> list[float]:
    """What a scheduler of torch sets where it is told the step, without what came before."""
    scheduler = make(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK))
    values = []
    for step in range(STEPS):
        scheduler.last_epoch = step
        values.append(scheduler._get_closed_form_lr()[0])
    return values
