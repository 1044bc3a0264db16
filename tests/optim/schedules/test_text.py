"""The text of schedules, from which they can be made again; equality, pickling, and `as_schedule`."""

import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.optim import schedules
from ftrain.optim.schedules import (
    as_schedule,
    chain,
    constant,
    cosine,
    cosine_restarts,
    describe,
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
from tests.optim.schedules.cases import UNTIMED, any_schedule, first_values


class TestText:
    @pytest.mark.parametrize(
        ("schedule", "text"),
        [
            (constant(0.1), "constant(0.1)"),
            (linear(1e-3, 0, 100), "linear(1e-3, 0, 100)"),
            (cosine(0.00025, 10), "cosine(2.5e-4, 10)"),
            (cosine(0.01, 10, 1e-5), "cosine(0.01, 10, end=1e-5)"),
            (polynomial(0.1, 10), "polynomial(0.1, 10)"),
            (polynomial(0.1, 10, 0.01, 2), "polynomial(0.1, 10, end=0.01, power=2)"),
            (warmup_constant(1, 10), "warmup_constant(1, 10)"),
            (warmup_linear(5e-5, 0, 1000000), "warmup_linear(5e-5, 0, 1000000)"),
            (warmup_cosine(0.0003, 100, 2000), "warmup_cosine(3e-4, 100, 2000)"),
            (warmup_cosine(3e-4, warmup=1, total=2, end=3e-5), "warmup_cosine(3e-4, 1, 2, end=3e-5)"),
            (warmup_polynomial(0.1, 1, 2, power=0.5), "warmup_polynomial(0.1, 1, 2, power=0.5)"),
            (chain([constant(1.0), cosine(1.0, 5)], [3]), "chain([constant(1), cosine(1, 5)], [3])"),
            (cosine(1.0, 5, waves=2), "cosine(1, 5, waves=2)"),
            (cosine_restarts(0.1, 100, 4, 1e-5), "cosine_restarts(0.1, 100, 4, end=1e-5)"),
            (warmup_cosine_restarts(0.1, 10, 100, 4), "warmup_cosine_restarts(0.1, 10, 100, 4)"),
            (inverse_sqrt(1e-3), "inverse_sqrt(1e-3)"),
            (inverse_sqrt(1e-3, 500), "inverse_sqrt(1e-3, timescale=500)"),
            (warmup_inverse_sqrt(1e-3, 100), "warmup_inverse_sqrt(1e-3, 100)"),
            (warmup_inverse_sqrt(1e-3, 100, 500), "warmup_inverse_sqrt(1e-3, 100, timescale=500)"),
            (warmup_stable_decay(1e-3, 10, 100, 20), "warmup_stable_decay(1e-3, 10, 100, 20)"),
            (
                warmup_stable_decay(1e-3, 10, 100, 20, 1e-5, start=1e-6, warmup_shape="cosine", decay_shape="1-sqrt"),
                "warmup_stable_decay(1e-3, 10, 100, 20, end=1e-5, start=1e-6, warmup_shape='cosine', "
                "decay_shape='1-sqrt')",
            ),
            (step_decay(0.1, 30), "step_decay(0.1, 30)"),
            (step_decay(0.1, 30, 0.5), "step_decay(0.1, 30, factor=0.5)"),
            (exponential(0.1, 0.99), "exponential(0.1, 0.99)"),
            (exponential(0.1, 0.5, 1000), "exponential(0.1, 0.5, steps=1000)"),
            (one_cycle(0.1, 100), "one_cycle(0.1, 100)"),
            (one_cycle(1, 9, rise=0.5, end=0, three_phase=True), "one_cycle(1, 9, rise=0.5, end=0, three_phase=True)"),
            (piecewise({0: 0.1, 30: 0.001}), "piecewise({0: 0.1, 30: 1e-3})"),
            (piecewise({0: 0.1, 30: 0.001}, "linear"), "piecewise({0: 0.1, 30: 1e-3}, between='linear')"),
            (scale(cosine(1.0, 10, 0.1), 3e-4), "scale(cosine(1, 10, end=0.1), 3e-4)"),
        ],
    )
    def test_the_repr_is_the_shortest_call(self, schedule: Schedule, text: str) -> None:
        assert repr(schedule) == text
        assert describe(schedule) == text

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.0, "0"),
            (1, "1"),
            (-0.5, "-0.5"),
            (0.999, "0.999"),
            (0.015, "0.015"),
            (0.0015, "1.5e-3"),
            (1e-8, "1e-8"),
            (1000.0, "1000"),
            (1e6, "1e6"),
            (123456.75, "123456.75"),
            (1 / 3, "0.3333333333333333"),
            (sys.float_info.max, "1.7976931348623157e308"),
        ],
    )
    def test_the_text_of_numbers(self, value: float, text: str) -> None:
        assert describe(value) == text

    @UNTIMED
    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_the_text_of_a_number_gives_the_same_number(self, value: float) -> None:
        assert float(describe(value)) == value

    @UNTIMED
    @given(st.lists(any_schedule(), min_size=1, max_size=3))
    def test_evaluating_the_repr_gives_an_equal_schedule(self, parts: list[Schedule]) -> None:
        for schedule in (*parts, chain(parts, range(1, len(parts)))):
            assert eval(repr(schedule), vars(schedules).copy()) == schedule

    @UNTIMED
    @given(any_schedule())
    def test_an_unpickled_schedule_is_equal(self, schedule: Schedule) -> None:
        for original in (schedule, chain([schedule, constant(1.0)], [5])):
            copy = pickle.loads(pickle.dumps(original))
            assert copy == original
            assert hash(copy) == hash(original)
            assert first_values(copy) == first_values(original)

    def test_schedules_of_different_calls_are_not_equal(self) -> None:
        distinct = [
            cosine(1.0, 10),
            cosine(1.0, 11),
            cosine(1.0, 10, 0.5),
            cosine(2.0, 10),
            linear(1.0, 0.0, 10),
            polynomial(1.0, 10, power=2),
            polynomial(1.0, 10, power=3),
            warmup_cosine(1.0, 1, 10),
            chain([cosine(1.0, 10)], []),
            cosine(1.0, 10, waves=1),
            cosine_restarts(1.0, 10, 1),
            cosine_restarts(1.0, 10, 2),
            inverse_sqrt(1.0, 10),
            warmup_inverse_sqrt(1.0, 10),
            warmup_stable_decay(1.0, 1, 10, 5),
            warmup_stable_decay(1.0, 1, 10, 5, decay_shape="1-sqrt"),
            step_decay(1.0, 10),
            exponential(1.0, 0.1, 10),
            one_cycle(1.0, 10),
            one_cycle(1.0, 10, shape="linear"),
            piecewise({0: 1.0, 10: 0.1}),
            piecewise({0: 1.0, 10: 0.1}, "linear"),
            scale(cosine(1.0, 10), 2.0),
        ]
        assert len(set(distinct)) == len(distinct)

    def test_attributes_cannot_be_set(self) -> None:
        with pytest.raises(AttributeError):
            constant(1.0).value = 2.0  # type: ignore[attr-defined]


class TestAsSchedule:
    def test_a_number_is_a_constant(self) -> None:
        assert as_schedule(0.1) == constant(0.1)
        assert as_schedule(1) == constant(1.0)
        assert as_schedule(np.float64(0.25)) == constant(0.25)

    def test_a_function_is_returned_as_it_is(self) -> None:
        def halves(step: int) -> float:
            return 0.5**step

        assert as_schedule(halves) is halves
        assert describe(halves) == "halves"
