"""Warnings of `fit` when it continues from a checkpoint: of another pipeline, state or data than those of the run.

Warnings are errors in the tests, so a run that must not warn is simply made.
"""

import re
import shutil
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, WeightedRandomSampler

import ftrain as ft
from ftrain.errors import DataError


def loss(params, batch):
    return (batch @ params["w"]).square().mean()


def other_loss(params, batch):
    return loss(params, batch) + 1


def batches(count=8, as_loader=False):
    data = [torch.ones(4, 2)] * count
    return DataLoader(data, batch_size=None) if as_loader else data


def run(directory, steps, optimizer, *wrappers, data=None, loss=loss):
    """Begin or resume a run in a directory, up to this number of steps."""
    step = ft.compose(ft.train_step(loss, optimizer), *wrappers)
    state, data = step.init({"w": torch.ones(2)}), batches() if data is None else data
    checkpoints = ft.Checkpoints(directory, every=1)
    return ft.fit(step, state, data, steps=steps, checkpoints=checkpoints, progress=False)


def test_another_pipeline_is_named_once(tmp_path):
    run(tmp_path, 2, ft.optim.adamw(1e-2), ft.clip(1.0))
    with pytest.warns(UserWarning, match="another pipeline has saved") as caught:
        run(tmp_path, 3, ft.optim.lamb(lambda step: 1e-3), ft.clip(1.0), ft.sam(0.1))
    (message,) = [str(warning.message) for warning in caught]
    changes = [line.strip() for line in message.splitlines()[1:]]
    assert [change.partition("(")[0] for change in changes] == ["- adamw", "+ lamb", "+ sam"]
    run(tmp_path, 4, ft.optim.lamb(lambda step: 1e-3), ft.clip(1.0), ft.sam(0.1))


def test_donation_and_compilation_may_change(tmp_path):
    run(tmp_path, 2, ft.optim.adamw(1e-2), ft.clip(1.0))
    run(tmp_path, 3, ft.optim.adamw(1e-2), ft.clip(1.0), ft.donated())
    run(tmp_path, 4, ft.optim.adamw(1e-2), ft.clip(1.0), ft.compiled(backend="eager"))


def test_the_order_of_wrappers_of_different_parts_may_change(tmp_path):
    run(tmp_path, 2, ft.optim.adamw(0.1), ft.clip(1.0), ft.ema(0.9), ft.matmul_precision("high"))
    run(tmp_path, 3, ft.optim.adamw(0.1), ft.matmul_precision("high"), ft.ema(0.9), ft.clip(1.0))


def test_another_order_of_wrappers_of_the_gradient_is_another_pipeline(tmp_path):
    run(tmp_path, 2, ft.optim.adamw(0.1), ft.accumulate(2), ft.clip(1.0))
    with pytest.warns(UserWarning, match="another pipeline has saved"):
        run(tmp_path, 3, ft.optim.adamw(0.1), ft.clip(1.0), ft.accumulate(2))


def test_the_directory_of_offloaded_optimizer_state_may_change(tmp_path):
    run(tmp_path / "run", 2, ft.optim.adamw(0.1), ft.offload("opt_state", directory=tmp_path / "a"))
    run(tmp_path / "run", 3, ft.optim.adamw(0.1), ft.offload("opt_state", directory=tmp_path / "b"))


def test_an_option_that_does_not_print_is_named(tmp_path):
    run(tmp_path, 2, ft.optim.adamw(0.1))
    message = r"another pipeline has saved[^-+]*- adamw with b2=0\.999\s*\+ adamw with b2=0\.9$"
    with pytest.warns(UserWarning, match=message):
        run(tmp_path, 3, ft.optim.adamw(0.1, b2=0.9))
    run(tmp_path, 4, ft.optim.adamw(0.1, b2=0.9))


def sgd_with_decay(mask):
    return ft.optim.sgd(0.1, weight_decay=0.1, decay_mask=mask)


