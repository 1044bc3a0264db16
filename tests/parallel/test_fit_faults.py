"""An error around the steps of `fit` on one of two ranks ends both within the deadline, and each says why."""

import pytest

import ftrain as ft
from ftrain.checkpoint import heartbeats
from ftrain.errors import BatchError, ComposeError, DataError, OptionError, RankError
from ftrain.parallel import rank_watch
from tests.faults.forks import BROKEN, quiet_forks
from tests.parallel import models
from tests.parallel.processes import started
from tests.parallel.ranks import run

SECONDS = 2.0
"""The deadline."""
STEPS = 4


class Data:
    """Batches that keep their position, and end or fail early on the faulty rank."""

    def __init__(self, count=STEPS, *, third=None, failing_position=False):
        self._count, self._third, self._failing_position, self._position = count, third, failing_position, 0

    def __iter__(self):
        for batch in list(models.batches(STEPS))[self._position : self._count]:
            self._position += 1
            yield self._third if self._third and self._position == 3 else batch
        self._position = 0

    def state_dict(self):
        if self._failing_position and self._position == STEPS - 1:
            raise OSError("no position")
        return {"position": self._position}

    def load_state_dict(self, position):
        self._position = position["position"]


class Log:
    """A logger that cannot go back to where the run was."""

    def __call__(self, record):
        pass

    def rewind(self, *_):
        raise OSError("no log")


def evaluating(step, is_faulty):
    """Return options: an evaluation by all ranks together, which the faulty rank does not reach."""
    eval_step, calls = ft.eval_step(step.loss), []

    def evaluate(state):
        calls.append(state)
        if is_faulty and len(calls) == 2:
            raise OSError("no file")
        return ft.evaluate(eval_step, state, models.batches(1))

    return {"evaluate": evaluate, "evaluate_every": 1}


def counting(step, is_faulty):
    """Return options: a count of items, which fails in the second step of the faulty rank. Metrics are read later."""
    calls = []

    def count(batch):
        calls.append(batch)
        if is_faulty and len(calls) == 2:
            raise OSError("no count")
        return len(batch["x"])

    return {"throughput": {"examples": count}, "log_every": 3, "every": 3}


FAULTS = {
    "evaluate": (evaluating, "OSError: no file", "failed after step 2, in evaluate: OSError: no file"),
    "throughput": (counting, "OSError: no count", "failed in throughput, and so all ranks stop: OSError: no count"),
    "end of data": (
        lambda step, is_faulty: {"data": Data(2) if is_faulty else Data()},
        "DataError: fit: the data of this rank has ended, and rank {1} is in step 3",
        "failed after step 2, at the end of its data, of which each rank needs as many batches: DataError: fit: the",
    ),
    "batch": (
        lambda step, is_faulty: {"data": Data(third="nonsense" if is_faulty else None)},
        "BatchError: sharded: the batch has no tensor with an axis to split",
        "failed in step 3: BatchError: sharded: the batch has no tensor with an axis to split",
    ),
    "position": (
        lambda step, is_faulty: {"data": Data(failing_position=is_faulty)},
        "OSError: no position",
        "failed after step 3: OSError: no position",
    ),
    "log": (
        lambda step, is_faulty: {"steps": STEPS, "loggers": [Log()] if is_faulty else []},
        "OSError: no log",
        "failed after step 2: OSError: no log",
    ),
}
"""Name -> a function that returns options of `fit`, the error of the faulty rank, and the text of the other's error.

In ``{}`` are the numbers of the faulty rank and of the other one.
"""
NOT_EXHAUSTIVE = "evaluate", "throughput", "end of data"


def fitting(tell, rank, directory, name, faulty):
    """Train and save, with a fault on one rank; tell how it ended."""
    rank_watch.BEAT, rank_watch.PATIENCE, heartbeats.PATIENCE = 0.1, 0.5, 0.5
    ft.parallel.mesh()  # To start the processes may take longer than the deadline.
    step = models.step_of(ft.sharded(ft.parallel.mesh(timeout=SECONDS), 3))
    options = {"data": Data(), **FAULTS[name][0](step, rank == faulty)}
    if name == "log":
        fit(step, directory, steps=2, data=Data())
    try:
        fit(step, directory, **options)
    except (OSError, BatchError, DataError, RankError) as error:
        tell(f"{type(error).__name__}: {error}")
        raise


