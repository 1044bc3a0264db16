"""`fit` on N ranks is `fit` on one: the same history and state, and all ranks end at the same step."""

import importlib
import json

import pytest
import torch

import ftrain as ft
from ftrain.errors import BatchError, RankError
from ftrain.parallel.agreement import Agreement
from ftrain.training.progress import Display, Throughput
from tests.bits import assert_same_bits
from tests.exhaustive import exhaustive_rows
from tests.parallel import models
from tests.parallel.ranks import run
from tests.parallel.results import assert_near

iterate = importlib.import_module("ftrain.training.iterate")


def fitted(size, level, *, wrappers=(), optimizer=None, **options):
    """Return the whole state and the history of each of `size` ranks; options that are functions get rank and step."""

    def rank(number):
        step = models.step_of(*wrappers, ft.sharded(ft.parallel.mesh(), level), optimizer=optimizer)
        named = {name: value(number, step) if callable(value) else value for name, value in options.items()}
        state, history = ft.fit(step, step.init(seed=5), list(models.batches(6)), progress=False, **named)
        return ft.parallel.whole(state), history

    return run(size, rank)


def without_times(history):
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


def assert_near_without_times(results, expected):
    """Check that states and histories of ranks equal those of one rank, except for times, which all ranks agree on."""
    expected_state, expected_history = expected
    results_without_times = [(state, without_times(history)) for state, history in results]
    assert_near(results_without_times, (expected_state, without_times(expected_history)))
    for _, history in results:
        assert history == results[0][1]
        assert history.stopped == expected_history.stopped


@pytest.mark.parametrize(("size", "level"), [(2, 0), (2, 1), (4, 3)])
def test_a_run_on_ranks_equals_one_on_one_rank(size, level):
    options = {"steps": 8, "log_every": 3, "wrappers": (ft.accumulate(2), ft.clip(0.05), ft.ema(0.8))}
    (reference,) = fitted(1, 0, **options)
    assert len(reference[1]) == 8
    assert_near_without_times(fitted(size, level, **options), reference)


@pytest.mark.parametrize(
    ("level", "wrappers", "function"),
    [(0, [], "sharded"), (3, [], "sharded"), (2, [ft.accumulate(2)], "accumulate")],
    ids=["whole", "by block", "accumulate"],
)
def test_a_loss_that_changes_with_the_rows_of_ranks_is_warned_of_once(level, wrappers, function):
    def summed(model, batch):
        return (model(batch["x"]) - batch["y"]).square().sum()

    def rank(_):
        step = models.step_of(*wrappers, ft.sharded(ft.parallel.mesh(), level), criterion=summed)
        ft.fit(step, step.init(seed=5), list(models.batches()), progress=False)

    with pytest.warns(UserWarning, match=f"^{function}: the loss of two examples is .*Return ft\\.Mean") as caught:
        run(2, rank)
    assert len(caught) == 1


def test_a_loss_that_fails_on_one_rank_when_it_is_tested_leaves_no_rank_waiting():
    def loud(model, batch):
        if not torch.is_grad_enabled() and batch["x"].max() > 100:
            raise ValueError("in training only")
        return models.plain_loss(model, batch)

    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 3, batches="rows"), criterion=loud)
        batch = next(models.batches())
        state, _ = ft.fit(step, step.init(seed=5), [{**batch, "x": batch["x"] + 200 * number}], progress=False)
        return int(state.step)

    assert run(2, rank) == [1, 1]


def test_the_first_rank_shows_and_logs(tmp_path, capsys):
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        records = []
        loggers = [ft.loggers.jsonl(tmp_path / "log"), records.append]
        ft.fit(step, step.init(), list(models.batches()), steps=3, loggers=loggers)
        return len(records)

    assert run(3, rank) == [3, 0, 0]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert capsys.readouterr().err.count("step 3/3") == 1


def test_a_function_in_place_of_a_step_is_run_by_all_ranks_together(tmp_path):
    """It logs, stops, saves and resumes as a step does, which the function calls here."""

    def rank(number, steps, enough):
        step, records = models.step_of(ft.sharded(ft.parallel.mesh(), 1)), []
        stop = lambda history: "enough" if len(history) >= enough + number else ""  # noqa: E731
        options = {"steps": steps, "stop": stop, "loggers": [records.append], "log_every": 1, "progress": False}
        function = lambda state, batch: step(state, batch)  # noqa: E731
        checkpoints = ft.Checkpoints(tmp_path, every=2)
        state, history = ft.fit(
            function, step.init(seed=5), list(models.batches(6)), checkpoints=checkpoints, **options
        )
        return [record["step"] for record in records], ft.parallel.whole(state), history

    for number, (logged, state, history) in enumerate(run(3, lambda number: rank(number, 6, 3))):
        assert logged == ([] if number else [1, 2, 3])
        assert (int(state.step), history.stopped) == (3, "enough")
    (expected,) = fitted(1, 0, steps=6)
    results = run(2, lambda number: rank(number, 6, 10)[1:])
    torch.testing.assert_close(results[0][0].params, expected[0].params, rtol=1e-12, atol=1e-12)
    assert results[0][1] == results[1][1]
    assert len(results[0][1]) == 6


