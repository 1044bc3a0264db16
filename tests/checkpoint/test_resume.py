"""Resuming: a run that was interrupted at any step has the bits of an uninterrupted run."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ftrain as ft
from ftrain.checkpoint import files
from ftrain.errors import CheckpointError, OptionError, StructureError
from ftrain.training.history import History
from tests.exhaustive import choose, exhaustive_rows

ROOT = Path(ft.__file__).parents[1]
STEPS, BATCHES, EVERY = 12, 5, 3


class KilledError(BaseException):
    """Stands for the end of the process. No Exception, after which `fit` would save."""


def batches(count=BATCHES, length=4):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(length, 4, generator=draw) for _ in range(count)]


class Positioned:
    """Data that keeps its position, as torchdata's StatefulDataLoader does."""

    def __init__(self, batches):
        self.batches, self.at, self.resumed, self.read = batches, 0, False, 0

    def __iter__(self):
        self.at = self.at if self.resumed else 0
        self.resumed = False
        while self.at < len(self.batches):
            self.at += 1
            self.read += 1
            yield self.batches[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.resumed = state["at"], True


class WrapsAround(Positioned):
    """Data whose position after its last batch is that before its first one."""

    def __iter__(self):
        self.resumed = True
        for _ in range(self.at, len(self.batches)):
            self.at = (self.at + 1) % len(self.batches)
            yield self.batches[self.at - 1]

    def __len__(self):
        return len(self.batches)


def squares(model, batch):
    return model(batch).square().mean()


def make(*wrappers, module=None):
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))
    return ft.compose(ft.train_step(ft.from_module(module, squares), ft.optim.adamw(0.05)), *wrappers)


STACKS = {
    "plain": (),
    "ema-clip": (ft.clip(1.0), ft.ema(0.9)),
    "fp16-skip-accumulate": (ft.with_amp("fp16"), ft.accumulate(2), ft.skip_nonfinite(), ft.ema(0.9)),
    "compiled": (ft.clip(1.0), ft.compiled(backend="eager")),
    "remat-donated": (ft.remat(blocks=[nn.Linear]), ft.donated()),
}


def fit(step, data, state=None, **options):
    options = {"steps": STEPS, "progress": False, "log_every": 1, **options}
    return ft.fit(step, step.init(seed=3) if state is None else state, data, **options)


def killed(step, data, at, **options):
    """Run until a step, whose record is the last thing that the run does."""

    def kill(record):
        if record["step"] == at and "loss" in record:
            raise KilledError

    loggers = [*options.pop("loggers", []), kill]
    with pytest.raises(KilledError):
        fit(step, data, loggers=loggers, **options)


def assert_same(actual, expected):
    """Assert that two results of `fit` have the same state, to the bit, and the same history except for times."""
    for first, second in zip(ft.tree.leaves(actual.state), ft.tree.leaves(expected.state), strict=True):
        assert torch.equal(first, second)
    histories = [
        [{name: value for name, value in record.items() if name != "seconds"} for record in result.history]
        for result in (actual, expected)
    ]
    assert histories[0] == histories[1]


