"""Arguments for each function that makes a schedule, and strategies that draw schedules."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from ftrain.optim import schedules as s
from ftrain.types import Schedule

UNTIMED = settings(deadline=None)
STEPS = 200
SHAPES = ("linear", "cosine", "1-sqrt")

rates = st.floats(min_value=1e-8, max_value=1e3)
counts = st.integers(min_value=0, max_value=60)
factors = st.floats(min_value=0.01, max_value=1.0)

FUNCTIONS: dict[str, tuple[Callable[..., Schedule], dict[str, Any]]] = {
    "constant": (s.constant, {"value": 1.0}),
    "linear": (s.linear, {"start": 1.0, "end": 0.5, "steps": 10}),
    "cosine": (s.cosine, {"peak": 1.0, "total": 10, "end": 0.5, "waves": 0.5}),
    "cosine_restarts": (s.cosine_restarts, {"peak": 1.0, "total": 10, "cycles": 2, "end": 0.5}),
    "polynomial": (s.polynomial, {"peak": 1.0, "total": 10, "end": 0.5, "power": 2.0}),
    "inverse_sqrt": (s.inverse_sqrt, {"peak": 1.0, "timescale": 5}),
    "step_decay": (s.step_decay, {"value": 1.0, "every": 3, "factor": 0.5}),
    "exponential": (s.exponential, {"value": 1.0, "factor": 0.5, "steps": 3}),
    "one_cycle": (s.one_cycle, {"peak": 1.0, "total": 10, "rise": 0.3, "start": 0.1, "end": 0.0}),
    "warmup_constant": (s.warmup_constant, {"peak": 1.0, "warmup": 3}),
    "warmup_linear": (s.warmup_linear, {"peak": 1.0, "warmup": 3, "total": 10, "end": 0.5}),
    "warmup_cosine": (s.warmup_cosine, {"peak": 1.0, "warmup": 3, "total": 10, "end": 0.5, "waves": 0.5}),
    "warmup_cosine_restarts": (
        s.warmup_cosine_restarts,
        {"peak": 1.0, "warmup": 3, "total": 10, "cycles": 2, "end": 0.5},
    ),
    "warmup_polynomial": (s.warmup_polynomial, {"peak": 1.0, "warmup": 3, "total": 10, "end": 0.5, "power": 2.0}),
    "warmup_inverse_sqrt": (s.warmup_inverse_sqrt, {"peak": 1.0, "warmup": 3, "timescale": 5}),
    "warmup_stable_decay": (
        s.warmup_stable_decay,
        {"peak": 1.0, "warmup": 3, "total": 10, "decay": 4, "end": 0.5, "start": 0.1},
    ),
}
"""Name -> the function, and valid values of all its numeric arguments."""


def first_values(schedule: Schedule, steps: int = STEPS) -> list[float]:
    return [schedule(k) for k in range(steps)]


@st.composite
def decays(draw: st.DrawFn) -> tuple[Schedule, float, float, int, int]:
    """Draw a decay after a warm-up, and its ``peak, end, warmup, total``."""
    peak, warmup = draw(rates), draw(counts)
    end = draw(st.one_of(st.just(0.0), rates))
    total = warmup + draw(counts)
    kind = draw(st.sampled_from(["linear", "cosine", "polynomial"]))
    power = {"power": draw(st.floats(0.25, 4.0))} if kind == "polynomial" else {}
    schedule = getattr(s, f"warmup_{kind}")(peak, warmup, total, end, **power)
    return schedule, peak, end, warmup, total


@st.composite
def stables(draw: st.DrawFn) -> tuple[Schedule, float, float, float, int, int, int]:
    """Draw a `warmup_stable_decay`, and its ``start, peak, end, warmup, total, decay``."""
    start, peak, end = (draw(st.one_of(st.just(0.0), rates)) for _ in range(3))
    warmup, decay = draw(counts), draw(counts)
    total = warmup + decay + draw(counts)
    up, down = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(SHAPES))
    schedule = s.warmup_stable_decay(peak, warmup, total, decay, end, start=start, warmup_shape=up, decay_shape=down)
    return schedule, start, peak, end, warmup, total, decay


@st.composite
def points(draw: st.DrawFn) -> dict[int, float]:
    """Draw the points of a `piecewise` schedule."""
    steps = sorted(draw(st.sets(counts, min_size=1, max_size=5)))
    return {step: draw(rates) for step in steps}


@st.composite
def cycles(draw: st.DrawFn) -> Schedule:
    """Draw a `one_cycle`."""
    three_phase = draw(st.booleans())
    return s.one_cycle(
        draw(rates),
        draw(st.integers(1, 100)),
        rise=draw(st.floats(0.0, 0.5 if three_phase else 0.99)),
        start=draw(st.one_of(st.none(), rates)),
        end=draw(st.one_of(st.none(), rates)),
        shape=draw(st.sampled_from(["cosine", "linear"])),
        three_phase=three_phase,
    )


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    counts_from_1 = st.integers(1, 60)
    factories = {
        "constant": lambda: s.constant(draw(rates)),
        "linear": lambda: s.linear(draw(rates), draw(rates), draw(counts)),
        "cosine": lambda: s.cosine(draw(rates), draw(counts), draw(rates), draw(st.floats(0.1, 5.0))),
        "cosine_restarts": lambda: s.cosine_restarts(draw(rates), draw(counts), draw(counts_from_1), draw(rates)),
        "polynomial": lambda: s.polynomial(draw(rates), draw(counts), draw(rates), draw(rates)),
        "inverse_sqrt": lambda: s.inverse_sqrt(draw(rates), draw(counts_from_1)),
        "step_decay": lambda: s.step_decay(draw(rates), draw(counts_from_1), draw(factors)),
        "exponential": lambda: s.exponential(draw(rates), draw(factors), draw(counts_from_1)),
        "one_cycle": lambda: draw(cycles()),
        "piecewise": lambda: s.piecewise(draw(points()), draw(st.sampled_from(["constant", "linear", "cosine"]))),
        "ahead": lambda: s.ahead(s.warmup_constant(draw(rates), draw(counts)), draw(counts)),
        "scale": lambda: s.scale(s.cosine(1.0, draw(counts)), draw(rates)),
        "warmup_constant": lambda: s.warmup_constant(draw(rates), draw(counts)),
        "warmup_inverse_sqrt": lambda: s.warmup_inverse_sqrt(
            draw(rates), draw(counts), draw(st.one_of(st.none(), counts_from_1))
        ),
        "decay": lambda: draw(decays())[0],
        "stable": lambda: draw(stables())[0],
    }
    return factories[draw(st.sampled_from(sorted(factories)))]()