@pytest.mark.parametrize("batches", ["whole", "rows"])
def test_throughput_counts_the_items_of_all_ranks(batches, monkeypatch):
    shown, rates = [], Throughput.rates

    def recording(self, now):
        shown.append(dict(self._items))
        return rates(self, now)

    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 0, batches=batches))
        parts = list(models.batches(4))
        if batches == "rows":
            parts = [ft.tree.map(lambda leaf: leaf.chunk(3)[number], batch) for batch in parts]
        counts = {"examples": lambda batch: len(batch["x"]), "heavy": lambda batch: int((batch["weight"] != 0).sum())}
        ft.fit(step, step.init(), parts, log_every=2, throughput=counts)

    monkeypatch.setattr(Throughput, "rates", recording)
    monkeypatch.setattr(Display, "due", lambda display, *_: display._enabled)
    run(3, rank)
    assert shown == [{"examples": 24, "heavy": 16}] * 2


def test_ranks_stop_at_the_step_at_which_the_first_one_does():
    """Also if `stop` reads something that differs between ranks."""

    def stop(number, step):
        return lambda history: "enough" if len(history) >= 4 + number else ""

    results = fitted(3, 1, stop=stop, log_every=2)
    assert [(int(state.step), history.stopped) for state, history in results] == [(4, "enough")] * 3


def test_plateau_lowers_the_rate_on_all_ranks():
    def adapt(number, step):
        return ft.plateau("loss", ft.schedules.reduce_on_plateau(patience=0, threshold=10.0))

    options = {"adapt": adapt, "log_every": 1, "optimizer": ft.optim.adjustable(ft.optim.adamw(1e-2))}
    (reference,) = fitted(1, 0, **options)
    assert reference[1]["lr"][-1] < reference[1]["lr"][0]
    for level in (0, 3):
        assert_near_without_times(fitted(3, level, **options), reference)


def test_an_error_on_one_rank_between_steps_ends_all_ranks_with_the_trained_state():
    def fail(record):
        raise OSError("disk full")

    def rank(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        with pytest.raises((OSError, RankError)) as caught:
            ft.fit(step, step.init(), list(models.batches()), log_every=2, loggers=[fail], progress=False)
        return type(caught.value), str(caught.value), int(caught.value.result.state.step)

    first, *others = run(3, rank)
    assert first == (OSError, "disk full", 2)
    text = "fit: rank 0 failed in logging and checking metrics, and so all ranks stop: OSError: disk full"
    assert others == [(RankError, text, 2)] * 2


def test_a_vote_returns_the_largest_numbers_one_call_later():
    def rank(number):
        with Agreement(3) as agreement:
            votes = [agreement.vote(number if at == 1 else 0, -number) for at in range(4)]
            return [*votes, agreement.last_vote(), agreement.largest(number), agreement.from_first(str(number))]

    assert run(3, rank) == [[[], [0, 0], [2, 0], [0, 0], [0, 0], 2, "0"]] * 3


@pytest.mark.parametrize("odd", [3, 6], ids=["in the middle", "the last"])
def test_a_later_batch_of_another_shape_on_one_rank_is_an_error_on_every_rank_one_step_later(odd):
    def rank(number):
        # Where all ranks have shorter batches there is no error.
        data = [*models.batches(4), *models.batches(2, length=9)]
        if number == 1:
            data[odd - 1] = next(models.batches(1, length=10))
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 3))
        with pytest.raises(BatchError) as caught:
            ft.fit(step, step.init(), data, log_every=1, progress=False)
        return str(caught.value), int(caught.value.result.state.step)

    results = run(3, rank)
    length = 12 if odd == 3 else 9
    for number, (text, step) in enumerate(results):
        count = 10 if number == 1 else length
        assert text.startswith("fit: the ranks have different batches; ")
        assert f"of this rank was weight float64[{count}], x float64[{count}, 5], y float64[{count}, 3]; that" in text
        assert step == min(odd + 1, 6)


@pytest.mark.parametrize(("log_every", "noticed"), [(2, 5), (10, 6)], ids=["between readings", "at the end"])
def test_later_batches_of_other_values_are_an_error_on_every_rank(log_every, noticed):
    """As when each rank shuffles for itself, from the second pass on."""

    def rank(number):
        first = list(models.batches(3))
        data = [*first, *(first[::-1] if number == 2 else first)]
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 1))
        with pytest.raises(BatchError, match=r"fit: the ranks have different batches; .* has other values") as caught:
            ft.fit(step, step.init(), data, log_every=log_every, progress=False)
        return int(caught.value.result.state.step)

    # The first batch that differs is the 4th.
    assert run(3, rank) == [noticed] * 3


