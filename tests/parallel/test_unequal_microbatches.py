"""Batches that microbatches do not divide: N ranks compute what one does with the whole batch."""

import pytest
import torch

import ftrain as ft
from ftrain.errors import LossError
from ftrain.training.oom_retry import split_step
from tests.exhaustive import exhaustive_rows
from tests.parallel import models
from tests.parallel.ranks import run
from tests.parallel.results import assert_near


def plain_with_metrics(model, batch, rng):
    errors = (model(batch["x"] + 0.1 * ft.random.normal(rng, batch["x"].shape, dtype=torch.float64))).square().mean(-1)
    return errors.mean(), {"root": errors.detach().sqrt().mean(), "large": (errors > 0.3).double().mean(), "one": 1.0}


def steps_with_metric(metric):
    """Return a function that makes one step of a batch that two microbatches do not divide, and returns a metric."""

    def rank(_):
        step = models.step_of(
            ft.accumulate(2),
            ft.sharded(ft.parallel.mesh(), 0),
            criterion=lambda model, batch: (models.plain_loss(model, batch), {"odd": metric}),
        )
        return float(step(step.init(), next(models.batches(1, length=7)))[1]["odd"])

    return rank


def test_a_metric_in_float16_counts_once_per_example_without_an_overflow():
    assert run(2, steps_with_metric(torch.tensor(6e4, dtype=torch.float16))) == pytest.approx([6e4, 6e4], rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "text"),
    [(torch.ones(3), r"sharded: the metric odd is float32\[3\]"), ("text", "accumulate: the metric 'odd' is str")],
)
def test_a_metric_that_has_no_mean_is_an_error_with_unequal_microbatches_too(metric, text):
    with pytest.raises(LossError, match=text):
        run(1, steps_with_metric(metric))


UNEVEN = [batch for length in (12, 7, 2, 1) for batch in models.batches(1, length, seed=length)]
"""Batches that 4 microbatches do not divide: with fewer examples than microbatches on a rank, and than ranks."""


@pytest.mark.parametrize(
    ("criterion", "size", "level", "outer"),
    [
        (models.loss, 2, 0, []),
        (plain_with_metrics, 3, 1, [ft.clip(0.05), ft.skip_nonfinite()]),
        (models.loss, 2, 2, []),
        (models.loss, 3, 3, [ft.ema(0.9)]),
        (plain_with_metrics, 4, 3, [ft.sam(0.05)]),
        *exhaustive_rows(
            [
                (plain_with_metrics, 2, 0, []),
                (models.loss, 3, 1, [ft.clip(0.05), ft.skip_nonfinite()]),
                (plain_with_metrics, 2, 2, []),
                (plain_with_metrics, 3, 3, [ft.ema(0.9)]),
                (models.loss, 4, 3, [ft.sam(0.05)]),
            ]
        ),
    ],
    ids=lambda value: "+".join(wrapper.name for wrapper in value) or "alone" if isinstance(value, list) else None,
)
def test_unequal_microbatches_on_ranks_are_the_whole_batch_of_one(criterion, size, level, outer):
    """Dropout too, which a step on ranks draws by example."""

    def train(*microbatches):
        step = models.step_of(*microbatches, *outer, ft.sharded(ft.parallel.mesh(), level), criterion=criterion)
        return models.train(step, UNEVEN)

    (reference,) = run(1, lambda _: train())
    for ranks in (1, size):
        assert_near(run(ranks, lambda _: train(ft.accumulate(4))), reference)


@pytest.mark.parametrize(("size", "level"), [(2, 0), (3, 2), (2, 3)])
def test_a_wrapper_of_each_unequal_microbatch_runs_equally_often_on_all_ranks(size, level):
    """The limit of `clip` is one that no gradient reaches, because microbatches on ranks have other examples."""

    def train(*wrappers):
        step = models.step_of(*wrappers, ft.sharded(ft.parallel.mesh(), level))
        return models.train(step, UNEVEN)[0], []  # `clip` adds a metric.

    (reference,) = run(1, lambda _: train())
    for ranks in (1, size):
        assert_near(run(ranks, lambda _: train(ft.clip(1e6), ft.accumulate(4))), reference)


@pytest.mark.parametrize(
    ("level", "microbatches", "pieces"),
    [(1, 2, 2), (3, 4, 3), (1, 1, 5), *exhaustive_rows([(3, 2, 2), (1, 4, 3), (3, 1, 5)])],
)
def test_a_split_for_memory_within_unequal_microbatches_on_ranks_is_the_whole_batch(microbatches, pieces, level):
    def step_of(*wrappers):
        return models.step_of(*wrappers, ft.sharded(ft.parallel.mesh(), level), criterion=plain_with_metrics)

    (reference,) = run(1, lambda _: models.train(step_of(), UNEVEN))
    for size in (1, 3):
        results = run(size, lambda _: models.train(split_step(step_of(ft.accumulate(microbatches)), pieces), UNEVEN))
        assert_near(results, reference)


def test_unequal_microbatches_of_the_rows_that_each_rank_reads_are_the_whole_batch_of_one_rank():
    data = [*models.batches(3, 10)]

    def step_of(batches, *wrappers):
        sharded = ft.sharded(ft.parallel.mesh(), 2, batches=batches)
        return models.step_of(*wrappers, sharded, criterion=plain_with_metrics)

    def rank(number):
        parts = [ft.tree.map(lambda leaf: leaf.chunk(2)[number], batch) for batch in data]
        return models.train(step_of("rows", ft.accumulate(3)), parts)

    (reference,) = run(1, lambda _: models.train(step_of("whole"), data))
    assert_near(run(2, rank), reference)
