"""Resuming: the log of a run has each step once, and the last evaluation is made and saved once."""

import json

import pytest

import ftrain as ft
from tests.training.interrupted_runs import (
    EVERY,
    STEPS,
    KilledError,
    Positioned,
    assert_results_equal,
    batches,
    fit,
    fit_until_killed,
    make,
)


def test_a_log_has_one_row_per_step_after_resuming(tmp_path):
    path = tmp_path / "log" / "steps.jsonl"

    def options():
        return {"loggers": [ft.loggers.jsonl(path)], "checkpoints": ft.Checkpoints(tmp_path, every=EVERY)}

    for at in (5, 8):
        fit_until_killed(make(), batches(), at, **options())
    # The process ends while it writes a line.
    with path.open("a") as file:
        file.write('{"step": 9, "lo')
    actual = fit(make(), batches(), **options())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == actual.history["loss"]


def test_a_log_that_is_a_link_stays_one_and_keeps_its_mode(tmp_path):
    log, link = tmp_path / "steps.jsonl", tmp_path / "link.jsonl"
    log.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 1, 2, 3)) + "no record\n" + '{"step": 4}\n{"st')
    log.chmod(0o600)
    link.symlink_to(log)
    logger = ft.loggers.jsonl(link)
    logger.rewind(4, 1)
    assert log.read_text().splitlines()[-2:] == ["no record", '{"step": 4}']
    logger.rewind(1, 1)
    assert log.read_text() == '{"step": 1}\n'
    assert link.is_symlink()
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("at", [2, 4, 5, 8])
def test_a_run_that_resumes_keeps_the_lines_of_earlier_runs_in_one_log(at, tmp_path):
    step, log = make(), ft.loggers.jsonl(tmp_path / "log.jsonl")
    options = {"loggers": [log], "evaluate": lambda state: {"a": 1.0}, "evaluate_every": 4}
    fit(step, batches(), **options)
    earlier = (tmp_path / "log.jsonl").read_text().splitlines()
    options["checkpoints"] = ft.Checkpoints(tmp_path / "run", every=EVERY)
    fit_until_killed(step, batches(), at, **options)
    fit(step, batches(), **options)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert lines[: len(earlier)] == earlier
    steps = [json.loads(line)["step"] for line in lines]
    assert steps[: len(earlier)] == steps[len(earlier) :]


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_that_was_killed_before_its_first_record_keeps_the_log_of_an_earlier_run(tmp_path):
    log = tmp_path / "log.jsonl"
    fit(make(), batches(), loggers=[ft.loggers.jsonl(log)])

    def killed():
        raise KilledError

    options = {"loggers": [ft.loggers.jsonl(log)], "checkpoints": ft.Checkpoints(tmp_path / "run", every=EVERY)}
    with pytest.raises(KilledError):
        fit(make(), (killed() for _ in range(3)), **options)
    fit(make(), batches(), **options)
    assert steps_of(log) == [*range(1, STEPS + 1)] * 2


def test_a_run_that_was_killed_before_its_first_save_logs_its_steps_once(tmp_path):
    log = tmp_path / "log.jsonl"
    options = {"loggers": [ft.loggers.jsonl(log)], "checkpoints": ft.Checkpoints(tmp_path / "run", every=STEPS)}
    fit_until_killed(make(), batches(), 4, **options)
    assert steps_of(log) == [1, 2, 3, 4]
    fit(make(), batches(), **options)
    assert steps_of(log) == [*range(1, STEPS + 1)]


