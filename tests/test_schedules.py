import itertools
import math
import pickle
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain import schedules
from ftrain.errors import OptionError
from ftrain.schedules import (
    as_schedule,
    chain,
    constant,
    cosine,
    describe,
    linear,
    polynomial,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_polynomial,
)
from ftrain.types import Schedule

UNTIMED = settings(deadline=None)
STEPS = 200
PEAK = 3e-4
WARMUPS = (0, 1, 7, 100, 150)
TOTAL = 150

rates = st.floats(min_value=1e-8, max_value=1e3)
counts = st.integers(min_value=0, max_value=60)


def transformers_values(name: str, peak: float, **options: float) -> list[float]:
    """The learning rates that torch's LambdaLR sets with a transformers schedule."""
    from transformers import optimization

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduler = getattr(optimization, name)(optimizer, **options)
    values = []
    for _ in range(STEPS):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


def ours(schedule: Schedule) -> list[float]:
    return [schedule(k) for k in range(STEPS)]


@st.composite
def decays(draw: st.DrawFn) -> tuple[Schedule, float, float, int, int]:
    """A warmed-up decay and its ``(peak, end, warmup, total)``."""
    peak, warmup = draw(rates), draw(counts)
    end = draw(st.one_of(st.just(0.0), rates))
    total = warmup + draw(counts)
    kind = draw(st.sampled_from(["linear", "cosine", "polynomial"]))
    power = {"power": draw(st.floats(0.25, 4.0))} if kind == "polynomial" else {}
    schedule = getattr(schedules, f"warmup_{kind}")(peak, warmup, total, end, **power)
    return schedule, peak, end, warmup, total


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    bare = {
        "constant": lambda: constant(draw(rates)),
        "linear": lambda: linear(draw(rates), draw(rates), draw(counts)),
        "cosine": lambda: cosine(draw(rates), draw(counts)),
        "polynomial": lambda: polynomial(draw(rates), draw(counts), draw(rates), draw(rates)),
        "warmup_constant": lambda: warmup_constant(draw(rates), draw(counts)),
        "decay": lambda: draw(decays())[0],
    }
    return bare[draw(st.sampled_from(sorted(bare)))]()


class TestParity:
    @pytest.mark.parametrize("warmup", WARMUPS)
    def test_constant(self, warmup: int) -> None:
        theirs = transformers_values("get_constant_schedule_with_warmup", PEAK, num_warmup_steps=warmup)
        assert ours(warmup_constant(PEAK, warmup)) == theirs

    # With warmup == total transformers' linear is 0 at k = warmup and its cosine is the peak; here the
    # peak is always reached.
    @pytest.mark.parametrize("warmup", WARMUPS[:-1])
    def test_linear(self, warmup: int) -> None:
        options = {"num_warmup_steps": warmup, "num_training_steps": TOTAL}
        theirs = transformers_values("get_linear_schedule_with_warmup", PEAK, **options)
        assert ours(warmup_linear(PEAK, warmup, TOTAL)) == theirs

    @pytest.mark.parametrize("warmup", WARMUPS)
    def test_cosine(self, warmup: int) -> None:
        options = {"num_warmup_steps": warmup, "num_training_steps": TOTAL}
        theirs = transformers_values("get_cosine_schedule_with_warmup", PEAK, **options)
        found = ours(warmup_cosine(PEAK, warmup, TOTAL))
        assert found[: TOTAL + 1] == theirs[: TOTAL + 1]
        assert set(found[TOTAL + 1 :]) == {0.0}, "transformers' cosine rises again; ours holds the end"

    @pytest.mark.parametrize("warmup", WARMUPS)
    def test_cosine_with_end(self, warmup: int) -> None:
        # Theirs forms the share of the peak first and multiplies it by the peak: a few roundings more.
        options = {"num_warmup_steps": warmup, "num_training_steps": TOTAL, "min_lr": 1e-5}
        theirs = transformers_values("get_cosine_with_min_lr_schedule_with_warmup", PEAK, **options)
        found = ours(warmup_cosine(PEAK, warmup, TOTAL, end=1e-5))
        assert found[: TOTAL + 1] == pytest.approx(theirs[: TOTAL + 1], rel=0, abs=4 * math.ulp(PEAK))

    @pytest.mark.parametrize("warmup", WARMUPS[:-1])
    @pytest.mark.parametrize(("end", "power"), [(0.0, 1.0), (1e-7, 1.0), (1e-5, 2.0), (1e-6, 0.5)])
    def test_polynomial(self, warmup: int, end: float, power: float) -> None:
        # Theirs divides by the peak and LambdaLR multiplies by it again, and takes 1 - k / n for
        # (n - k) / n; a power below 1 magnifies that near the end, so the tolerance is relative.
        options = {"num_warmup_steps": warmup, "num_training_steps": TOTAL, "lr_end": end, "power": power}
        theirs = transformers_values("get_polynomial_decay_schedule_with_warmup", PEAK, **options)
        found = ours(warmup_polynomial(PEAK, warmup, TOTAL, end, power))
        assert found == pytest.approx(theirs, rel=1e-12, abs=4 * math.ulp(PEAK))

    def test_torch_polynomial_without_warmup(self) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
        scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=50, power=2.0)
        for k in range(60):
            assert polynomial(PEAK, 50, power=2)(k) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
            optimizer.step()
            scheduler.step()


