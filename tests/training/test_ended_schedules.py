"""A run whose learning rate is 0 long before its end says so."""

import pytest
import torch

import ftrain as ft

schedules = ft.schedules


def logged(caplog, optimizer, steps, **options):
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
def test_the_log_says_from_where_on_the_rate_is_zero(caplog, optimizer, steps, end):
    (said,) = logged(caplog, optimizer, steps)
    assert f"the learning rate is 0 after step {end}, and the run goes on to step {steps}" in said


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
def test_a_rate_above_zero_or_zero_on_purpose_says_nothing(caplog, optimizer, steps, options):
    assert not logged(caplog, optimizer, steps, **options)


@pytest.mark.parametrize("within", [lambda own: own, lambda own: schedules.scale(own, 0.5)], ids=["alone", "scaled"])
def test_a_function_is_not_read_ahead(caplog, within):
    read = []
    assert not logged(caplog, ft.optim.sgd(within(lambda step: read.append(step) or 0.1 * (step < 3))), 20)
    assert read == [0, *range(20)]


def test_the_steps_after_the_end_of_a_run_that_is_resumed(tmp_path, caplog):
    def run(schedule, steps):
        checkpoints = ft.Checkpoints(tmp_path / str(schedule), every=10)
        return logged(caplog, ft.optim.sgd(schedule), steps, checkpoints=checkpoints)

    assert not run(schedules.cosine(1e-2, 10), 10)
    (said,) = run(schedules.cosine(1e-2, 10), 15)
    assert "after step 10, and the run goes on to step 15" in said
    # A total that was rounded down, and a run that was interrupted in its last steps.
    assert not run(schedules.cosine(1e-2, 37), 39)
    assert not run(schedules.cosine(1e-2, 37), 40)


@pytest.mark.parametrize(("start", "every", "steps", "says"), [(9, 2, 10, True), (9, 1, 10, False), (100, 5, 8, True)])
def test_an_average_that_does_not_begin_before_the_end(caplog, start, every, steps, says):
    step = ft.compose(ft.train_step(lambda params, batch: (batch @ params["w"]).mean(), ft.optim.sgd(0.1)))
    step = ft.compose(step, ft.swa(start, every))
    state, _ = ft.fit(step, step.init({"w": torch.ones(2)}), [torch.ones(4, 2)] * 4, steps=steps, progress=False)
    said = f"swa({start}, {every}) averages first after {start + every} updates, and the run ends at step {steps}"
    assert (said in caplog.text) is says
    assert int(state.slots["swa"]["updates"]) == steps