@pytest.mark.parametrize(("stack", "data_class"), [("plain", list), *((stack, Positioned) for stack in STACKS)])
def test_a_run_in_pieces_is_the_whole_run(stack, data_class, tmp_path):
    expected = fit(make(*STACKS[stack]), data_class(batches()))
    # One step for all pieces: it holds no state of the run, and compiling it takes longer than the run.
    step = make(*STACKS[stack])
    # Before the first save, right after one, within a pass, at the end of a pass.
    for at in (2, 3, 8, 10, 11):
        killed(step, data_class(batches()), at, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    actual = fit(step, data_class(batches()), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_same(actual, expected)
    assert actual.history.stopped == "steps"


def test_a_position_is_set_without_reading_the_batches_before_it(tmp_path):
    data = Positioned(batches(50))
    killed(make(), data, 40, steps=50, checkpoints=ft.Checkpoints(tmp_path, every=30))
    data = Positioned(batches(50))
    fit(make(), data, steps=50, checkpoints=ft.Checkpoints(tmp_path, every=30))
    assert data.read == 20


@pytest.mark.parametrize(("epochs", "at"), [(1, 5), (2, 5), (3, 6), *exhaustive_rows([(1, 4)])])
@pytest.mark.parametrize("data_class", [list, Positioned, WrapsAround])
def test_passes_are_counted_over_pieces(epochs, data_class, at, tmp_path):
    options = {"steps": None, "epochs": epochs}
    expected = fit(make(), data_class(batches()), **options)
    killed(make(), data_class(batches()), at, checkpoints=ft.Checkpoints(tmp_path, every=1), **options)
    actual = fit(make(), data_class(batches()), checkpoints=ft.Checkpoints(tmp_path, every=1), **options)
    assert_same(actual, expected)
    assert len(actual.history) == epochs * BATCHES


@pytest.mark.parametrize("source", ["list", "stateful", "loader", "prefetched"])
def test_completed_epochs_are_not_repeated(source, tmp_path, caplog):
    data = {"list": batches, **DATA}[source]
    for epochs in (1, 1, 2, 4):
        # Saved only at the end, where the position of some data is the end of the epoch, and of other data a new start.
        checkpoints = ft.Checkpoints(tmp_path, every=100)
        actual = fit(make(), data(), steps=None, epochs=epochs, checkpoints=checkpoints)
        assert_same(actual, fit(make(), data(), steps=None, epochs=epochs))
    (message,) = caplog.messages
    assert "no step is made, for epochs=1, and 1 were made before" in message


def test_a_finished_run_is_only_read(tmp_path):
    expected = fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    actual = fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_same(actual, expected)
    longer = fit(make(), batches(), steps=STEPS + 4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_same(longer, fit(make(), batches(), steps=STEPS + 4))


def loaded(num_workers=0):
    return ft.data.loader(torch.stack(batches(23, 1)).squeeze(1), 4, seed=1, num_workers=num_workers)


DATA = {
    "stateful": lambda: Positioned(batches()),
    "loader": loaded,
    "loader with workers": lambda: loaded(2),
    "prefetched": lambda: ft.data.prefetch(loaded(), "cpu"),
}

ENDS = [*(("stateful", steps) for steps in (4, 5, 7)), ("loader", 5), ("loader with workers", 4), ("prefetched", 7)]
OTHER_ENDS = [end for end in itertools.product(DATA, (4, 5, 7)) if end not in ENDS]


@pytest.mark.parametrize(("source", "steps"), [*ENDS, *exhaustive_rows(OTHER_ENDS)])
def test_a_second_fit_in_one_process_continues_in_the_data(source, steps):
    step, data = make(), DATA[source]()
    first = fit(step, data, steps=steps)
    second = fit(step, data, first.state, steps=STEPS)
    expected = fit(make(), DATA[source]())
    assert_same(ft.FitResult(second.state, first.history + second.history), expected)


def test_data_without_a_position_is_read_again_with_a_warning(tmp_path):
    def data():
        return DataLoader(batches(), batch_size=None)

    expected = fit(make(), data())
    killed(make(), data(), 8, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    with pytest.warns(UserWarning, match="DataLoader has no position to save, so 1 batches are read again"):
        actual = fit(make(), data(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_same(actual, expected)


def test_the_warning_says_if_data_has_a_position_now_and_had_none_when_it_was_saved(tmp_path):
    killed(make(), DataLoader(batches(), batch_size=None), 8, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    loader = ft.data.loader(ft.data.arrays({"x": torch.ones(16, 3)}), 4, seed=0, collate=lambda rows: batches()[0])
    with pytest.warns(UserWarning, match="Loader had no position in the run that is resumed, so"):
        fit(make(), loader, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))


def test_a_run_of_another_step_is_refused_and_the_matching_leaves_can_be_loaded(tmp_path):
    checkpoints = ft.Checkpoints(tmp_path, every=EVERY)
    first = fit(make(), batches(), steps=EVERY, checkpoints=checkpoints)
    averaging = make(ft.ema(0.9))
    with pytest.raises(StructureError, match=r"slots\.ema: missing") as caught:
        fit(averaging, batches(), checkpoints=checkpoints)
    (note,) = caught.value.__notes__
    assert note.startswith(f"fit: {tmp_path} holds a run of another step; pass that step, or use another directory")
    # As the note says.
    like = {"state": averaging.init()}
    state = ft.checkpoint.load(checkpoints.path(EVERY), like=like, partial=True)["state"]
    assert_same(ft.FitResult(state.params, []), ft.FitResult(first.state.params, []))
    assert int(fit(averaging, batches(), state).state.step) == STEPS


def test_parameters_that_were_trained_and_are_now_frozen_keep_their_trained_values(tmp_path):
    params = {"a": torch.ones(2), "b": torch.ones(2)}

    def loss(params, batch):
        return (params["a"] * params["b"] * batch).sum()

    step = ft.train_step(loss, ft.optim.adam(0.1))
    state, _ = step(step.init(params), torch.ones(2))
    ft.checkpoint.save(tmp_path / "a", {"state": state})
    freezing = ft.train_step(loss, ft.optim.adam(0.1), trainable=["b"])
    for rename in ({}, {"state.buffers": "unused"}):
        like = {"state": freezing.init(params)}
        actual = ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename)["state"]
        assert torch.equal(actual.frozen["a"], state.params["a"])
        assert torch.equal(actual.params["b"], state.params["b"])
        freezing(actual, torch.ones(2))
    ft.checkpoint.save(tmp_path / "b", {"state": freezing.init(params)})
    message = (
        r"a parameter that is None in it was frozen: to train it, load without like=.*\n  state\.params\.a: found None"
    )
    with pytest.raises(StructureError, match=message):
        ft.checkpoint.load(
            tmp_path / "b", like={"state": step.init(params)}, partial=True, rename={"state.opt_state": "unused"}
        )


def test_rename_loads_frozen_parameters_into_a_state_that_trains_them(tmp_path):
    step = ft.train_step(lambda params, batch: (params["a"] * params["b"] * batch).sum(), ft.optim.adam(0.1))
    freezing = ft.compose(ft.train_step(step.base, ft.optim.adam(0.1), trainable=["b"]))
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state, _ = freezing(freezing.init(params), torch.ones(2))
    ft.checkpoint.save(tmp_path / "a", {"state": state})
    like = {"state": step.init({name: torch.zeros(2) for name in params})}
    rename = {"state.frozen": "state.params", "state.opt_state": "unused"}
    actual = ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename)["state"]
    assert torch.equal(actual.params["a"], torch.ones(2))
    assert torch.equal(actual.params["b"], state.params["b"])


@pytest.mark.parametrize("rename", [{}, {"state.step": "unused"}])
def test_partial_refuses_to_load_none_of_the_parameters_of_a_model(rename, tmp_path):
    step = make()
    ft.checkpoint.save(tmp_path / "a", {"state": step.init()})
    wrapped = make(module=nn.Sequential(step.loss.module))
    for like in (step.init(), {"state": wrapped.init()}):  # Nested in another way, or with a prefix.
        with pytest.raises(
            StructureError, match=r"has no (leaf|parameter) of like, which would stay as it is: it has "
        ):
            ft.checkpoint.load(tmp_path / "a", like=like, partial=True, rename=rename)
    other = {"state": step.init(), "critic": wrapped.init()}
    assert ft.checkpoint.load(tmp_path / "a", like=other, partial=True, rename=rename).keys() == other.keys()


@pytest.mark.parametrize("data", DATA)
def test_data_with_a_position_goes_on_mid_epoch(data, tmp_path):
    data = DATA[data]
    expected = fit(make(), data())
    killed(make(), data(), 8, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    actual = fit(make(), data(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_same(actual, expected)


def test_a_resumed_state_takes_the_memory_of_the_one_given(tmp_path):
    expected = fit(make(), batches(), steps=4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    step = make()
    given = step.init(seed=3)
    addresses = [leaf.data_ptr() for leaf in ft.tree.leaves((given.params, given.buffers, given.opt_state))]
    actual = fit(step, batches(), given, steps=4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    state = actual.state
    assert [leaf.data_ptr() for leaf in ft.tree.leaves((state.params, state.buffers, state.opt_state))] == addresses
    assert_same(actual, expected)
    with pytest.raises(ft.errors.ConsumedError):
        _ = given.params
    # A state that other code may hold is not overwritten.
    shared = ft.tree.clone(step.init(seed=3))
    kept = ft.tree.clone(shared)
    assert_same(fit(step, batches(), shared, steps=4, checkpoints=ft.Checkpoints(tmp_path, every=EVERY)), expected)
    assert all(map(torch.equal, ft.tree.leaves(shared), ft.tree.leaves(kept)))


def test_a_log_has_one_row_per_step_after_resuming(tmp_path):
    path = tmp_path / "log" / "steps.jsonl"
    for at in (5, 8):
        killed(
            make(), batches(), at, loggers=[ft.loggers.jsonl(path)], checkpoints=ft.Checkpoints(tmp_path, every=EVERY)
        )
    with path.open("a") as file:
        file.write('{"step": 9, "lo')
    actual = fit(make(), batches(), loggers=[ft.loggers.jsonl(path)], checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
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


def test_the_last_evaluation_is_made_and_logged_once(tmp_path):
    path, seen = tmp_path / "steps.jsonl", []

    def run():
        return fit(
            make(),
            batches(),
            steps=None,
            epochs=2,
            evaluate=lambda state: seen.append(int(state.step)) or {"score": float(state.step)},
            loggers=[ft.loggers.jsonl(path)],
            checkpoints=ft.Checkpoints(tmp_path / "run", every=5),
        )

    first, second, third = run(), run(), run()
    assert_same(second, first)
    assert_same(third, first)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 11), 10]


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

    def run(**more):
        checkpoints = ft.Checkpoints(tmp_path, every=EVERY, best="eval_score", mode="max")
        return fit(make(), data_class(batches(2)), **limits, evaluate=evaluate, checkpoints=checkpoints, **more)

    first = run()
    assert evaluations == [6]
    assert best_step(tmp_path) == 6
    # A finished run is not evaluated again.
    assert_same(run(), first)
    assert evaluations == [6]


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
    assert_same(run(killing), actual)


class FailedError(Exception):
    """Raised by one of the functions that are arguments of `fit`."""


FAILING = {"logger": 5, "evaluate": 4, "stop": 4, "adapt": 4}
"""The step after which each function fails."""


@pytest.mark.parametrize("failing_part", FAILING)
def test_an_error_between_steps_loses_nothing(failing_part, tmp_path):
    """The step is saved, and the resumed run makes the calls that were missing after it."""
    rule, at = ft.schedules.reduce_on_plateau(factor=0.5, patience=0), FAILING[failing_part]

    def failing(name, function):
        def failed(*args):
            if name == failing_part == broken and step_of(args) == at:
                raise FailedError
            return function(*args)

        return failed

    def step_of(args):
        return args[0]["step"] if isinstance(args[0], dict) else int(getattr(args[0], "step", seen[-1]))

    def evaluate(state):
        seen.append(int(state.step))
        return {"score": float(-(state.step % 3))}

    def run(directory=None):
        module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 2))
        torch.manual_seed(0)
        for leaf in module.parameters():
            nn.init.normal_(leaf)
        step = ft.train_step(ft.from_module(module, squares), ft.optim.adjustable(ft.optim.adamw(0.05)))
        log_loggers = [] if directory is None else [ft.loggers.jsonl(directory / "log.jsonl")]
        return fit(
            step,
            Positioned(batches()),
            log_every=5,
            evaluate=failing("evaluate", evaluate),
            evaluate_every=2,
            stop=failing("stop", ft.patience("eval_score", 3)),
            adapt=failing("adapt", ft.plateau("eval_score", rule)),
            loggers=[failing("logger", lambda record: None), *log_loggers],
            checkpoints=None if directory is None else ft.Checkpoints(directory / "run", every=7),
        )

    seen, broken = [], None
    expected = run()
    assert len(set(expected.history["lr"])) > 2
    assert expected.history.stopped == "patience(eval_score)"
    broken = failing_part
    with pytest.raises(FailedError) as caught:
        run(tmp_path)
    assert caught.value.result.history[-1]["step"] == at
    assert ft.Checkpoints(tmp_path / "run", every=7).steps() == [at]
    broken = None
    actual = run(tmp_path)
    assert_same(actual, expected)
    assert actual.history.stopped == expected.history.stopped
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert rows == list(actual.history)


def test_early_stopping_and_the_best_go_on(tmp_path):
    values = [5.0, 3.0, 4.0, 4.5, 3.5, 1.0]

    def evaluate(state):
        return {"eval_loss": values[int(state.step) // 2 - 1]}

    options = {"evaluate": evaluate, "evaluate_every": 2, "stop": ft.patience("eval_loss", 3)}
    expected = fit(make(), batches(), **options)
    assert expected.history.stopped == "patience(eval_loss)"
    assert expected.history["eval_loss"] == values[:5]

    def run():
        return ft.Checkpoints(tmp_path, every=2, keep=1, best="eval_loss")

    killed(make(), batches(), 7, checkpoints=run(), **options)
    actual = fit(make(), batches(), checkpoints=run(), **options)
    assert_same(actual, expected)
    assert actual.history.stopped == "patience(eval_loss)"
    assert run().steps() == [4, 10]
    assert run().latest(best=True).step == 4
    again = fit(make(), batches(), checkpoints=run(), **options)
    assert_same(again, expected)


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
def test_patience(values, count, options, stopped):
    stop = ft.patience("x", count, **options)
    reasons = [stop(History([{"x": value} for value in values[:end]])) for end in range(1, len(values) + 1)]
    first = next((index for index, reason in enumerate(reasons, 1) if reason), None)
    assert first == stopped


def test_resume_must_needs_a_checkpoint_and_never_refuses_one(tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*resume='must'"):
        fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path / "typo", every=EVERY), resume="must")
    assert not (tmp_path / "typo").exists()
    fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), resume="never", steps=4)
    with pytest.raises(CheckpointError, match="holds a run at step 4"):
        fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), resume="never")
    assert "continues" not in capsys.readouterr().err
    actual = fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), resume="must", progress=True)
    assert f"fit: continues from {tmp_path / 'step-000000000004'}\n" in capsys.readouterr().err
    assert_same(actual, fit(make(), batches()))
    with pytest.raises(OptionError, match="resume is 'yes'"):
        fit(make(), batches(), resume="yes")
    with pytest.raises(OptionError, match="needs checkpoints="):
        fit(make(), batches(), resume="must")


def test_another_model_is_refused_before_a_step(tmp_path):
    fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), steps=4)
    step = make(module=nn.Linear(4, 2))
    with pytest.raises(StructureError, match=r"(?s)params\.weight: missing.*params\.0\.weight: unexpected"):
        fit(step, batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))