def test_a_loop_of_iterate_on_ranks_is_the_loop_by_hand():
    def rank(_):
        step, states = models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh(), 3)), []
        state = step.init(seed=3)
        for batch in models.batches(3):
            state, _ = step(state, batch)
            states.append(ft.parallel.whole(state))
        records = ft.iterate(step, step.init(seed=3), list(models.batches(3)))
        return states, [ft.parallel.whole(record.state) for record in records]

    for by_hand, iterated in run(2, rank):
        assert_same_bits(iterated, by_hand)


def samples():
    """Return the examples of a few batches, one by one."""
    return [{name: tensor[row] for name, tensor in batch.items()} for batch in models.batches(4) for row in range(12)]


@pytest.mark.parametrize(("size", "level"), [(2, 3), *exhaustive_rows([(2, 0), (4, 3)])])
def test_a_run_that_resumes_on_ranks_has_the_bits_of_one_that_was_not_interrupted(size, level, tmp_path):
    def fit(rank, directory, steps, **options):
        step = models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh(), level))
        data = ft.data.loader(samples()[:28], 7, seed=3)
        checkpoints = ft.Checkpoints(tmp_path / directory, every=2, best="eval_loss")
        evaluate = lambda state: ft.evaluate(ft.eval_step(step.loss), state, models.batches(1))  # noqa: E731
        named = {"evaluate": evaluate, "evaluate_every": 2, "progress": False, "log_every": 3}
        result = ft.fit(step, step.init(seed=5), data, steps=steps, checkpoints=checkpoints, **named, **options)
        return ft.parallel.whole(result.state), result.history, checkpoints.latest(best=True).step

    once = run(size, lambda rank: fit(rank, "once", 5))
    run(size, lambda rank: fit(rank, "twice", 3, loggers=[ft.loggers.jsonl(tmp_path / "log")]))
    twice = run(size, lambda rank: fit(rank, "twice", 5, resume="must", loggers=[ft.loggers.jsonl(tmp_path / "log")]))
    for (state, history, best), (resumed, records, best_resumed) in zip(once, twice, strict=True):
        assert_same_bits(resumed, state)
        assert best == best_resumed
        # Step 3, the end of the first part, was evaluated, too.
        resumed_records, once_records = (
            [record for record in without_times(of_run) if record["step"] != 3] for of_run in (records, history)
        )
        assert resumed_records == once_records
    logged = [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()]
    assert logged == [record["step"] for record in twice[0][1]]


def test_an_error_of_a_logger_saves_the_newest_state_on_all_ranks(tmp_path):
    def rank(number):
        def log(record):
            if record["step"] == 3:
                raise OSError("disk full")

        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        checkpoints = ft.Checkpoints(tmp_path, every=100)
        options = {"loggers": [log], "log_every": 1, "checkpoints": checkpoints, "progress": False}
        with pytest.raises((OSError, RankError)):
            ft.fit(step, step.init(), list(models.batches(6)), **options)
        return checkpoints.steps()

    assert run(3, rank) == [[3]] * 3


def test_the_first_rank_warns_of_a_loss_that_is_not_finite_and_all_raise(tmp_path):
    def rank(number):
        def loss(model, batch):
            return models.plain_loss(model, batch) / (batch["weight"].sum() != 0)

        step = models.step_of(ft.sharded(ft.parallel.mesh()), criterion=loss)
        data = [{**batch, "weight": batch["weight"] * (index != 4)} for index, batch in enumerate(models.batches(6))]
        checkpoints = ft.Checkpoints(tmp_path, every=2)
        options = {"checkpoints": checkpoints, "progress": False, "on_nonfinite": "raise", "log_every": 1}
        with pytest.raises(ft.errors.NonFiniteError) as caught:
            ft.fit(step, step.init(), data, **options)
        return str(caught.value)

    messages = run(2, rank)
    assert messages[0] == messages[1]
    assert "the loss of step 5" in messages[0]
    assert messages[0].endswith("The newest checkpoint before it is that of step 2")


def test_fit_leaves_whole_batches_on_the_host(monkeypatch):
    """Each rank copies its rows of them to its device."""
    monkeypatch.setattr(iterate, "_to_device", lambda *_: pytest.fail("a whole batch was copied"))
    fitted(2, 1)


def test_a_step_that_is_not_sharded_warns_that_each_rank_makes_a_run_of_its_own(monkeypatch, recwarn):
    step = ft.train_step(lambda params, batch: (params["w"] * batch).sum(), ft.optim.sgd(0.1))
    ft.fit(step, step.init({"w": torch.ones(1)}), [torch.ones(1)], progress=False)
    assert not [warning for warning in recwarn if "one of" in str(warning.message)]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"one of 2 ranks.*ft\.sharded\(ft\.parallel\.mesh\(\)\)"):
        ft.fit(step, step.init({"w": torch.ones(1)}), [torch.ones(1)], progress=False)
