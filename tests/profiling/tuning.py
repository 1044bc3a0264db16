"""A step and a batch to tune, and what the tests read from the trials."""

import ftrain as ft
from tests.profiling.problem import batch, make, with_cache

WIDTH, LENGTH = 64, 2048


def step_and_batch(*wrappers):
    return make(*wrappers, width=WIDTH, optimizer=ft.optim.sgd(0.1, momentum=0.9)), batch(LENGTH, WIDTH)


def predicted_peak(step, inputs):
    return with_cache(ft.anatomy)(step, step.init(), inputs, measure=False).peak


def wrapper_names(step):
    return [wrapper.name for wrapper in step.wrappers]


def verdicts(trials):
    """Return the verdict of each trial by its number of microbatches and its policy of rematerialisation."""
    return {(row.microbatches, row.policy): row.verdict for row in trials.rows}