class TestValues:
    @UNTIMED
    @given(decays())
    def test_warmup_rises_in_equal_parts_to_the_peak(self, case) -> None:
        schedule, peak, _, warmup, _ = case
        rise = [schedule(k) for k in range(warmup + 1)]
        assert rise[-1] == peak
        assert rise[:-1] == [peak * (k / warmup) for k in range(warmup)]
        assert all(a < b for a, b in itertools.pairwise(rise))

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
        schedule, _, end, warmup, total = case
        assert schedule(total + beyond) == end
        if warmup < total:
            assert schedule(total) == end

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
        for bare, warmed in pairs:
            assert ours(bare) == ours(warmed)

    @UNTIMED
    @given(rates, counts, counts, rates)
    def test_linear_is_a_polynomial_of_power_one(self, peak, warmup, decay, end) -> None:
        total = warmup + decay
        assert ours(warmup_linear(peak, warmup, total, end)) == ours(warmup_polynomial(peak, warmup, total, end))

    def test_by_hand(self) -> None:
        assert [linear(1.0, 3.0, 4)(k) for k in range(6)] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.0]
        assert [warmup_polynomial(4.0, 2, 4, 0.0, 2)(k) for k in range(6)] == [0.0, 2.0, 4.0, 1.0, 0.0, 0.0]
        assert warmup_cosine(2.0, 10, 30, end=1.0)(20) == 1.5
        assert [linear(2.0, 1.0, 0)(k) for k in range(3)] == [2.0, 1.0, 1.0]

    @UNTIMED
    @given(any_schedule())
    def test_before_the_first_step_the_first_value_holds(self, schedule: Schedule) -> None:
        assert schedule(-3) == schedule(0)

    @UNTIMED
    @given(any_schedule(), st.integers(0, 200))
    def test_values_are_finite_floats(self, schedule: Schedule, step: int) -> None:
        assert type(schedule(step)) is float
        assert math.isfinite(schedule(step))


class TestChain:
    @UNTIMED
    @given(st.lists(any_schedule(), min_size=1, max_size=4), st.data())
    def test_each_counts_from_its_own_boundary(self, parts: list[Schedule], data: st.DataObject) -> None:
        size = len(parts) - 1
        boundaries = sorted(data.draw(st.lists(st.integers(0, 80), min_size=size, max_size=size)))
        schedule = chain(parts, boundaries)
        for part, start, stop in zip(parts, [0, *boundaries], [*boundaries, 200], strict=True):
            assert [schedule(k) for k in range(start, stop)] == [part(k) for k in range(stop - start)]

    def test_numbers_and_plain_functions(self) -> None:
        schedule = chain([1, lambda k: float(k), np.float32(0.5)], [2, 4])
        assert [schedule(k) for k in range(6)] == [1.0, 1.0, 0.0, 1.0, 0.5, 0.5]
        assert repr(schedule) == "chain([constant(1), <lambda>, constant(0.5)], [2, 4])"

    def test_chains_nest(self) -> None:
        inner = chain([constant(1.0), linear(1.0, 0.0, 4)], [2])
        assert [chain([constant(5.0), inner], [3])(k) for k in (0, 3, 5, 7)] == [5.0, 1.0, 1.0, 0.5]


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
        ],
    )
    def test_repr(self, schedule: Schedule, text: str) -> None:
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
    def test_numbers(self, value: float, text: str) -> None:
        assert describe(value) == text

    @UNTIMED
    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_numbers_lose_no_digit(self, value: float) -> None:
        assert float(describe(value)) == value

    @UNTIMED
    @given(st.lists(any_schedule(), min_size=1, max_size=3))
    def test_repr_makes_the_schedule_again(self, parts: list[Schedule]) -> None:
        for schedule in (*parts, chain(parts, range(1, len(parts)))):
            assert eval(repr(schedule), vars(schedules).copy()) == schedule

    @UNTIMED
    @given(any_schedule())
    def test_pickle(self, schedule: Schedule) -> None:
        for each in (schedule, chain([schedule, constant(1.0)], [5])):
            again = pickle.loads(pickle.dumps(each))
            assert again == each
            assert hash(again) == hash(each)
            assert ours(again) == ours(each)

    def test_different_calls_differ(self) -> None:
        made = [
            cosine(1.0, 10),
            cosine(1.0, 11),
            cosine(1.0, 10, 0.5),
            cosine(2.0, 10),
            linear(1.0, 0.0, 10),
            polynomial(1.0, 10, power=2),
            polynomial(1.0, 10, power=3),
            warmup_cosine(1.0, 1, 10),
            chain([cosine(1.0, 10)], []),
        ]
        assert len(set(made)) == len(made)

    def test_is_frozen(self) -> None:
        with pytest.raises(AttributeError):
            constant(1.0).peak = 2.0  # type: ignore[attr-defined]


