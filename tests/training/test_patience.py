"""`patience`: after which value a run stops."""

import pytest

import ftrain as ft
from ftrain.training.history import History


@pytest.mark.parametrize(
    ("values", "count", "options", "stopped"),
    [
        ([3, 2, 1, 0], 1, {}, None),
        ([1, 1], 1, {}, 2),
        ([1, 2, 2, 0], 2, {}, 3),
        ([1, 2, 0, 1, 1], 2, {}, 5),
        ([1, 0.95, 0.91], 2, {"min_delta": 0.1}, 3),
        ([1, 2, 3, 3], 1, {"mode": "max"}, 4),
        ([float("nan")] * 3, 3, {}, 3),
    ],
    ids=["better", "equal", "worse", "better between", "by too little", "max", "nan"],
)
def test_patience_stops_after_so_many_values_that_are_not_better(values, count, options, stopped):
    stop = ft.patience("x", count, **options)
    history, stops = History(), []
    for number, value in enumerate(values, 1):
        history.append({"x": value})
        if stop(history):
            stops.append(number)
    assert stops[:1] == ([] if stopped is None else [stopped])