def test_a_finished_run_keeps_the_lines_of_the_run_that_continues_it_in_one_log(tmp_path):
    """A program with two runs, one after the other, is killed in the second one and started again."""
    log = tmp_path / "log.jsonl"

    def program(train):
        options = {"loggers": [ft.loggers.jsonl(log)]}
        first = {"checkpoints": ft.Checkpoints(tmp_path / "first", every=EVERY), "steps": 5}
        state, _ = fit(make(), batches(), **first, **options)
        second = ft.Checkpoints(tmp_path / "second", every=EVERY, async_=False)
        train(make(), batches(), state=state, checkpoints=second, **options)

    with pytest.raises(KilledError):
        program(lambda *arguments, **options: fit(*arguments, evaluate=kill, evaluate_every=8, **options))
    assert steps_of(log) == [*range(1, 9)]
    program(fit)
    assert steps_of(log) == [*range(1, STEPS + 1)]


def kill(state):
    raise KilledError


def test_the_last_evaluation_is_made_and_logged_once(tmp_path):
    path, evaluations = tmp_path / "steps.jsonl", []

    def evaluate(state):
        evaluations.append(int(state.step))
        return {"score": float(state.step)}

    def run():
        return fit(
            make(),
            batches(),
            steps=None,
            epochs=2,
            evaluate=evaluate,
            loggers=[ft.loggers.jsonl(path)],
            checkpoints=ft.Checkpoints(tmp_path / "run", every=5),
        )

    expected = run()
    for _ in range(2):
        assert_results_equal(run(), expected)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    # The last step has two rows: one of its metrics, one of the evaluation.
    assert [row["step"] for row in rows] == [*range(1, 11), 10]
    assert evaluations == [10]


def best_step(directory):
    return ft.Checkpoints(directory, every=EVERY, best="eval_score", mode="max").latest(best=True).step


@pytest.mark.parametrize("limits", [{"steps": 6}, {"steps": None, "epochs": 3}], ids=["steps", "epochs"])
@pytest.mark.parametrize("data_class", [list, Positioned])
def test_the_last_evaluation_reaches_the_checkpoint_of_its_step(limits, data_class, tmp_path):
    """Step 6 is saved by ``every=3`` before the last evaluation, and again after it with the metrics."""
    evaluations = []

    def evaluate(state):
        evaluations.append(int(state.step))
        return {"score": float(state.step)}

    def run():
        checkpoints = ft.Checkpoints(tmp_path, every=EVERY, best="eval_score", mode="max")
        return fit(make(), data_class(batches(2)), **limits, evaluate=evaluate, checkpoints=checkpoints)

    expected = run()
    assert evaluations == [6]
    assert best_step(tmp_path) == 6
    # A finished run is not evaluated again.
    assert_results_equal(run(), expected)
    assert evaluations == [6]


def test_an_evaluation_that_failed_reaches_the_checkpoint_of_its_step_when_the_run_resumes(tmp_path):
    """Step 6, the best one, is saved without its metrics when its evaluation fails."""

    def run(fails):
        def evaluate(state):
            if fails and state.step == 6:
                raise ZeroDivisionError
            return {"score": -abs(float(state.step) - 6)}

        checkpoints = ft.Checkpoints(tmp_path, every=EVERY, keep=1, best="eval_score", mode="max")
        return fit(make(), batches(), evaluate=evaluate, evaluate_every=EVERY, checkpoints=checkpoints)

    with pytest.raises(ZeroDivisionError):
        run(fails=True)
    run(fails=False)
    assert best_step(tmp_path) == 6


def test_a_run_that_was_killed_in_its_last_evaluation_makes_and_saves_it(tmp_path):
    def killing(state):
        raise KilledError

    def run(evaluate):
        checkpoints = ft.Checkpoints(tmp_path, every=EVERY, best="eval_score", mode="max")
        options = {"steps": None, "epochs": 3, "evaluate": evaluate, "checkpoints": checkpoints}
        return fit(make(), Positioned(batches(2)), **options)

    with pytest.raises(KilledError):
        run(killing)
    assert ft.Checkpoints(tmp_path, every=EVERY).steps() == [3, 6]
    actual = run(lambda state: {"score": float(state.step)})
    assert best_step(tmp_path) == 6
    assert_results_equal(run(killing), actual)
