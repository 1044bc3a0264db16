"""The options that `fit` refuses, before the first step or when a function returns a wrong value."""

import pytest

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from tests.training.problem import batches, fit, make_step

WRONG_OPTIONS = {
    "evaluate of batches": ({"evaluate": batches()}, "evaluate is list; needs a function state ->"),
    "evaluate by an eval_step": (
        {"evaluate": ft.eval_step(lambda params, batch: params["w"].sum())},
        "evaluate is an eval_step, of one batch; needs a function state ->",
    ),
    "evaluate_every alone": ({"evaluate_every": 2}, "evaluate_every=2 needs evaluate="),
    "evaluate_every of a word": (
        {"evaluate": lambda state: {}, "evaluate_every": "epoch"},
        r"evaluate_every is 'epoch', needs a number of steps: len\(loader\) is once an epoch",
    ),
    "stop of a number": ({"stop": 3}, "stop is int; needs a function history ->"),
    "adapt of a scheduler": ({"adapt": object()}, "adapt is object; needs a function"),
    "a directory": ({"checkpoints": "runs"}, "checkpoints is 'runs'; needs ft.Checkpoints"),
    "a logger that is in no list": ({"loggers": print}, "loggers is .*; needs a list of functions"),
    "a name of a logger": ({"loggers": ["wandb"]}, "loggers is .*; needs a list of functions"),
    "a count without a name": ({"throughput": len}, "throughput is .*; needs functions of a batch by name"),
    "a number of tokens": ({"throughput": {"tokens": 512}}, "throughput is .*; needs functions of a batch by name"),
    "no epoch": ({"epochs": 0}, "epochs is 0"),
    "half a step": ({"steps": 1e3}, "steps is 1000.0, needs a whole number"),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_a_wrong_option_is_refused_before_a_batch_is_drawn(case, caplog):
    options, message = WRONG_OPTIONS[case]
    data = iter(batches())
    with pytest.raises(OptionError, match=message):
        fit(make_step(), data, **options)
    assert len(list(data)) == len(batches()), "fit has drawn a batch"
    assert not caplog.messages


@pytest.mark.parametrize(("returned", "name"), [(None, "NoneType"), ({"w": 1.0}, "dict")])
def test_an_adapt_that_returns_no_state_is_an_error_and_no_step_is_lost(returned, name):
    """If `fit` sent None to the generator of steps, this would be `next`: one step would be made without a record."""
    with pytest.raises(ComposeError, match=f"adapt returned {name}; needs the TrainState to go") as caught:
        fit(make_step(), batches(), adapt=lambda state, history: returned, log_every=2)
    assert int(caught.value.result.state.step) == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "evaluate returned NoneType; needs a dict"),
        (0.5, "evaluate returned float; needs a dict"),
        ({1: 0.5}, r"evaluate returned the keys \[1\]; needs a dict of numbers by name"),
        ({"loss": 1.0, "eval_loss": 2.0}, "two numbers that are recorded under one name: loss, eval_loss"),
    ],
)
def test_an_evaluation_that_returns_no_dict_of_numbers_by_name_is_an_error(returned, message):
    with pytest.raises(OptionError, match=message) as caught:
        fit(make_step(), batches(2), evaluate=lambda state: returned)
    assert int(caught.value.result.state.step) == 2


def test_a_count_of_throughput_that_is_no_number_is_an_error():
    with pytest.raises(OptionError, match=r"fit: throughput\['tokens'\] returned None; needs a number"):
        fit(make_step(), batches(), steps=1, throughput={"tokens": lambda batch: None})
