import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain.errors import OptionError
from ftrain.optim import schedules
from ftrain.optim.schedules import as_schedule, chain
from tests.optim.schedules.cases import FUNCTIONS

# Least values of whole numbers; `total` and `steps` are counted from 1 where nothing is left without them.
LEAST = {
    **dict.fromkeys(["steps", "total", "warmup", "decay"], 0),
    **dict.fromkeys(["cycles", "timescale", "every", ("one_cycle", "total"), ("exponential", "steps")], 1),
}
OPTIONAL = {("one_cycle", "start"), ("one_cycle", "end"), ("warmup_inverse_sqrt", "timescale")}
ARGUMENTS = [(function, argument) for function, (_, good) in FUNCTIONS.items() for argument in good]
MADE_OTHERWISE = {
    "ahead",
    "as_schedule",
    "chain",
    "describe",
    "named",
    "piecewise",
    "plot",
    "reduce_on_plateau",
    "scale",
}


def is_function(name: str) -> bool:
    return not name.startswith("_") and inspect.isfunction(getattr(schedules, name))


class TestErrors:
    @pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
    def test_every_argument(self, function: str, argument: str) -> None:
        make, good = FUNCTIONS[function]
        make(**good)
        least = LEAST.get((function, argument), LEAST.get(argument))
        always = [math.nan, math.inf, "3", True, torch.tensor(1.0)]
        always += [] if (function, argument) in OPTIONAL else [None]
        for bad in [*always, *([] if least is None else [least - 1, 2.0])]:
            with pytest.raises(OptionError) as caught:
                make(**{**good, argument: bad})
            expected = "a positive number" if argument in {"power", "waves"} else "a finite number"
            expected = expected if least is None else f"a whole number of at least {least}"
            assert str(caught.value) == f"{function}: {argument} is {bad!r}, needs {expected}"

    def test_a_long_value_is_shortened(self) -> None:
        with pytest.raises(OptionError, match=r"(?s)^adamw: lr is \[\{'params': .{,100}, needs a finite number, or a"):
            ft.optim.adamw([{"params": [torch.zeros(99) for _ in range(9)]}])  # type: ignore[arg-type]

    def test_every_function_has_its_arguments_above(self) -> None:
        assert {*FUNCTIONS, *MADE_OTHERWISE} == {name for name in vars(schedules) if is_function(name)}

    @pytest.mark.parametrize(
        "function", ["warmup_linear", "warmup_cosine", "warmup_polynomial", "warmup_cosine_restarts"]
    )
    def test_warmup_beyond_total(self, function: str) -> None:
        with pytest.raises(OptionError, match=f"^{function}: warmup is 11 and total is 10; .* not exceed"):
            getattr(schedules, function)(**{**FUNCTIONS[function][1], "warmup": 11})

    @pytest.mark.parametrize(
        ("function", "argument"), [each for each in ARGUMENTS if each[1] in {"power", "waves", "factor"}]
    )
    @pytest.mark.parametrize("value", [0.0, -1.0])
    def test_positive(self, function: str, argument: str, value: float) -> None:
        make, good = FUNCTIONS[function]
        expected = "a number greater than 0 and at most 1" if argument == "factor" else "a positive number"
        with pytest.raises(OptionError, match=rf"^{function}: {argument} is {value}, needs {expected}$"):
            make(**{**good, argument: value})

    @pytest.mark.parametrize("function", ["step_decay", "exponential"])
    def test_factor_that_grows(self, function: str) -> None:
        make, good = FUNCTIONS[function]
        with pytest.raises(
            OptionError, match=rf"^{function}: factor is 1.5, needs a number greater than 0 and at most 1$"
        ):
            make(**{**good, "factor": 1.5})

    def test_warmup_and_decay_beyond_total(self) -> None:
        with pytest.raises(OptionError, match=r"^warmup_stable_decay: warmup is 6, decay 5 and total 10; .* together"):
            schedules.warmup_stable_decay(1.0, 6, 10, 5)

    @pytest.mark.parametrize("bad", ["sqrt", None, 3, ["linear"], np.ones(2)])
    def test_shapes(self, bad: object) -> None:
        stable = r"choices are linear, cosine, 1-sqrt$"
        with pytest.raises(OptionError, match=rf"^warmup_stable_decay: warmup_shape is .*; {stable}"):
            schedules.warmup_stable_decay(1.0, 1, 10, 5, warmup_shape=bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"^warmup_stable_decay: decay_shape is .*; {stable}"):
            schedules.warmup_stable_decay(1.0, 1, 10, 5, decay_shape=bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=r"^one_cycle: shape is .*; choices are linear, cosine$"):
            schedules.one_cycle(1.0, 10, shape=bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=r"^piecewise: between is .*; choices are constant, linear, cosine$"):
            schedules.piecewise({0: 1.0}, bad)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("rise", "three_phase"), [(-0.1, False), (1.0, False), (-0.1, True), (0.6, True)])
    def test_rise(self, rise: float, three_phase: bool) -> None:
        expected = "<= 0.5 in three phases" if three_phase else "< 1"
        with pytest.raises(OptionError, match=rf"^one_cycle: rise is {rise:g}; it must be 0 <= rise {expected}\.$"):
            schedules.one_cycle(1.0, 10, rise=rise, three_phase=three_phase)

    @pytest.mark.parametrize("bad", ["no", 1, torch.ones(2)])
    def test_three_phase_is_a_switch(self, bad: object) -> None:
        with pytest.raises(OptionError, match=r"^one_cycle: three_phase is .*, needs True or False$"):
            schedules.one_cycle(1.0, 10, three_phase=bad)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("points", "message"),
        [
            ({}, r"points is \{\}; it must map at least one step"),
            ([(0, 1.0)], r"points is \[.*\]; it must map at least one step"),
            ({-1: 1.0}, "a step of points is -1, needs a whole number of at least 0"),
            ({0.5: 1.0}, "a step of points is 0.5, needs a whole number"),
            ({0: 1.0, 5: math.nan}, r"points\[5\] is nan, needs a finite number"),
            ({5: 1.0, 3: 2.0}, r"points is \[5, 3\], needs steps that are sorted"),
        ],
    )
    def test_points(self, points: object, message: str) -> None:
        with pytest.raises(OptionError, match=f"^piecewise: {message}"):
            schedules.piecewise(points)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"name": "cosign"}, "name is 'cosign'; choices are constant, constant_with_warmup, linear, cosine, .*"),
            ({"name": "reduce_lr_on_plateau"}, r".reduce_lr_on_plateau. depends on evaluations .*reduce_on_plateau.*"),
            ({"name": "greedy"}, ".greedy. depends on evaluations .*"),
            ({"name": None}, "name is None; choices are .*"),
            ({"name": "linear", "power": 2}, "'power' is not an option of 'linear', which takes none"),
            ({"name": "polynomial", "end": 2}, "'end' is not an option of 'polynomial', which takes lr_end, power"),
            (
                {"name": "cosine_with_min_lr", "peak": None, "min_lr": 1.0},
                "peak is None, needs a finite number",
            ),
            ({"name": "cosine_with_min_lr"}, "found min_lr=None and min_lr_rate=None; needs one of them"),
            (
                {"name": "cosine_with_min_lr", "min_lr": 1.0, "min_lr_rate": 0.1},
                "found min_lr=1.0 and min_lr_rate=0.1; needs one of them",
            ),
            (
                {"name": "cosine_warmup_with_min_lr", "warmup_lr_rate": 0.1},
                "found min_lr=None and min_lr_rate=None; needs one of them",
            ),
            ({"name": "warmup_stable_decay"}, "num_decay_steps is None, needs a whole number of at least 0"),
        ],
    )
    def test_named(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=rf"^named: {message}\.?$"):
            schedules.named(**{"peak": 1.0, "warmup": 1, "total": 10, **arguments})

    @pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
    def test_named_without_a_total(self, name: str) -> None:
        with pytest.raises(OptionError, match=r": total is None, needs a whole number of at least 0$"):
            schedules.named(name, 1.0, 10)

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [(([0.1, 0.2], 100), "boundaries is 100, needs a list"), ((0.1, [3]), r"schedules is 0\.1, needs a list")],
    )
    def test_chain_needs_lists(self, arguments: tuple[Any, Any], expected: str) -> None:
        with pytest.raises(OptionError, match=f"^chain: {expected}"):
            chain(*arguments)

    @pytest.mark.parametrize(("parts", "boundaries"), [([], []), ([1.0], [2]), ([1.0, 2.0], []), ([], [1])])
    def test_chain_counts(self, parts: list[float], boundaries: list[int]) -> None:
        actual = f"{len(parts)} schedules and {len(boundaries)} boundaries"
        with pytest.raises(OptionError, match=f"^chain: found {actual}; needs at least one"):
            chain(parts, boundaries)

    def test_chain_unsorted(self) -> None:
        with pytest.raises(OptionError, match=r"^chain: boundaries is \[5, 3\], needs steps that are sorted"):
            chain([1.0, 2.0, 3.0], [5, 3])

    @pytest.mark.parametrize("bad", [-1, 1.5, True, None])
    def test_chain_boundary(self, bad: object) -> None:
        with pytest.raises(OptionError, match=r"^chain: boundaries\[1\] is .*, needs a whole number"):
            chain([1.0, 2.0, 3.0], [0, bad])  # type: ignore[list-item]

    @pytest.mark.parametrize("bad", [None, "cosine", math.nan, True, torch.tensor(0.1), {"lr": 1}])
    def test_not_a_schedule(self, bad: object) -> None:
        expected = ", needs a finite number, or a function from step to number"
        with pytest.raises(OptionError, match=rf"^as_schedule: value is .*{expected}"):
            as_schedule(bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"^scale: schedule is .*{expected}"):
            schedules.scale(bad, 1.0)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"^chain: schedules\[1\] is .*{expected}"):
            chain([1.0, bad], [1])  # type: ignore[list-item]

    @pytest.mark.parametrize("bad", [None, "2", 1.5, True, -1])
    def test_ahead(self, bad: object) -> None:
        with pytest.raises(OptionError, match=r"^ahead: steps is .*, needs a whole number of at least 0$"):
            schedules.ahead(schedules.constant(1.0), bad)  # type: ignore[arg-type]

    @pytest.mark.parametrize("bad", [None, "2", math.inf, True])
    def test_scale(self, bad: object) -> None:
        with pytest.raises(OptionError, match=r"^scale: factor is .*, needs a finite number$"):
            schedules.scale(1.0, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (torch.ones(2), "Tensor")])