def fit(step, directory, *, data, every=1, **options):
    checkpoints = ft.Checkpoints(directory, every=every, async_=False)
    options = {"log_every": 1, "progress": False, **options}
    return ft.fit(step, step.init(seed=5), data, checkpoints=checkpoints, **options)


# Only the first rank has loggers.
FAULTS_OF_RANKS = [(name, faulty) for name in FAULTS for faulty in (0, 1) if (name, faulty) != ("log", 1)]


@quiet_forks
@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        pytest.param(name, faulty, marks=[] if faulty == 0 and name in NOT_EXHAUSTIVE else pytest.mark.exhaustive)
        for name, faulty in FAULTS_OF_RANKS
    ],
)
def test_each_rank_raises_an_error_with_the_cause_and_the_checkpoint_is_complete(name, faulty, tmp_path):
    _, own, others = FAULTS[name]
    with started(2, fitting, tmp_path, name, faulty) as ranks:
        errors = [rank.receive() for rank in ranks]
        assert [rank.wait() for rank in ranks] == [BROKEN, BROKEN]
    other = 1 - faulty
    assert errors[faulty].startswith(own.format(faulty, other))
    assert errors[other].startswith("RankError: ")
    assert f"rank {faulty} {others}" in errors[other]

    def resume(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 3))
        return int(fit(step, tmp_path, data=Data(), resume="must").state.step)

    assert run(1, resume) == [STEPS]


DIFFERENT = {
    "log_every is 1 on rank 1, and 2 on rank 0": {"log_every": lambda rank: 2 - rank},
    "log_every is 0 on rank 1, and 2 on rank 0": {"log_every": lambda rank: 2 * (1 - rank)},
    "steps is 3 on rank 1, and None on rank 0": {"steps": lambda rank: 3 * rank or None},
    "evaluate is None on rank 1, and a function on rank 0": {"evaluate": lambda rank: None if rank else dict},
    "checkpoints is None on rank 1, and {'every': 2, 'keep': 3, 'best': None, 'mode': 'min'} on rank 0": {
        "checkpoints": lambda rank: None if rank else ft.Checkpoints("runs", every=2)
    },
}
"""The text of the second rank's error -> the arguments, by rank."""


def test_different_arguments_on_ranks_are_an_error_before_the_first_step():
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        for text, options in DIFFERENT.items():
            options_of_rank = {name: of_rank(number) for name, of_rank in options.items()}
            with pytest.raises(OptionError if number else RankError) as caught:
                ft.fit(step, step.init(), models.batches(), **options_of_rank)
            assert f"fit: {text}; every rank must call it with the same arguments" in str(caught.value)

    run(2, rank)


def test_an_adapt_that_returns_nothing_on_one_rank_is_an_error_of_all():
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        adapt = lambda state, history: None if number else state  # noqa: E731
        with pytest.raises(ComposeError if number else RankError, match="fit: adapt returned None"):
            ft.fit(step, step.init(), list(models.batches()), adapt=adapt, progress=False, log_every=1)

    run(2, rank)


def test_an_error_without_a_text_is_named_by_its_class():
    def rank(number):
        def adapt(state, history):
            if number:
                raise NotImplementedError
            return state

        step = models.step_of(ft.sharded(ft.parallel.mesh()))
        own_error, error_of_other = (NotImplementedError, "^$"), (RankError, "in adapt, .*: NotImplementedError$")
        error_class, text = own_error if number else error_of_other
        with pytest.raises(error_class, match=text):
            ft.fit(step, step.init(), list(models.batches()), adapt=adapt, progress=False, log_every=1)

    run(2, rank)


@pytest.mark.parametrize("source", ["schedule", "adapt"])
def test_another_rate_on_another_rank_is_an_error_of_all(source):
    def rank(number):
        rate = (lambda step: 0.1 * (1 + number)) if source == "schedule" else 0.1
        optimizer = ft.optim.adjustable(ft.optim.sgd(rate))
        step = models.step_of(ft.sharded(ft.parallel.mesh()), optimizer=optimizer)
        adapt = (lambda state, history: ft.optim.adjust(state, {"lr": 1.0 + number})) if source == "adapt" else None
        with pytest.raises(
            OptionError if number else RankError, match=r"fit: lr of step \d is 0.2 on this rank, and 0.1 "
        ):
            ft.fit(step, step.init(), list(models.batches()), adapt=adapt, progress=False, log_every=1)

    run(2, rank)
