"""Resuming: the position in the data, and the passes over it, go on where they were."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import ftrain as ft
from tests.exhaustive import exhaustive_rows
from tests.training.interrupted_runs import (
    BATCHES,
    EVERY,
    STEPS,
    Positioned,
    assert_results_equal,
    batches,
    fit,
    fit_until_killed,
    make,
)


class WrapsAround(Positioned):
    """Data whose position after the last batch is the same as before the first one."""

    def __iter__(self):
        self.resumed = True
        for _ in range(self.at, len(self.batches)):
            self.at = (self.at + 1) % len(self.batches)
            yield self.batches[self.at - 1]

    def __len__(self):
        return len(self.batches)


def row_loader(num_workers=0):
    """Return a loader of shuffled rows, in batches of 4 and a last one of 3."""
    return ft.data.loader(torch.stack(batches(23, 1)).squeeze(1), 4, seed=1, num_workers=num_workers)


DATA = {
    "stateful": lambda: Positioned(batches()),
    "loader": row_loader,
    "loader with workers": lambda: row_loader(2),
    "prefetched": lambda: ft.data.prefetch(row_loader(), "cpu"),
}


def test_a_position_is_set_without_reading_the_batches_before_it(tmp_path):
    fit_until_killed(make(), Positioned(batches(50)), 40, steps=50, checkpoints=ft.Checkpoints(tmp_path, every=30))
    data = Positioned(batches(50))
    fit(make(), data, steps=50, checkpoints=ft.Checkpoints(tmp_path, every=30))
    # The last checkpoint is that of step 30.
    assert data.read == 50 - 30


@pytest.mark.parametrize(("epochs", "at"), [(1, 5), (2, 5), (3, 6), *exhaustive_rows([(1, 4)])])
@pytest.mark.parametrize("data_class", [list, Positioned, WrapsAround])
def test_passes_are_counted_over_pieces(epochs, data_class, at, tmp_path):
    options = {"steps": None, "epochs": epochs}
    expected = fit(make(), data_class(batches()), **options)
    fit_until_killed(make(), data_class(batches()), at, checkpoints=ft.Checkpoints(tmp_path, every=1), **options)
    actual = fit(make(), data_class(batches()), checkpoints=ft.Checkpoints(tmp_path, every=1), **options)
    assert_results_equal(actual, expected)
    assert len(actual.history) == epochs * BATCHES


@pytest.mark.parametrize("source", ["list", "stateful", "loader", "prefetched"])
def test_completed_epochs_are_not_repeated(source, tmp_path, caplog):
    data = {"list": batches, **DATA}[source]
    for epochs in (1, 1, 2, 4):
        # Saved only at the end, where the position of some data is the end of the epoch, and of other data a new start.
        checkpoints = ft.Checkpoints(tmp_path, every=100)
        actual = fit(make(), data(), steps=None, epochs=epochs, checkpoints=checkpoints)
        assert_results_equal(actual, fit(make(), data(), steps=None, epochs=epochs))
    (message,) = caplog.messages
    assert "no step is made, for epochs=1, and 1 were made before" in message


@pytest.mark.parametrize("source", DATA)
def test_data_with_a_position_goes_on_mid_epoch(source, tmp_path):
    data = DATA[source]
    expected = fit(make(), data())
    fit_until_killed(make(), data(), 8, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    actual = fit(make(), data(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_results_equal(actual, expected)


# Source of the data -> steps of the first of two calls of `fit`: within a pass of 5 batches, at its end, and after it.
ENDS = [*(("stateful", steps) for steps in (4, 5, 7)), ("loader", 5), ("loader with workers", 4), ("prefetched", 7)]

REST_OF_ENDS = [end for end in itertools.product(DATA, (4, 5, 7)) if end not in ENDS]


@pytest.mark.parametrize(("source", "steps"), [*ENDS, *exhaustive_rows(REST_OF_ENDS)])
def test_a_second_fit_in_one_process_continues_in_the_data(source, steps):
    step, data = make(), DATA[source]()
    first = fit(step, data, steps=steps)
    second = fit(step, data, first.state, steps=STEPS)
    expected = fit(make(), DATA[source]())
    assert_results_equal(ft.FitResult(second.state, first.history + second.history), expected)


def test_data_without_a_position_is_read_again_with_a_warning(tmp_path):
    def data():
        return DataLoader(batches(), batch_size=None)

    expected = fit(make(), data())
    fit_until_killed(make(), data(), 8, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    with pytest.warns(UserWarning, match="DataLoader has no position to save, so 1 batches are read again"):
        actual = fit(make(), data(), checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
    assert_results_equal(actual, expected)


def test_the_warning_says_if_data_has_a_position_now_and_had_none_when_it_was_saved(tmp_path):
    fit_until_killed(
        make(), DataLoader(batches(), batch_size=None), 8, checkpoints=ft.Checkpoints(tmp_path, every=EVERY)
    )
    loader = ft.data.loader(ft.data.arrays({"x": torch.ones(16, 3)}), 4, seed=0, collate=lambda rows: batches()[0])
    with pytest.warns(UserWarning, match="Loader had no position in the run that is resumed, so"):
        fit(make(), loader, checkpoints=ft.Checkpoints(tmp_path, every=EVERY))
