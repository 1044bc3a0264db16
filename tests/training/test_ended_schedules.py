"""The log says when the learning rate is 0, or an average has not begun, long before the end of a run."""

import pytest
import torch

import ftrain as ft

schedules = ft.schedules


def zero_rate_messages(caplog, optimizer, steps, **options):
    """Train, and return the log messages that say that the rate is 0."""
    step = ft.train_step(lambda params, batch: (batch @ params["w"]).square().mean() + params["b"].sum(), optimizer)
    state = step.init({"w": torch.ones(2), "b": torch.ones(1)})
    caplog.clear()
    ft.fit(step, state, [torch.ones(4, 2)] * 4, steps=steps, progress=False, **options)
    return [record.getMessage() for record in caplog.records if "learning rate is 0" in record.getMessage()]


def sgd_of_two(first, second):
    return ft.optim.partition({"w": ft.optim.sgd(first), "b": ft.optim.sgd(second)}, {"w": ["w"]})


@pytest.mark.parametrize(
    ("optimizer", "steps", "end"),
    [
        (ft.optim.sgd(schedules.warmup_cosine(1e-2, 1, 3)), 40, 3),
        (ft.optim.sgd(schedules.linear(1e-2, 0.0, 100)), 120, 100),
        (ft.optim.adjustable(ft.optim.sgd(schedules.warmup_linear(1e-2, 2, 5))), 60, 5),
        (sgd_of_two(schedules.cosine(1e-2, 3), schedules.cosine(1e-3, 5)), 40, 5),
    ],
)
def test_the_log_says_after_which_step_the_rate_is_zero(caplog, optimizer, steps, end):
    (message,) = zero_rate_messages(caplog, optimizer, steps)
    assert f"the learning rate is 0 after step {end}, and the run goes on to step {steps}" in message


@pytest.mark.parametrize(
    ("optimizer", "steps", "options"),
    [
        (ft.optim.sgd(schedules.warmup_cosine(1e-2, 1, 40)), 40, {}),
        (ft.optim.sgd(schedules.cosine(1e-2, 40)), 49, {}),
        (ft.optim.sgd(schedules.cosine(1e-2, 3, end=1e-4)), 40, {}),
        (ft.optim.sgd(schedules.cosine(1e-2, 3)), 40, {"stop": lambda history: ""}),
        (ft.optim.sgd(schedules.warmup_cosine(1e-2, 9, 40)), 1, {}),
        (ft.optim.sgd(schedules.cosine_restarts(1e-2, 40, 4)), 40, {}),
        (ft.optim.sgd(schedules.one_cycle(1e-2, 40)), 40, {}),
        (ft.optim.sgd(0.0), 40, {}),
        (sgd_of_two(schedules.cosine(1e-2, 3), schedules.constant(1e-3)), 40, {}),
    ],
)
def test_a_rate_above_zero_or_zero_on_purpose_is_not_logged(caplog, optimizer, steps, options):
    assert not zero_rate_messages(caplog, optimizer, steps, **options)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_schedule_that_is_a_plain_function_is_not_called_for_later_steps(caplog, scaled):
    calls = []

    def rate(step):
        calls.append(step)
        return 0.1 * (step < 3)

    assert not zero_rate_messages(caplog, ft.optim.sgd(schedules.scale(rate, 0.5) if scaled else rate), 20)
    # The first call is that of `step.init`, which checks the schedule.
    assert calls == [0, *range(20)]


def test_a_resumed_run_is_logged_if_it_goes_on_past_its_schedule(tmp_path, caplog):
    def run(schedule, steps):
        checkpoints = ft.Checkpoints(tmp_path / str(schedule), every=10)
        return zero_rate_messages(caplog, ft.optim.sgd(schedule), steps, checkpoints=checkpoints)

    assert not run(schedules.cosine(1e-2, 10), 10)
    (message,) = run(schedules.cosine(1e-2, 10), 15)
    assert "after step 10, and the run goes on to step 15" in message
    # Few steps past the end are not logged: the total may have been rounded down.
    assert not run(schedules.cosine(1e-2, 37), 39)
    assert not run(schedules.cosine(1e-2, 37), 40)


@pytest.mark.parametrize(("start", "every", "steps", "says"), [(9, 2, 10, True), (9, 1, 10, False), (100, 5, 8, True)])
def test_an_average_that_does_not_begin_before_the_end_of_the_run_is_logged(caplog, start, every, steps, says):
    step = ft.train_step(lambda params, batch: (batch @ params["w"]).mean(), ft.optim.sgd(0.1))
    step = ft.compose(step, ft.swa(start, every))
    state, _ = ft.fit(step, step.init({"w": torch.ones(2)}), [torch.ones(4, 2)] * 4, steps=steps, progress=False)
    message = f"swa({start}, {every}) averages first after {start + every} updates, and the run ends at step {steps}"
    assert (message in caplog.text) is says
    assert int(state.slots["swa"]["updates"]) == steps
