"""Memory runs out on one rank, at any operation of its gradient: all split the step, and the update is the same."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import ftrain as ft
from ftrain.errors import ComposeError, DeviceError
from ftrain.parallel import stand_in
from ftrain.parallel.agreement import Agreement
from ftrain.step.step import Step
from ftrain.training.oom_retry import split_step
from tests.faults.forks import quiet_forks
from tests.parallel import models
from tests.parallel.processes import started
from tests.parallel.ranks import run
from tests.parallel.results import assert_near

SCARCE_STEP = 1
"""The step, counted from 0, in which memory runs out."""
NEVER = -1
"""The number of no operation."""


class Scarce(TorchDispatchMode):
    """Counts the operations of a step, and runs out of memory at one of them."""

    def __init__(self, at):
        super().__init__()
        self.at, self.seen, self.collectives = at, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ != "wait_tensor":
            self.collectives.append(self.seen)
        if self.seen == self.at:
            self.at = None
            raise torch.OutOfMemoryError("out of memory, on purpose")
        return func(*args, **(kwargs or {}))


@pytest.fixture(name="modes")
def _modes(monkeypatch):
    """Return an object whose attribute `mode`, for each thread, is the mode in which its scarce step runs."""
    modes, call = threading.local(), Step.__call__

    def scarcely(self, state, batch):
        mode = getattr(modes, "mode", None)
        if mode is None or int(state.step) != SCARCE_STEP:
            return call(self, state, batch)
        with mode:
            return call(self, state, batch)

    monkeypatch.setattr(Step, "__call__", scarcely)
    return modes


def trained(size, level, modes, at=None, faulty=1, wrappers=(), optimizer=None, model=models.Model, **options):
    """Return the whole states and histories of ranks. The faulty one runs out of memory at the operation `at`.

    With `at=NEVER` its operations are only counted.
    """

    def rank(number):
        modes.mode = Scarce(at) if at is not None and number == faulty else None
        step = models.step_of(*wrappers, ft.sharded(ft.parallel.mesh(), level), optimizer=optimizer, model=model)
        options_of_fit = {"on_oom": "split", "progress": False, **options}
        state, history = ft.fit(step, step.init(seed=5), list(models.batches()), **options_of_fit)
        splits = [record.get("split") for record in history]
        assert splits == ([None] * 3 if at in (None, NEVER) else [None, 2, None])
        return ft.parallel.whole(state), [
            {name: value for name, value in record.items() if name not in ("seconds", "split")} for record in history
        ]

    return run(size, rank)


def operations_of_gradient(size, level, modes, monkeypatch, **options):
    """Return how many operations a rank makes before all agree on their gradients, and which start collectives."""
    counts, largest = [], Agreement.largest

    def counting(self, number):
        mode = getattr(modes, "mode", None)
        if mode is not None and mode.seen:
            counts.append((mode.seen, mode.collectives))
        return largest(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Agreement, "largest", counting)
        trained(size, level, modes, at=NEVER, **options)
    return counts[0]


PLACES = {
    "first": lambda count, collectives: 1,
    "middle": lambda count, collectives: count // 2,
    # A collective without memory for its result is not started.
    "last collective": lambda count, collectives: collectives[-1],
    "last": lambda count, collectives: count,
}
"""Name -> the number of an operation, given the count of operations and the numbers of those that start collectives."""


@pytest.mark.parametrize(
    ("level", "places"),
    [
        (3, ["middle", "last collective"]),
        *(pytest.param(level, list(PLACES), marks=pytest.mark.exhaustive) for level in (0, 1, 2, 3)),
    ],
    ids=str,
)
def test_without_memory_for_an_operation_of_a_gradient_on_one_rank_all_make_the_same_update(
    level, places, modes, monkeypatch
):
    options = {"wrappers": (ft.accumulate(2), ft.clip(0.05), ft.ema(0.8))}
    (reference,) = trained(1, 0, modes, **options)
    count, collectives = operations_of_gradient(2, level, modes, monkeypatch, **options)
    assert count > 100
    for place in places:
        assert_near(trained(2, level, modes, PLACES[place](count, collectives), **options), reference)


@pytest.mark.parametrize(("wrappers", "at"), [([], 1), ([ft.sam(0.05)], 2)], ids=["first", "second"])
def test_without_memory_in_the_first_step_of_one_of_three_ranks_all_make_the_same_update(wrappers, at):
    """In the first step, in which ranks also test whether the loss draws random numbers, and compare what they run."""

    def scarce(number):
        calls = []

        def loss(model, batch):
            calls.append(len(batch["x"]))
            if number == 2 and len(calls) == at:
                raise torch.OutOfMemoryError("out of memory, on purpose")
            return models.plain_loss(model, batch)

        return loss

    def rank(number):
        step = models.step_of(*wrappers, ft.sharded(ft.parallel.mesh(), 3), criterion=scarce(number))
        state, history = ft.fit(step, step.init(seed=5), list(models.batches()), on_oom="split", progress=False)
        pieces = [record["split"] for record in history if "split" in record]
        return ft.parallel.whole(state), [{"loss": record["loss"]} for record in history], pieces

    ((expected, losses, splits),) = run(1, rank)
    assert not splits
    for state, actual, pieces in run(3, rank):
        assert_near([(state, actual)], (expected, losses))
        assert pieces == [2]


def test_no_piece_of_a_microbatch_that_is_split_by_itself_is_empty_on_a_rank():
    """`clip` is between the two wrappers that split, so each microbatch is split by itself.

    Each of three ranks has one row of a microbatch, which stays whole.
    """
    rows = set()

    def criterion(model, batch):
        rows.add(len(batch["x"]))
        return models.plain_loss(model, batch)

    def rank(number):
        wrappers = [ft.clip(1e9), ft.accumulate(2), ft.sharded(ft.parallel.mesh(), 1)]
        step = split_step(models.step_of(*wrappers, criterion=criterion), 2)
        state, history = models.train(step, models.batches(length=6))
        # The norms are those of microbatches, which have other examples here.
        return state, [{"loss": record["loss"]} for record in history]

    (reference,) = run(1, rank)
    rows.clear()
    assert_near(run(3, rank), reference)
    assert rows == {1}


def test_a_rank_without_memory_for_one_example_is_an_error_that_says_so():
    def rank(number):
        def loss(model, batch):
            if number == 1:
                raise torch.OutOfMemoryError("out of memory, on purpose")
            return models.plain_loss(model, batch)

        step = models.step_of(ft.sharded(ft.parallel.mesh(), 0), criterion=loss)
        ft.fit(step, step.init(seed=5), list(models.batches()), on_oom="split", progress=False)

    with pytest.raises(DeviceError, match="fit: memory ran out on this rank with one example of each microbatch"):
        run(2, rank)


@pytest.mark.parametrize(
    ("wrappers", "excess"),
    [
        (lambda path: [ft.update_in_backward()], "update_in_backward"),
        (lambda path: [ft.offload("opt_state", directory=path), ft.compiled()], "compiled beside offload"),
    ],
    ids=["update_in_backward", "offload"],
)
def test_steps_whose_gradient_is_not_computed_before_the_update_are_refused(wrappers, excess, tmp_path):
    def rank(number):
        step = models.step_of(*wrappers(tmp_path), ft.sharded(ft.parallel.mesh(), 0))
        with pytest.raises(ComposeError, match=f"fit: on_oom='split' on 2 ranks needs a step without {excess}"):
            ft.fit(step, step.init(seed=5), list(models.batches()), on_oom="split", progress=False)

    run(2, rank)


def compiled_rank(tell, number, level, directory, faults):
    """Train compiled on a rank that runs out of memory at some of the calls of its graphs, after a part of them."""
    remaining, run_graph = dict(faults) if number == 1 else {}, stand_in.run_graph
    calls = iter(range(100))

    def scarcely(agreement, run, captured, inputs):
        share = remaining.pop(next(calls), None)
        if share is None:
            return run_graph(agreement, run, captured, inputs)
        count = sum(isinstance(node.target, torch._ops.OpOverload) for node in captured.graph.nodes)

        def scarce(*tensors):
            with Scarce(max(int(share * count), 1)):
                return run(*tensors)

        return run_graph(agreement, scarce, captured, inputs)

    stand_in.run_graph = scarcely
    wrappers = ft.ema(0.8), ft.compiled(lowering="whole", backend="eager")
    sharded = ft.sharded(ft.parallel.mesh(timeout=60), level)
    step = models.step_of(*wrappers, sharded, optimizer=ft.optim.sgd(0.05), model=models.Small)
    options = {"checkpoints": ft.Checkpoints(directory / "run", every=1), "on_oom": "split", "progress": False}
    state, history = ft.fit(step, step.init(seed=5), list(models.batches()), **options)
    assert not remaining
    torch.save((ft.parallel.whole(state), history["loss"], history["split"]), directory / f"{number}.pt")
    tell("done")
    dist.destroy_process_group()


@quiet_forks
@pytest.mark.parametrize(
    ("level", "faults", "pieces"),
    [
        # In the first step, whose state is copied: between its collectives, before all of them, and behind them.
        (3, {0: 0.6}, [2]),
        pytest.param(0, {0: 0, 1: 0.98}, [4], marks=pytest.mark.exhaustive),
        # In the third step, whose state is overwritten: all go back to the checkpoint.
        pytest.param(3, {0: 0.6, 3: 0.9}, [2, 4], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_compiled_steps_are_split_together(level, faults, pieces, tmp_path, modes):
    ((expected, history),) = trained(
        1, 0, modes, wrappers=(ft.ema(0.8),), optimizer=ft.optim.sgd(0.05), model=models.Small
    )
    with started(2, compiled_rank, level, tmp_path, faults) as ranks:
        assert [rank.receive() for rank in ranks] == ["done"] * 2
    for number in range(2):
        state, losses, splits = torch.load(tmp_path / f"{number}.pt", weights_only=False)
        assert losses == pytest.approx([record["loss"] for record in history], rel=1e-12)
        assert splits == pieces
        assert_near([(state, [])], (expected, []))
