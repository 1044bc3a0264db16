"""The ladder: techniques and steps that fail or do not fit, and wrong arguments."""

import dataclasses

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError, ConsumedError, OptionError, StructureError, TraceError
from ftrain.profiling.ladder import Case
from tests.profiling.problem import batch, make, squares


@pytest.mark.parametrize(
    ("inputs", "note"),
    [
        ({"x": torch.zeros(3, 16), "y": torch.zeros(3, 16)}, "3 examples cannot be halved"),
        ({"x": torch.zeros(4, 16), "y": torch.zeros(1, 16)}, "do not say how many examples"),
    ],
)
def test_a_batch_that_cannot_be_halved_is_noted(timed_ladder, inputs, note):
    ladder = timed_ladder(make(), inputs, techniques=["batch /2"])
    assert note in ladder["batch /2"].note
    assert ladder["batch /2"].seconds is None


@pytest.mark.parametrize(("edges", "nodes"), [(2, 16), (1, 16)])
def test_a_batch_whose_tensors_disagree_on_the_number_of_examples_is_counted_as_a_batch(timed_ladder, edges, nodes):
    """As that of a graph is: its first tensor has a row for each end of the edges, and no row is an example."""
    inputs = {"edges": torch.zeros(edges, 40), "x": torch.zeros(nodes, 16), "y": torch.zeros(nodes, 16)}
    ladder = timed_ladder(make(), inputs, {"as given": 0.5}, techniques=["batch x2"])
    assert "parameters, 1 batch; " in repr(ladder)
    assert "batches/s" in repr(ladder)
    assert (ladder["as given"].examples, ladder["as given"].rates) == (1, {"batches": 2.0})
    assert "do not say how many examples" in ladder["batch x2"].note


def test_a_technique_that_fails_is_a_row(timed_ladder):
    def broken(case):
        raise ComposeError("does not go\nat all")

    def failing_loss(params, batch, *, rng, buffers):
        raise ZeroDivisionError("in the middle")

    def wrap(loss):
        return loss.__class__(failing_loss, "failing_loss", module=loss.module)

    def fail_in_the_loss(case):
        wrapper = ft.Wrapper("failing", loss=ft.OnLoss(wrap))
        return Case(wrapper(case.step), case.batch)

    custom = [ft.Technique("own", "broken", broken), ft.Technique("own", "failing", fail_in_the_loss), "remat()"]
    ladder = timed_ladder(make(), batch(), techniques=custom)
    assert ladder["broken"].note.startswith("does not go")
    assert ladder["failing"].note == "fails: ZeroDivisionError: in the middle"
    assert ladder["remat()"].seconds
    assert "does not go at all" in repr(ladder)


def test_a_model_without_repeated_blocks_has_a_ladder(timed_ladder):
    loss = ft.from_module(torch.nn.Linear(16, 16), squares)
    ladder = timed_ladder(ft.train_step(loss, ft.optim.adamw(1e-3)), batch(), techniques=["remat()", "batch x2"])
    assert "Linear has no repeated children" in ladder["remat()"].note
    assert ladder["batch x2"].seconds


def test_a_technique_that_runs_out_of_memory_is_a_row(timed_ladder):
    oom = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything")
    ladder = timed_ladder(make(), batch(), {"remat()": oom}, techniques=["remat()", "donated()"])
    assert ladder["remat()"].note == "does not fit: out of memory"
    assert ladder["remat()"].predicted > 0
    assert ladder["donated()"].seconds


def test_a_technique_that_is_predicted_not_to_fit_never_runs(timed_ladder, monkeypatch):
    record = ft.backends.get("cpu")
    step, inputs = make(), batch()
    limit = ft.anatomy(step, step.init(), inputs, measure=False).peak + 1
    monkeypatch.setitem(ft.backends.registry._records, "cpu", dataclasses.replace(record, free=lambda: limit))

    def times(name, racer):
        assert name != "batch x2"
        return 1.0

    ladder = timed_ladder(step, inputs, times, techniques=["batch size"])
    assert ladder["batch x2"].note.startswith("does not fit: ")
    assert ladder["batch /2"].seconds


def test_a_step_that_cannot_be_predicted_is_timed_and_measured(timed_ladder):
    def reading_a_value(model, batch):
        loss = squares(model, batch)
        return loss * 2 if bool(loss.detach() > 1e9) else loss

    step = make(criterion=reading_a_value)
    names = ["remat()", "donated()"]
    ladder = timed_ladder(step, batch(), techniques=names, measured=True, stacked=False)
    predictable = timed_ladder(make(), batch(), techniques=names, measured=True, stacked=False)
    for name in ("as given", "remat()", "donated()"):
        assert ladder[name].seconds
        assert (ladder[name].predicted, ladder[name].note) == (None, "")
        assert ladder[name].measured == pytest.approx(predictable[name].measured, rel=0.05)
    with pytest.raises(TraceError, match="runs the step on fake tensors"):
        ft.hints(step, step.init(), batch())


def test_errors_of_the_step_as_given_are_raised(timed_ladder):
    with pytest.raises(ZeroDivisionError):
        timed_ladder(make(), batch(), {"as given": ZeroDivisionError()}, techniques=["remat()"])
    # Here the step fails before anything is timed.
    with pytest.raises(KeyError, match="'y'"):
        timed_ladder(make(), {"x": torch.ones(4, 16)}, techniques=["remat()"])


def test_an_empty_batch_and_empty_parameters_have_a_ladder(timed_ladder):
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.adamw(0.1))
    state = step.init({"w": torch.ones(0)})
    ladder = timed_ladder(step, torch.ones(0), state=state, techniques=["batch size", "donated()"])
    assert "0 parameters" in repr(ladder)
    assert ladder["donated()"].seconds
    assert "0 examples cannot be halved" in ladder["batch /2"].note


def test_ladder_refuses_invalid_arguments_states_of_other_steps_and_spent_states():
    step, inputs = make(), batch()
    state = step.init()
    with pytest.raises(ComposeError, match="ladder: the step is function; needs a Step"):
        ft.ladder(lambda state, batch: (state, {}), state, inputs)
    with pytest.raises(OptionError, match="ladder: there is no technique 'magic'; choose from batch size, batch x2"):
        ft.ladder(step, state, inputs, techniques=["magic"])
    with pytest.raises(OptionError, match=r"ladder: techniques is 'remat\(\)'; needs a list"):
        ft.ladder(step, state, inputs, techniques="remat()")
    with pytest.raises(OptionError, match=r"ladder: two techniques have the same name: remat\(\), remat\(\)"):
        ft.ladder(step, state, inputs, techniques=["remat()", ft.Technique("own", "remat()", lambda case: case)])
    with pytest.raises(OptionError, match="ladder: rounds is 0"):
        ft.ladder(step, state, inputs, rounds=0)
    with pytest.raises(StructureError):
        ft.ladder(step, make(optimizer=ft.optim.sgd(0.1)).init(), inputs)
    spent = step.init()
    ft.donated()(step)(spent, inputs)
    with pytest.raises(ConsumedError):
        ft.ladder(step, spent, inputs)