class TestAsSchedule:
    def test_number(self) -> None:
        assert as_schedule(0.1) == constant(0.1)
        assert as_schedule(1) == constant(1.0)
        assert as_schedule(np.float64(0.25)) == constant(0.25)

    def test_callable_is_left_alone(self) -> None:
        def halves(step: int) -> float:
            return 0.5**step

        assert as_schedule(halves) is halves
        assert describe(halves) == "halves"


FUNCTIONS: dict[str, tuple[Callable[..., Schedule], dict[str, float]]] = {
    "constant": (constant, {"value": 1.0}),
    "linear": (linear, {"start": 1.0, "end": 0.5, "steps": 10}),
    "cosine": (cosine, {"peak": 1.0, "total": 10, "end": 0.5}),
    "polynomial": (polynomial, {"peak": 1.0, "total": 10, "end": 0.5, "power": 2.0}),
    "warmup_constant": (warmup_constant, {"peak": 1.0, "warmup": 3}),
    "warmup_linear": (warmup_linear, {"peak": 1.0, "warmup": 3, "total": 10, "end": 0.5}),
    "warmup_cosine": (warmup_cosine, {"peak": 1.0, "warmup": 3, "total": 10, "end": 0.5}),
    "warmup_polynomial": (
        warmup_polynomial,
        {"peak": 1.0, "warmup": 3, "total": 10, "end": 0.5, "power": 2.0},
    ),
}
COUNTS = {"steps", "total", "warmup"}
ARGUMENTS = [(function, argument) for function, (_, good) in FUNCTIONS.items() for argument in good]


class TestErrors:
    @pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
    def test_every_argument(self, function: str, argument: str) -> None:
        make, good = FUNCTIONS[function]
        make(**good)
        always = [math.nan, math.inf, "3", None, True, torch.tensor(1.0)]
        for bad in [*always, *([-1, 2.0] if argument in COUNTS else [])]:
            with pytest.raises(OptionError) as caught:
                make(**{**good, argument: bad})
            needed = "an integer of at least 0" if argument in COUNTS else "a finite number"
            assert str(caught.value) == f"{function}: {argument} is {bad!r}; it must be {needed}."

    @pytest.mark.parametrize("function", ["warmup_linear", "warmup_cosine", "warmup_polynomial"])
    def test_warmup_beyond_total(self, function: str) -> None:
        with pytest.raises(OptionError, match=f"^{function}: warmup is 11 and total is 10; .* not exceed"):
            getattr(schedules, function)(1.0, 11, 10)

    @pytest.mark.parametrize("function", ["polynomial", "warmup_polynomial"])
    @pytest.mark.parametrize("power", [0.0, -1.0])
    def test_power(self, function: str, power: float) -> None:
        make, good = FUNCTIONS[function]
        message = rf"^{function}: power is {describe(power)}; it must be greater than 0\.$"
        with pytest.raises(OptionError, match=message):
            make(**{**good, "power": power})

    @pytest.mark.parametrize(("parts", "boundaries"), [([], []), ([1.0], [2]), ([1.0, 2.0], []), ([], [1])])
    def test_chain_counts(self, parts: list[float], boundaries: list[int]) -> None:
        found = f"{len(parts)} schedules and {len(boundaries)} boundaries"
        with pytest.raises(OptionError, match=f"^chain: found {found}; needs at least one"):
            chain(parts, boundaries)

    def test_chain_unsorted(self) -> None:
        with pytest.raises(OptionError, match=r"^chain: boundaries is \[5, 3\]; it must be sorted"):
            chain([1.0, 2.0, 3.0], [5, 3])

    @pytest.mark.parametrize("bad", [-1, 1.5, True, None])
    def test_chain_boundary(self, bad: object) -> None:
        with pytest.raises(OptionError, match=r"^chain: boundaries\[1\] is .*; it must be an integer"):
            chain([1.0, 2.0, 3.0], [0, bad])  # type: ignore[list-item]

    @pytest.mark.parametrize("bad", [None, "cosine", math.nan, True, torch.tensor(0.1), {"lr": 1}])
    def test_not_a_schedule(self, bad: object) -> None:
        needed = "; it must be a finite number, or a function from step to number"
        with pytest.raises(OptionError, match=rf"^as_schedule: value is .*{needed}"):
            as_schedule(bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"^chain: schedules\[1\] is .*{needed}"):
            chain([1.0, bad], [1])  # type: ignore[list-item]
