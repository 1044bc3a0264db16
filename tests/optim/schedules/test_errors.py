"""Errors of schedules and of the functions that make them."""

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from ftrain.optim import schedules
from ftrain.optim.schedules import as_schedule, chain
from tests.optim.schedules.cases import FUNCTIONS

LEAST = {
    **dict.fromkeys(["steps", "total", "warmup", "decay"], 0),
    **dict.fromkeys(["cycles", "timescale", "every", ("one_cycle", "total"), ("exponential", "steps")], 1),
}
"""Argument -> the least valid whole number, or (function, argument) where it differs from that of other functions."""

OPTIONAL = {("one_cycle", "start"), ("one_cycle", "end"), ("warmup_inverse_sqrt", "timescale")}
ARGUMENTS = [(function, argument) for function, (_, valid) in FUNCTIONS.items() for argument in valid]
NOT_IN_FUNCTIONS = {
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
"""Functions that are no factories of one schedule from numbers; their errors have tests of their own."""


def is_function(name: str) -> bool:
    return not name.startswith("_") and inspect.isfunction(getattr(schedules, name))


class TestErrors:
    @pytest.mark.parametrize(("function", "argument"), ARGUMENTS)
    def test_an_invalid_number_is_refused(self, function: str, argument: str) -> None:
        make, valid = FUNCTIONS[function]
        make(**valid)
        least = LEAST.get((function, argument), LEAST.get(argument))
        invalid = [math.nan, math.inf, "3", True, torch.tensor(1.0)]
        if (function, argument) not in OPTIONAL:
            invalid.append(None)
        if least is not None:
            invalid += [least - 1, 2.0]
            expected = f"a whole number of at least {least}"
        elif argument in {"power", "waves"}:
            expected = "a positive number"
        else:
            expected = "a finite number"
        for bad in invalid:
            with pytest.raises(OptionError) as caught:
                make(**{**valid, argument: bad})
            assert str(caught.value) == f"{function}: {argument} is {bad!r}, needs {expected}"

    def test_a_long_value_is_shortened(self) -> None:
        with pytest.raises(OptionError, match=r"(?s)^adamw: lr is \[\{'params': .{,100}, needs a finite number, or a"):
            ft.optim.adamw([{"params": [torch.zeros(99) for _ in range(9)]}])  # type: ignore[arg-type]

    def test_every_function_is_in_one_of_the_tables(self) -> None:
        assert {*FUNCTIONS, *NOT_IN_FUNCTIONS} == {name for name in vars(schedules) if is_function(name)}

    @pytest.mark.parametrize(
        "function", ["warmup_linear", "warmup_cosine", "warmup_polynomial", "warmup_cosine_restarts"]
    )
    def test_a_warmup_longer_than_the_total_is_refused(self, function: str) -> None:
        with pytest.raises(OptionError, match=f"^{function}: warmup is 11 and total is 10; .* not exceed"):
            getattr(schedules, function)(**{**FUNCTIONS[function][1], "warmup": 11})

    @pytest.mark.parametrize(
        ("function", "argument"),
        [(function, argument) for function, argument in ARGUMENTS if argument in {"power", "waves", "factor"}],
    )
    @pytest.mark.parametrize("value", [0.0, -1.0])
    def test_a_number_that_must_be_positive(self, function: str, argument: str, value: float) -> None:
        make, valid = FUNCTIONS[function]
        expected = "a number greater than 0 and at most 1" if argument == "factor" else "a positive number"
        with pytest.raises(OptionError, match=rf"^{function}: {argument} is {value}, needs {expected}$"):
            make(**{**valid, argument: value})

    @pytest.mark.parametrize("function", ["step_decay", "exponential"])
    def test_a_factor_above_1_is_refused(self, function: str) -> None:
        make, valid = FUNCTIONS[function]
        with pytest.raises(
            OptionError, match=rf"^{function}: factor is 1.5, needs a number greater than 0 and at most 1$"
        ):
            make(**{**valid, "factor": 1.5})

    def test_a_warmup_and_decay_longer_than_the_total_are_refused(self) -> None:
        with pytest.raises(OptionError, match=r"^warmup_stable_decay: warmup is 6, decay 5 and total 10; .* together"):
            schedules.warmup_stable_decay(1.0, 6, 10, 5)

    @pytest.mark.parametrize("bad", ["sqrt", None, 3, ["linear"], np.ones(2)])
    def test_an_unknown_shape_is_refused(self, bad: object) -> None:
        choices = r"choices are linear, cosine, 1-sqrt$"
        with pytest.raises(OptionError, match=rf"^warmup_stable_decay: warmup_shape is .*; {choices}"):
            schedules.warmup_stable_decay(1.0, 1, 10, 5, warmup_shape=bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"^warmup_stable_decay: decay_shape is .*; {choices}"):
            schedules.warmup_stable_decay(1.0, 1, 10, 5, decay_shape=bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=r"^one_cycle: shape is .*; choices are linear, cosine$"):
            schedules.one_cycle(1.0, 10, shape=bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=r"^piecewise: between is .*; choices are constant, linear, cosine$"):
            schedules.piecewise({0: 1.0}, bad)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("rise", "three_phase"), [(-0.1, False), (1.0, False), (-0.1, True), (0.6, True)])
    def test_a_rise_out_of_range_is_refused(self, rise: float, three_phase: bool) -> None:
        expected = "<= 0.5 in three phases" if three_phase else "< 1"
        with pytest.raises(OptionError, match=rf"^one_cycle: rise is {rise:g}; it must be 0 <= rise {expected}\.$"):
            schedules.one_cycle(1.0, 10, rise=rise, three_phase=three_phase)

    @pytest.mark.parametrize("bad", ["no", 1, torch.ones(2)])
    def test_three_phase_must_be_a_bool(self, bad: object) -> None:
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
    def test_invalid_points_are_refused(self, points: object, message: str) -> None:
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
    def test_invalid_arguments_of_named_are_refused(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=rf"^named: {message}\.?$"):
            schedules.named(**{"peak": 1.0, "warmup": 1, "total": 10, **arguments})

    @pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts", "polynomial"])
    def test_named_needs_a_total(self, name: str) -> None:
        with pytest.raises(OptionError, match=r": total is None, needs a whole number of at least 0$"):
            schedules.named(name, 1.0, 10)

    def test_named_refuses_a_warmup_longer_than_the_total_that_does_not_start_at_0(self) -> None:
        message = r"^warmup_cosine: warmup is 20 and total is 10; warmup must not exceed total"
        with pytest.raises(OptionError, match=message):
            schedules.named("cosine_warmup_with_min_lr", 1.0, 20, 10, min_lr_rate=0.1, warmup_lr_rate=0.1)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "missing a required argument: 'total'"),
            ({"total": 10, "warmup": 3}, "got an unexpected keyword argument 'warmup'"),
        ],
    )
    def test_missing_and_unknown_arguments_name_the_function(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ComposeError, match=f"^cosine: {message}; its arguments are peak, total, end, waves$"):
            schedules.cosine(1.0, **arguments)

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [(([0.1, 0.2], 100), "boundaries is 100, needs a list"), ((0.1, [3]), r"schedules is 0\.1, needs a list")],
    )
    def test_chain_needs_lists(self, arguments: tuple[Any, Any], expected: str) -> None:
        with pytest.raises(OptionError, match=f"^chain: {expected}"):
            chain(*arguments)

    @pytest.mark.parametrize(("parts", "boundaries"), [([], []), ([1.0], [2]), ([1.0, 2.0], []), ([], [1])])
    def test_a_chain_needs_one_boundary_less_than_schedules(self, parts: list[float], boundaries: list[int]) -> None:
        counts = f"{len(parts)} schedules and {len(boundaries)} boundaries"
        with pytest.raises(OptionError, match=f"^chain: found {counts}; needs at least one"):
            chain(parts, boundaries)

    def test_unsorted_boundaries_are_refused(self) -> None:
        with pytest.raises(OptionError, match=r"^chain: boundaries is \[5, 3\], needs steps that are sorted"):
            chain([1.0, 2.0, 3.0], [5, 3])

    @pytest.mark.parametrize("bad", [-1, 1.5, True, None])
    def test_an_invalid_boundary_is_refused(self, bad: object) -> None:
        with pytest.raises(OptionError, match=r"^chain: boundaries\[1\] is .*, needs a whole number"):
            chain([1.0, 2.0, 3.0], [0, bad])  # type: ignore[list-item]

    @pytest.mark.parametrize("bad", [None, "cosine", math.nan, True, torch.tensor(0.1), {"lr": 1}])
    def test_a_value_that_is_no_schedule_is_refused(self, bad: object) -> None:
        expected = ", needs a finite number, or a function from step to number"
        with pytest.raises(OptionError, match=rf"^as_schedule: value is .*{expected}"):
            as_schedule(bad)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"^scale: schedule is .*{expected}"):
            schedules.scale(bad, 1.0)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=rf"^chain: schedules\[1\] is .*{expected}"):
            chain([1.0, bad], [1])  # type: ignore[list-item]

    @pytest.mark.parametrize("bad", [None, "2", 1.5, True, -1])
    def test_invalid_steps_of_ahead_are_refused(self, bad: object) -> None:
        with pytest.raises(OptionError, match=r"^ahead: steps is .*, needs a whole number of at least 0$"):
            schedules.ahead(schedules.constant(1.0), bad)  # type: ignore[arg-type]

    @pytest.mark.parametrize("bad", [None, "2", math.inf, True])
    def test_an_invalid_factor_of_scale_is_refused(self, bad: object) -> None:
        with pytest.raises(OptionError, match=r"^scale: factor is .*, needs a finite number$"):
            schedules.scale(1.0, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "type_name"), [(None, "NoneType"), (torch.ones(2), "Tensor")])