@pytest.mark.parametrize(
    ("first", "second", "changes"),
    [
        ({"loss": loss}, {"loss": other_loss}, "- loss + other_loss"),
        (
            {"optimizer": sgd_with_decay(ft.optim.everything)},
            {"optimizer": sgd_with_decay(["w"])},
            "- sgd with decay_mask='everything' + sgd with decay_mask=\"['w']\"",
        ),
        (
            {"optimizer": ft.optim.sgd(lambda k: 0.1 / (k + 1))},
            {"optimizer": ft.optim.sgd(lambda k: 0.2 / (k + 1))},
            "- lr of step 2 was 0.05 + its schedule gives 0.1",
        ),
        (
            {"optimizer": ft.optim.sgd(ft.schedules.chain([lambda k: 0.1 / (k + 1), 1.0], [9]))},
            {"optimizer": ft.optim.sgd(ft.schedules.chain([lambda k: 0.2 / (k + 1), 1.0], [9]))},
            "- lr of step 2 was 0.05 + its schedule gives 0.1",
        ),
    ],
    ids=["loss", "decay mask", "rate that is a function", "function in a chain"],
)
def test_a_changed_part_of_the_pipeline_is_named(tmp_path, first, second, changes):
    options = {"optimizer": ft.optim.sgd(0.1)}
    run(tmp_path, 2, **(options | first))
    run(tmp_path, 2, **(options | first))
    with pytest.warns(UserWarning, match="another pipeline has saved") as caught:
        run(tmp_path, 3, **(options | second))
    (message,) = [str(warning.message) for warning in caught]
    assert " ".join(message.partition("What has changed:")[2].split()) == changes


def test_a_schedule_that_fails_for_the_step_of_the_checkpoint_is_not_compared(tmp_path):
    run(tmp_path, 2, ft.optim.sgd(lambda k: 0.1))
    run(tmp_path, 3, ft.optim.sgd(lambda k: {0: 0.1, 2: 0.2}[k]))


def test_an_option_that_an_earlier_version_did_not_save_has_not_changed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            "ftrain.training.resume.pipeline_texts",
            lambda step: {"pipeline": [step.optimizer.text], "options": ["sgd with momentum=0.0"]},
        )
        run(tmp_path, 2, sgd_with_decay(ft.optim.everything))
    run(tmp_path, 3, sgd_with_decay(ft.optim.everything))


def test_a_state_that_is_ahead_of_the_checkpoint_is_replaced_with_a_warning(tmp_path):
    state, _ = run(tmp_path, 2, ft.optim.sgd(0.1))
    step, checkpoints = ft.train_step(loss, ft.optim.sgd(0.1)), ft.Checkpoints(tmp_path, every=1)
    state, _ = ft.fit(step, state, batches(), steps=3, checkpoints=checkpoints, progress=False)
    state, _ = ft.fit(step, state, batches(), steps=5, progress=False)
    with pytest.warns(UserWarning, match=r"the state has made 5 steps, and .* is of step 3: .* the state is not used"):
        ft.fit(step, state, batches(), steps=6, checkpoints=checkpoints, progress=False)


def test_a_state_of_another_seed_is_replaced_with_a_warning(tmp_path):
    run(tmp_path, 2, ft.optim.sgd(0.1))
    step = ft.train_step(loss, ft.optim.sgd(0.1))
    state = step.init({"w": torch.ones(2)}, seed=1)
    with pytest.warns(UserWarning, match=r"the state has another seed .* the state is not used"):
        ft.fit(step, state, batches(), checkpoints=ft.Checkpoints(tmp_path, every=1), progress=False)