def test_another_number_of_threads_than_in_the_saved_run_is_warned_of(tmp_path):
    fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY), steps=4)
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match=r"(?s)may differ in the last bits.*threads: 1, now 2"):
            fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    finally:
        torch.set_num_threads(1)


def test_a_plain_function_resumes_too(tmp_path):
    generator, critic = make(), make(ft.clip(1.0))

    def both(states, batch):
        g, metrics = generator(states["g"], batch)
        d, _ = critic(states["d"], batch)
        return {"g": g, "d": d}, {"loss": metrics["loss"]}

    def start():
        return {"g": generator.init(seed=1), "d": critic.init(seed=2)}

    expected = fit(both, batches(), start(), steps=8)
    killed(both, batches(), 5, state=start(), steps=8, checkpoints=ft.Checkpoints(tmp_path, every=2))
    actual = fit(both, batches(), start(), steps=8, checkpoints=ft.Checkpoints(tmp_path, every=2))
    assert_same(actual, expected)


def test_an_error_in_a_step_leaves_the_last_checkpoint(tmp_path):
    bad = batches()
    bad[4] = torch.ones(4, 9)
    with pytest.raises(Exception, match=r"shape|size|mat"):
        fit(make(), bad, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    actual = fit(make(), batches(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_same(actual, fit(make(), batches()))


# Replay


@pytest.mark.parametrize("at", choose([1, 2, 4, 5, 6, 9, STEPS], [1, 4, 6, STEPS]))
@pytest.mark.parametrize("data_class", [list, Positioned])
def test_a_step_is_replayed(at, data_class, tmp_path):
    step, data = make(ft.clip(1.0)), data_class(batches())
    checkpoints = ft.Checkpoints(tmp_path, every=EVERY, keep=2)
    expected = fit(step, data, checkpoints=checkpoints)
    first = step.init(seed=3)
    state, batch = ft.replay(step, first, data, checkpoints, at=at)
    assert int(state.step) == at - 1
    assert torch.equal(batch, batches()[(at - 1) % BATCHES])
    _, metrics = step(state, batch)
    assert float(metrics["loss"]) == expected.history["loss"][at - 1]
    assert float(metrics["grad_norm"]) == expected.history["grad_norm"][at - 1]
    step(first, batch)


@pytest.mark.parametrize("at", [2, 4, 5, 8])
def test_a_run_that_resumes_keeps_the_lines_of_earlier_runs_in_one_log(at, tmp_path):
    step, log = make(), ft.loggers.jsonl(tmp_path / "log.jsonl")
    options = {"loggers": [log], "evaluate": lambda state: {"a": 1.0}, "evaluate_every": 4}
    fit(step, batches(), **options)
    first = (tmp_path / "log.jsonl").read_text().splitlines()
    options["checkpoints"] = ft.Checkpoints(tmp_path / "run", every=EVERY)
    killed(step, batches(), at, **options)
    fit(step, batches(), **options)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert lines[: len(first)] == first
    steps = [json.loads(line)["step"] for line in lines]
    assert steps[: len(first)] == steps[len(first) :]


@pytest.mark.parametrize(("every", "at"), [(6, 11), (6, 10), (4, 11), (6, 9), (6, 8)])
def test_a_replay_that_is_not_the_run_is_warned_of(every, at, tmp_path):
    """The learning rate falls after steps 4 and 8. A replay does not repeat that: one across step 8 is wrong."""
    step = ft.train_step(
        lambda params, batch: (batch @ params["w"]).square().mean(), ft.optim.adjustable(ft.optim.sgd(0.1))
    )
    checkpoints = ft.Checkpoints(tmp_path, every=every, keep=9)
    options = {
        "evaluate": lambda state: {"a": 1.0},
        "evaluate_every": 4,
        "adapt": ft.plateau("eval_a", ft.schedules.reduce_on_plateau(patience=0)),
    }
    first = step.init({"w": torch.ones(4)})
    _, history = ft.fit(
        step, ft.tree.clone(first), batches(), steps=12, progress=False, checkpoints=checkpoints, **options
    )
    differs = every == 6 and at > 8
    expected = pytest.warns(UserWarning, match="replay: lr of step 9 is") if differs else contextlib.nullcontext()
    with expected:
        before, batch = ft.replay(step, first, batches(), checkpoints, at=at)
    assert (float(step(before, batch)[1]["lr"]) != history["lr"][at - 1]) == differs


def test_replay_needs_a_checkpoint_or_a_first_state_before_the_step(tmp_path):
    step = make()
    checkpoints = ft.Checkpoints(tmp_path, every=EVERY, keep=1)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        ft.replay(step, step.init(seed=3), batches(), checkpoints, at=3)
    actual = fit(step, batches(), checkpoints=checkpoints)
    with pytest.raises(CheckpointError, match="is from before step 3"):
        ft.replay(step, actual.state, batches(), checkpoints, at=3)
    with pytest.raises(OptionError, match="at is 0"):
        ft.replay(step, step.init(seed=3), batches(), checkpoints, at=0)


def test_saving_and_resuming_a_plain_run_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (4, 8):
            fit(make(), batches(), steps=steps, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))


def test_a_state_or_text_that_cannot_be_saved_is_refused_before_a_step(tmp_path):
    batches_seen = []

    def count(state, batch):
        batches_seen.append(batch)
        return state, {}

    texts = {"../config.json": "{}"}
    with pytest.raises(CheckpointError, match=r"state\.names: \{1, 2\} is a builtins\.set"):
        ft.fit(count, {"names": {1, 2}}, batches(), checkpoints=ft.Checkpoints(tmp_path, every=9), progress=False)
    with pytest.raises(OptionError, match=r"texts has the name '\.\./config\.json'"):
        ft.fit(count, {}, batches(), checkpoints=ft.Checkpoints(tmp_path, every=9, texts=texts), progress=False)
    assert not batches_seen


SAVE_FROM_A_CHECKOUT = """
import importlib.metadata, sys, torch
import ftrain as ft

assert not list(importlib.metadata.distributions(name="ftrain"))
step = ft.train_step(lambda params, batch: (batch @ params["w"]).square().mean(), ft.optim.sgd(0.1))
checkpoints = ft.Checkpoints(sys.argv[1], every=1)
ft.fit(step, step.init({"w": torch.ones(4)}), [torch.ones(2, 4)], checkpoints=checkpoints, progress=False)
print(checkpoints.latest().environment["ftrain"])
"""


def test_a_checkout_that_is_not_installed_saves(tmp_path):
    """The import path has every installed package, and ftrain as sources without the metadata of an installation."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for installed in Path(torch.__file__).parents[1].iterdir():
        if "ftrain" not in installed.name:
            (packages / installed.name).symlink_to(installed)
    # Not ROOT itself: installing leaves a folder of metadata beside the sources.
    (packages / "ftrain").symlink_to(ROOT / "ftrain")
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, "-S", "-c", SAVE_FROM_A_CHECKOUT, str(tmp_path / "run")]
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout.strip()) == (0, ft.__version__), process.stderr


@pytest.mark.parametrize("steps", [EVERY, EVERY + 1])
def test_a_disk_that_is_full_at_the_end_loses_nothing(steps, tmp_path, monkeypatch):
    step = make()
    monkeypatch.setattr(files, "free_bytes", lambda path: 10)
    with pytest.raises(CheckpointError, match="10 are free") as caught:
        ft.fit(step, step.init(), batches(), steps=steps, checkpoints=ft.Checkpoints(tmp_path / "run", every=EVERY))
    assert int(caught.value.result.state.step) == steps
    assert len(caught.value.result.history["loss"]) == steps
