"""Evaluations during `fit`: after which steps, of which state, and how their results are recorded."""

import numpy as np
import pytest
import torch

import ftrain as ft
from tests.training.problem import assert_bitwise, batches, fit, make_step, squares, train_by_hand


@pytest.mark.parametrize(
    ("step_count", "evaluate_every", "expected"), [(7, 3, [3, 6, 7]), (6, 3, [3, 6]), (5, None, [5])]
)
def test_evaluate_is_called_at_its_steps_and_at_the_end(step_count, evaluate_every, expected):
    evaluated_steps = []

    def evaluate(state):
        evaluated_steps.append(int(state.step))
        return {"norm": float(state.params["w"].norm())}

    _, history = fit(make_step(), batches(step_count), evaluate=evaluate, evaluate_every=evaluate_every)
    assert evaluated_steps == expected
    assert [record["step"] for record in history if "eval_norm" in record] == expected
    assert len(history["loss"]) == step_count


def test_evaluate_gets_the_state_of_its_step():
    states = []

    def evaluate(state):
        states.append(ft.tree.clone(state))
        return {}

    fit(make_step(), batches(4), evaluate=evaluate, evaluate_every=2)
    for state, count in zip(states, (2, 4), strict=True):
        assert_bitwise(state, train_by_hand(make_step(), batches(4)[:count])[0])


def test_the_record_of_an_evaluation_follows_that_of_its_step():
    """Although `log_every` is so large that without evaluations all steps would be read at the end."""
    _, history = fit(make_step(), batches(5), evaluate=lambda state: {"norm": 1.0}, evaluate_every=2, log_every=10)
    assert [(record["step"], "eval_norm" in record) for record in history] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
        (5, False),
        (5, True),
    ]


def test_the_loss_of_an_evaluation_is_not_mistaken_for_that_of_a_step():
    evaluation = ft.eval_step(squares)

    def evaluate(state):
        return ft.evaluate(evaluation, state, batches(2))

    _, history = fit(make_step(), batches(4), evaluate=evaluate, evaluate_every=2)
    _, expected = train_by_hand(make_step(), batches(4))
    assert history["loss"] == expected
    assert len(history["eval_loss"]) == 2


@pytest.mark.parametrize("log_every", [1, 10])
def test_what_an_evaluation_returns_is_recorded_with_eval_before_its_name(log_every):
    """Also if the steps have no metric of that name; a name with the prefix stays as it is."""

    def evaluate(state):
        return {"loss": 1.0, "accuracy": 0.5, "eval_f1": 0.25}

    _, history = fit(make_step(), batches(2), evaluate=evaluate, evaluate_every=1, log_every=log_every)
    evaluation_records = history[1::2]
    assert [list(record) for record in evaluation_records] == [["step", "eval_loss", "eval_accuracy", "eval_f1"]] * 2


def test_an_evaluation_may_return_numbers_of_numpy(tmp_path):
    """As functions of scikit-learn return them; also the number by which the best checkpoint is chosen."""
    checkpoints = ft.Checkpoints(tmp_path, every=1, best="eval_float64")
    values = {"float64": np.float64(0.5), "float32": np.float32(2.0), "int64": np.int64(3)}
    _, history = fit(make_step(), batches(1), evaluate=lambda state: values, checkpoints=checkpoints)
    recorded = [history[-1][f"eval_{name}"] for name in values]
    assert recorded == [0.5, 2.0, 3]
    assert [type(value) for value in recorded] == [float, float, int]


def test_an_evaluation_may_return_arrays_of_numpy(tmp_path):
    """For example a confusion matrix: the log and the checkpoint store it, and a resumed run has it in its history."""
    options = {
        "evaluate": lambda state: {"matrix": np.eye(2), "scalar": np.array(1.5)},
        "evaluate_every": 1,
        "checkpoints": ft.Checkpoints(tmp_path / "run", every=1),
        "loggers": [ft.loggers.jsonl(tmp_path / "log")],
    }
    fit(make_step(), batches(), steps=1, **options)
    _, history = fit(make_step(), batches(), steps=2, **options)
    assert history["eval_matrix"] == [[[1.0, 0.0], [0.0, 1.0]]] * 2
    assert history["eval_scalar"] == [1.5] * 2


def test_an_evaluation_may_return_vectors(capsys):
    recalls = torch.tensor([1.0, 2.0])
    _, history = fit(make_step(), batches(1), progress=True, evaluate=lambda state: {"recalls": recalls})
    assert history["eval_recalls"] == [[1.0, 2.0]]
    assert "eval_recalls [1.0, 2.0]" in capsys.readouterr().err