def test_a_run_whose_loss_became_nan_names_the_last_checkpoint_before_and_continues_from_it(tmp_path):
    """Of step 1, if the loss of step 3 is the first that is NaN: the gradient of step 2 may have been NaN already."""

    def train(steps, third_batch):
        data = [*batches(2), third_batch, *batches(5)]
        log = ft.loggers.jsonl(tmp_path / "log.jsonl")
        step = ft.train_step(loss, ft.optim.sgd(0.1, momentum=0.9))
        options = {"checkpoints": ft.Checkpoints(tmp_path / "run", every=1, keep=2), "loggers": [log]}
        return ft.fit(step, step.init({"w": torch.ones(2)}), data, steps=steps, progress=False, log_every=1, **options)

    nan_batch = torch.full((4, 2), torch.nan)
    for steps in (5, 7):
        with pytest.warns(UserWarning, match=r"the loss of step 3 is nan.* checkpoint of step 1, the newest before"):
            train(steps, nan_batch)
    # What the warning advises: delete the later checkpoints, of which `keep=2` has left two.
    for number in (6, 7):
        shutil.rmtree(tmp_path / "run" / f"step-{number:012}")
    state, history = train(8, torch.ones(4, 2))
    assert history["step"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 8
    assert torch.isfinite(torch.tensor(history["loss"])).all()
    assert int(state.step) == 8


@pytest.mark.parametrize("as_loader", [False, True])
def test_data_with_fewer_batches_than_were_read_is_warned_of(tmp_path, as_loader):
    run(tmp_path, 5, ft.optim.sgd(0.1), data=batches(8, as_loader))
    with pytest.warns(UserWarning, match="has 4 batches, and the run that is resumed had read 5 in this") as caught:
        run(tmp_path, 6, ft.optim.sgd(0.1), data=batches(4, as_loader))
    assert len(caught) == 1


class WithoutPosition:
    """An iterable over a loader that hides the position of the loader."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


def shuffled_data(source):
    """Return data whose passes have different orders, and whose position cannot be saved."""
    rows, generator = torch.arange(6.0)[:, None].expand(6, 2), torch.Generator().manual_seed(0)
    if source == "wrapped":
        return WithoutPosition(ft.data.loader(ft.data.arrays(rows), 2))
    if source == "shuffle":
        return DataLoader(rows, 2, shuffle=True, generator=generator)
    sampler = WeightedRandomSampler([1.0] * 6, 6, generator=generator)
    if source == "sampler":
        return DataLoader(rows, 2, sampler=sampler)
    return DataLoader(rows, batch_sampler=BatchSampler(sampler, 2, drop_last=False))


@pytest.mark.parametrize("source", ["wrapped", "shuffle", "sampler", "batch_sampler"])
@pytest.mark.parametrize(
    ("first_limits", "warns"),
    [({"steps": 2}, False), ({"steps": 3}, False), ({"epochs": 1}, True), ({"steps": 4}, True), ({"steps": 6}, True)],
)
def test_a_resumed_run_warns_if_shuffled_data_repeats_the_order_of_its_first_pass(
    tmp_path, first_limits, warns, source
):
    """A pass has three batches. The run resumes in its first pass, or later."""

    def batches_of_run(limits, checkpoints):
        batches = []

        def recording_loss(params, batch):
            batches.append(batch)
            return loss(params, batch)

        step = ft.train_step(recording_loss, ft.optim.sgd(0.1))
        state = step.init({"w": torch.ones(2)})
        ft.fit(step, state, shuffled_data(source), **limits, checkpoints=checkpoints, progress=False)
        return batches

    uninterrupted = batches_of_run({"steps": 12}, None)
    first = batches_of_run(first_limits, ft.Checkpoints(tmp_path, every=100))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = batches_of_run({"steps": 12}, ft.Checkpoints(tmp_path, every=100))
    assert any("all passes have the same order" in str(warning.message) for warning in caught) is warns
    pairs = zip(first + resumed, uninterrupted, strict=True)
    has_same_order = all(torch.equal(actual, expected) for actual, expected in pairs)
    assert has_same_order is not warns


def test_an_iterator_that_ends_before_the_resumed_position_is_an_error(tmp_path):
    run(tmp_path, 5, ft.optim.sgd(0.1), data=iter(batches()))
    with (
        pytest.warns(UserWarning, match="5 batches are read again and skipped"),
        pytest.raises(DataError, match="the iterator has no batch after the 5 that the run that is resumed had read"),
    ):
        run(tmp_path, 6, ft.optim.sgd(0.1), data=iter(batches(3)))


@pytest.mark.parametrize("as_loader", [False, True])
def test_data_with_another_number_of_batches_is_warned_of(tmp_path, as_loader):
    def messages(steps, count):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(tmp_path, steps, ft.optim.sgd(0.1), data=batches(count, as_loader))
        return [str(warning.message) for warning in caught if "no position to save" not in str(warning.message)]

    assert messages(6, 8) == messages(7, 8) == []
    (message,) = messages(8, 9)
    assert re.search(r"the data has 9 batches, and had 8 when .*step-0+7 was saved: .* after the first 7 of", message)


def test_data_without_a_position_does_not_continue_data_that_had_one(tmp_path):
    run(tmp_path, 5, ft.optim.sgd(0.1), data=ft.data.loader(ft.data.arrays(torch.ones(32, 2)), 4))
    with pytest.raises(DataError, match="fit: the run that is resumed had data that saves its position, and list has"):
        run(tmp_path, 6, ft.optim.sgd(0.1))