def test_a_schedule_that_returns_no_number_is_named_by_init(value, kind):
    def halved(step):
        return value

    step = ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(halved))
    with pytest.raises(
        OptionError, match=f"schedule of lr, halved, returned a {kind} at step 0; it must return a number"
    ):
        step.init({"w": torch.ones(2)})


def test_a_schedule_that_has_no_number_for_a_later_step_is_named_with_it():
    """As a function of branches without the last one."""
    step = ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(lambda k: 0.1 if k < 1 else None))
    state, _ = step(step.init({"w": torch.ones(2)}), None)
    with pytest.raises(OptionError, match="Step: the schedule of lr, <lambda>, returned a NoneType at step 1; it must"):
        step(state, None)


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
def test_a_rate_that_is_negative_or_not_finite_is_named_with_its_step(value):
    """A straight line that goes on below 0 would raise the loss."""
    optimizer = ft.optim.partition({"all": ft.optim.sgd(lambda k: (1e-3, value)[k])}, lambda name, leaf: "all")
    step = ft.train_step(lambda params, batch: params["w"].sum(), optimizer)
    state, _ = step(step.init({"w": torch.ones(2)}), None)
    with pytest.raises(OptionError, match=f"Step: the schedule of all/lr is {value} at step 1; needs a finite number,"):
        step(state, None)