def test_init_names_a_schedule_that_returns_no_number(value, type_name):
    def halved(step):
        return value

    step = ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(halved))
    with pytest.raises(
        OptionError, match=f"schedule of lr, halved, returned a {type_name} at step 0; it must return a number"
    ):
        step.init({"w": torch.ones(2)})


def test_a_step_names_a_schedule_that_returns_no_number_and_the_step():
    """For instance a function of several branches that ends without a return."""
    step = ft.train_step(lambda params, batch: params["w"].sum(), ft.optim.sgd(lambda k: 0.1 if k < 1 else None))
    state, _ = step(step.init({"w": torch.ones(2)}), None)
    with pytest.raises(OptionError, match="Step: the schedule of lr, <lambda>, returned a NoneType at step 1; it must"):
        step(state, None)


@pytest.mark.parametrize("value", [-1e-3, math.nan, math.inf])
def test_a_step_refuses_a_rate_that_is_negative_or_not_finite(value):
    """For instance a linear decay that does not stop at 0: a negative rate would raise the loss."""
    optimizer = ft.optim.partition({"all": ft.optim.sgd(lambda k: (1e-3, value)[k])}, lambda name, leaf: "all")
    step = ft.train_step(lambda params, batch: params["w"].sum(), optimizer)
    state, _ = step(step.init({"w": torch.ones(2)}), None)
    with pytest.raises(OptionError, match=f"Step: the schedule of all/lr is {value} at step 1; needs a finite number,"):
        step(state, None)
