"""Values of schedules: warm-up, decay and end, chains, and edge cases."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ftrain as ft
from ftrain.optim.schedules import (
    chain,
    constant,
    cosine,
    cosine_restarts,
    exponential,
    inverse_sqrt,
    linear,
    one_cycle,
    piecewise,
    polynomial,
    scale,
    step_decay,
    warmup_constant,
    warmup_cosine,
    warmup_cosine_restarts,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_stable_decay,
)
from ftrain.types import Schedule
from tests.optim.schedules.cases import (
    UNTIMED,
    any_schedule,
    counts,
    cycles,
    decays,
    factors,
    first_values,
    points,
    rates,
    stables,
)


class TestValues:
    @UNTIMED
    @given(decays())
    def test_warmup_rises_linearly_to_the_peak(self, case) -> None:
        schedule, peak, end, warmup, total = case
        rise = [schedule(k) for k in range(warmup)]
        assert rise == [peak * (k / warmup) for k in range(warmup)]
        assert all(a < b for a, b in itertools.pairwise(rise))
        assert schedule(warmup) == (peak if warmup < total else end)

    @UNTIMED
    @given(decays())
    def test_decay_is_monotone_between_peak_and_end(self, case) -> None:
        schedule, peak, end, warmup, total = case
        values = [schedule(k) for k in range(warmup, total + 1)]
        slack = 2 * math.ulp(max(peak, end))
        assert all(min(peak, end) - slack <= v <= max(peak, end) + slack for v in values)
        sign = 1 if end >= peak else -1
        assert all(sign * (b - a) >= -slack for a, b in itertools.pairwise(values))

    @UNTIMED
    @given(decays(), st.integers(1, 10**9))
    def test_end_is_held(self, case, beyond: int) -> None:
        schedule, _, end, _, total = case
        assert schedule(total) == schedule(total + beyond) == end

    @UNTIMED
    @given(rates, st.integers(1, 1000), st.integers(1, 100_000))
    def test_no_jump_where_the_warmup_ends(self, peak: float, warmup: int, decay: int) -> None:
        for make in (warmup_linear, warmup_cosine, warmup_polynomial):
            schedule = make(peak, warmup, warmup + decay)
            below, at, above = (schedule(warmup + offset) for offset in (-1, 0, 1))
            assert at == peak
            assert at - below <= peak / warmup * (1 + 1e-9)
            assert at - above <= 2 * peak / decay

    @UNTIMED
    @given(rates, counts, rates)
    def test_without_warmup_is_a_warmup_of_zero(self, peak: float, total: int, end: float) -> None:
        pairs = [
            (constant(peak), warmup_constant(peak, 0)),
            (linear(peak, end, total), warmup_linear(peak, 0, total, end)),
            (cosine(peak, total, end), warmup_cosine(peak, 0, total, end)),
            (polynomial(peak, total, end, 2.0), warmup_polynomial(peak, 0, total, end, 2.0)),
        ]
        for without_warmup, warmup_of_0 in pairs:
            assert first_values(without_warmup) == first_values(warmup_of_0)

    @UNTIMED
    @given(rates, counts, counts, rates)
    def test_linear_is_a_polynomial_of_power_one(self, peak, warmup, decay, end) -> None:
        total = warmup + decay
        line = first_values(warmup_linear(peak, warmup, total, end))
        power = first_values(warmup_polynomial(peak, warmup, total, end))
        assert line == pytest.approx(power, rel=1e-12, abs=4 * math.ulp(peak))

    def test_values_computed_by_hand(self) -> None:
        assert [linear(1.0, 3.0, 4)(k) for k in range(6)] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]
        assert [warmup_polynomial(4.0, 2, 4, 0.0, 2)(k) for k in range(6)] == [0.0, 2.0, 4.0, 1.0, 0.0, 0.0]
        assert warmup_cosine(2.0, 10, 30, end=1.0)(20) == 1.5
        assert [linear(2.0, 1.0, 0)(k) for k in range(3)] == [1.0, 1.0, 1.0]

    @UNTIMED
    @given(any_schedule())
    def test_negative_steps_have_the_first_value(self, schedule: Schedule) -> None:
        assert schedule(-3) == schedule(0)

    @UNTIMED
    @given(any_schedule(), st.integers(0, 200))
    def test_values_are_finite_floats(self, schedule: Schedule, step: int) -> None:
        assert type(schedule(step)) is float
        assert math.isfinite(schedule(step))


class TestChain:
    @UNTIMED
    @given(st.lists(any_schedule(), min_size=1, max_size=4), st.data())
    def test_each_schedule_counts_from_its_own_boundary(self, parts: list[Schedule], data: st.DataObject) -> None:
        size = len(parts) - 1
        boundaries = sorted(data.draw(st.lists(st.integers(0, 80), min_size=size, max_size=size)))
        schedule = chain(parts, boundaries)
        for part, (start, stop) in zip(parts, itertools.pairwise([0, *boundaries, 200]), strict=True):
            assert [schedule(k) for k in range(start, stop)] == [part(k) for k in range(stop - start)]

    def test_numbers_and_plain_functions(self) -> None:
        schedule = chain([1, lambda k: float(k), np.float32(0.5)], [2, 4])
        assert [schedule(k) for k in range(6)] == [1.0, 1.0, 0.0, 1.0, 0.5, 0.5]
        assert repr(schedule) == "chain([constant(1), <lambda>, constant(0.5)], [2, 4])"

    def test_chains_nest(self) -> None:
        inner = chain([constant(1.0), linear(1.0, 0.0, 4)], [2])
        assert [chain([constant(5.0), inner], [3])(k) for k in (0, 3, 5, 7)] == [5.0, 1.0, 1.0, 0.5]


class TestOtherSchedules:
    @UNTIMED
    @given(stables())
    def test_warmup_stable_decay_holds_the_peak_and_the_end(self, case) -> None:
        schedule, start, peak, end, warmup, total, decay = case
        assert set(first_values(schedule)[warmup : total - decay]) <= {peak}
        assert schedule(total) == schedule(total + 1000) == end
        if warmup:
            assert schedule(0) == start
        lowest, highest = min(start, peak, end), max(start, peak, end)
        slack = 2 * math.ulp(highest)
        assert all(lowest - slack <= value <= highest + slack for value in first_values(schedule))

    @UNTIMED
    @given(rates, counts, st.integers(1, 60), st.integers(1, 50), rates)
    def test_every_cycle_starts_at_the_peak(self, peak, warmup, cycles, length, end) -> None:
        total = warmup + cycles * length
        schedule = warmup_cosine_restarts(peak, warmup, total, cycles, end)
        assert [schedule(warmup + cycle * length) for cycle in range(cycles)] == [peak] * cycles
        assert schedule(total) == schedule(total + 1000) == end
        one_cycle_values = first_values(cosine(peak, length, end))[:length]
        slack = 1e-12 * max(peak, end)
        for cycle in range(cycles):
            actual = [schedule(warmup + cycle * length + k) for k in range(length)]
            assert actual == pytest.approx(one_cycle_values, rel=0, abs=slack)

    @UNTIMED
    @given(rates, st.integers(1, 60), st.integers(1, 60))
    def test_inverse_sqrt_halves_when_the_time_quadruples(self, peak: float, warmup: int, timescale: int) -> None:
        assert warmup_inverse_sqrt(peak, warmup)(4 * warmup) == peak / 2
        assert warmup_inverse_sqrt(peak, warmup, timescale)(warmup + 3 * timescale) == peak / 2
        assert first_values(inverse_sqrt(peak, timescale)) == first_values(warmup_inverse_sqrt(peak, 0, timescale))
        assert first_values(inverse_sqrt(peak)) == first_values(warmup_inverse_sqrt(peak, 0))

    @UNTIMED
    @given(rates, factors, st.integers(1, 60))
    def test_step_decay_touches_exponential_decay_at_each_step_down(
        self, value: float, factor: float, steps: int
    ) -> None:
        stairs = step_decay(value, steps, factor)
        smooth = exponential(value, factor, steps)
        assert [stairs(k * steps) for k in range(20)] == [smooth(k * steps) for k in range(20)]
        assert all(stairs(k) >= smooth(k) for k in range(200))
        assert all(stairs(k) == stairs(k - k % steps) for k in range(200))

    @UNTIMED
    @given(cycles())
    def test_one_cycle_stays_between_its_start_peak_and_end(self, schedule: Schedule) -> None:
        arguments = schedule.arguments  # type: ignore[attr-defined]
        peak, total, start, end = (arguments[name] for name in ("peak", "total", "start", "end"))
        start = peak / 25.0 if start is None else start
        end = start / 1e4 if end is None else end
        slack = 4 * math.ulp(max(start, peak, end))
        assert all(min(start, peak, end) - slack <= v <= max(start, peak, end) + slack for v in first_values(schedule))
        assert schedule(total - 1) == schedule(total + 1000) == pytest.approx(end, rel=0, abs=slack)

    def test_one_cycle_computed_by_hand(self) -> None:
        cycle = one_cycle(1.0, 20, rise=0.25, start=0.5, end=0.0, shape="linear", three_phase=True)
        assert [cycle(k) for k in (0, 2, 4, 6, 8, 19, 20)] == [0.5, 0.75, 1.0, 0.75, 0.5, 0.0, 0.0]
        assert one_cycle(1.0, 1)(0) == 1.0 / 25.0 / 1e4
        assert one_cycle(1.0, 10, rise=0.1)(0) == 1.0

    @UNTIMED
    @given(points(), st.sampled_from(["constant", "linear", "cosine"]))
    def test_piecewise_goes_through_its_points(self, value_at: dict[int, float], between: str) -> None:
        schedule = piecewise(value_at, between)
        assert {step: schedule(step) for step in value_at} == value_at
        assert schedule(0) == value_at[min(value_at)]
        assert schedule(10**6) == value_at[max(value_at)]
        for (begin, first), (end, last) in itertools.pairwise(value_at.items()):
            inside = [schedule(k) for k in range(begin, end)]
            slack = 2 * math.ulp(max(first, last))
            assert all(min(first, last) - slack <= value <= max(first, last) + slack for value in inside)
            if between == "constant":
                assert set(inside) == {first}

    @UNTIMED
    @given(points())
    def test_piecewise_is_a_chain(self, value_at: dict[int, float]) -> None:
        steps, values = list(value_at), list(value_at.values())
        assert first_values(piecewise(value_at)) == first_values(chain(values, steps[1:]))
        lines = [linear(a, b, end - begin) for (begin, a), (end, b) in itertools.pairwise(value_at.items())]
        chained = chain([values[0], *lines, values[-1]], steps)
        assert first_values(piecewise(value_at, "linear")) == pytest.approx(first_values(chained), rel=1e-12)

    @UNTIMED
    @given(any_schedule(), rates)
    def test_scale_multiplies_each_value(self, schedule: Schedule, factor: float) -> None:
        assert first_values(scale(schedule, factor)) == [factor * value for value in first_values(schedule)]

    def test_cosine_of_a_whole_wave(self) -> None:
        schedule = cosine(1.0, 8, waves=1.0)
        assert [round(schedule(k), 3) for k in (0, 2, 4, 6, 8, 100)] == [1.0, 0.5, 0.0, 0.5, 1.0, 1.0]


class TestEdges:
    """Runs of warm-up alone or of no steps, peaks of zero or below the end, steps far beyond the end."""

    def test_warmup_alone(self) -> None:
        for make in (warmup_linear, warmup_cosine, warmup_polynomial):
            assert first_values(make(1.0, 4, 4, end=0.5), 7) == [0.0, 0.25, 0.5, 0.75, 0.5, 0.5, 0.5]
        assert first_values(warmup_cosine_restarts(1.0, 4, 4, 3), 7) == [0.0, 0.25, 0.5, 0.75, 0.0, 0.0, 0.0]
        assert first_values(warmup_stable_decay(1.0, 4, 4, 0, end=0.5), 7) == [0.0, 0.25, 0.5, 0.75, 0.5, 0.5, 0.5]

    def test_no_steps(self) -> None:
        for make in (cosine, polynomial):
            assert first_values(make(1.0, 0, 0.5), 3) == [0.5, 0.5, 0.5]
        assert first_values(cosine_restarts(1.0, 0, 2, 0.5), 3) == [0.5, 0.5, 0.5]
        assert first_values(warmup_stable_decay(1.0, 0, 0, 0, 0.5), 3) == [0.5, 0.5, 0.5]

    def test_a_peak_of_zero_or_below_the_end(self) -> None:
        for make in (cosine, polynomial):
            assert first_values(make(0.0, 10), 3) == [0.0, 0.0, 0.0]
            assert make(0.0, 10, 1.0)(5) == 0.5
            assert make(1.0, 10, 3.0)(5) == pytest.approx(2.0)
            assert math.isfinite(make(1e-300, 10, 1e300)(5))
            assert make(-2.0, 10, -1.0)(5) == -1.5

    def test_far_steps(self) -> None:
        for schedule in (exponential(1.0, 0.5), step_decay(1.0, 1), cosine(1.0, 10), one_cycle(1.0, 10)):
            assert 0.0 <= schedule(10**12) < 1e-5
        assert warmup_inverse_sqrt(1.0, 1)(10**12) == 1e-6

    def test_a_schedule_is_called_with_the_number_of_the_update(self) -> None:
        steps = []

        def schedule(step: int) -> float:
            steps.append(step)
            return 0.1

        def loss(params, batch):
            return (batch * params["w"]).square().mean()

        step = ft.accumulate(4)(ft.train_step(loss, ft.optim.sgd(schedule)))
        state = step.init({"w": torch.ones(())})
        steps.clear()  # Of `init`, which checks the schedule.
        for _ in range(3):
            state, _ = step(state, torch.ones(8))
        assert steps == [0, 1, 2]
