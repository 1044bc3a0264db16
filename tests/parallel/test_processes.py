"""Ranks that are processes, forked from the test: the end of `fit` on all ranks, and compiled steps."""

import functools
import os
import signal

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard

import ftrain as ft
from ftrain.errors import BatchError
from tests.exhaustive import exhaustive, exhaustive_rows
from tests.faults.forks import BROKEN, quiet_forks
from tests.parallel import models
from tests.parallel.processes import started
from tests.parallel.ranks import run
from tests.parallel.results import assert_histories_near, assert_leaves_near

pytestmark = quiet_forks
METHODS = {"bf16": "bf16", "fp16": "fp16", "powersgd": ft.parallel.powersgd(2), "sign": ft.parallel.sign()}


def data_of(event):
    """Yield batches; before the fourth one an event happens: a signal, or an error."""
    for number, batch in enumerate(models.batches(8), 1):
        if number == 4 and event == "error":
            raise OSError("disk gone")
        if number == 4 and event:
            os.kill(os.getpid(), getattr(signal, event))
        yield batch


def fitting(tell, rank, directory, event):
    """Train with checkpoints; the event happens on rank 1. Tell or save how it ended."""
    step = models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh()))
    checkpoints = ft.Checkpoints(directory / "run", every=3)
    # As an iterable that starts anew, which a run that resumes needs.
    data = type("Data", (), {"__iter__": lambda self: data_of(event if rank == 1 else "")})()
    try:
        state, history = ft.fit(step, step.init(seed=5), data, checkpoints=checkpoints, progress=False)
    except BaseException as error:
        tell([f"{type(error).__name__}: {error}", getattr(error, "__notes__", []), int(error.result.state.step)])
        raise
    torch.save((ft.parallel.whole(state), history["loss"]), directory / f"{rank}.pt")


@pytest.mark.filterwarnings("ignore:fit. Data has no position:UserWarning")
def test_a_signal_to_one_rank_ends_all_after_the_same_step_and_the_run_resumes(tmp_path, capfd):
    with started(2, fitting, tmp_path, "SIGTERM") as ranks:
        # The signal comes while rank 1 reads batch 4. It votes to stop after step 4, and all know it after step 5.
        assert [rank.receive() for rank in ranks] == [["Interrupted: 143", [], 5]] * 2
        assert [rank.wait() for rank in ranks] == [143, 143]
    assert capfd.readouterr().err.count("fit: ended by SIGTERM, saved in") == 1
    with started(2, fitting, tmp_path, "") as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0]

    def alone(_):
        return models.train(models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh())), models.batches(8))

    ((reference, history),) = run(1, alone)
    for rank in (0, 1):
        state, losses = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert_leaves_near(state.params, reference.params)
        assert losses == pytest.approx([record["loss"] for record in history], rel=1e-12)


def fitting_narrower(tell, rank, batches):
    """Train on batches, one of which has float32 weights on rank 0, so that its loss has; tell how it ended."""
    data = list(models.batches(4, seed=3 + rank if batches == "rows" else 3))
    if rank == 0:
        data[1] = {name: tensor.float() if name == "weight" else tensor for name, tensor in data[1].items()}
    step = models.step_of(ft.sharded(ft.parallel.mesh(), batches=batches), criterion=with_sum_of_weights)
    try:
        tell(ft.fit(step, step.init(), data, log_every=10, progress=False).history["weights"][-1])
    except BatchError as error:
        tell([str(error)[-60:], int(error.result.state.step)])


def with_sum_of_weights(model, batch):
    loss, _ = models.loss(model, batch)
    return loss, {"weights": batch["weight"].sum()}


@pytest.mark.parametrize("batches", ["whole", "rows"])
def test_numbers_of_another_dtype_on_one_rank_are_summed_and_common_batches_of_it_refused(batches):
    """Gloo ends the process of a rank to which another sends more bytes than it expects."""
    with started(2, fitting_narrower, batches) as ranks:
        results = [rank.receive() for rank in ranks]
        assert [rank.wait() for rank in ranks] == [0, 0]
    if batches == "whole":
        assert [text.endswith("that of another rank has other shapes or dtypes") for text, _ in results] == [True] * 2
        assert [step for _, step in results] == [3, 3]
    else:
        last_sums = [float(list(models.batches(4, seed=seed))[-1]["weight"].sum()) for seed in (3, 4)]
        assert results == pytest.approx([sum(last_sums) / 2] * 2, rel=1e-12)


def test_an_error_in_the_data_of_one_rank_ends_the_others_which_name_it(tmp_path):
    with started(2, fitting, tmp_path, "error") as ranks:
        first, second = (rank.receive() for rank in ranks)
        assert [rank.wait() for rank in ranks] == [BROKEN, BROKEN]
    assert second == ["OSError: disk gone", [], 3]
    assert first[0].startswith("RankError: ")
    assert "rank 1 failed after step 3: OSError: disk gone" in first[0] + str(first[1])
    assert first[2] == 3


def distance(params, batch):
    return (params["w"] - batch).square().sum((1, 2)).mean() + params["b"].square()


def compressing(tell, rank, path, names):
    """Save the states after three steps, eager and compiled, for each of these compression methods."""
    mesh, results = ft.parallel.mesh(), {}
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, target = draw(6, 6), draw(4, 6, 6)
    for name in names:
        states, reduce = [], METHODS[name]
        for wrappers in ([], [ft.compiled(lowering="whole", backend="aot_eager")]):
            step = ft.compose(
                ft.train_step(distance, ft.optim.sgd(0.1)), ft.skip_nonfinite(), ft.sharded(mesh, 1, reduce), *wrappers
            )
            state = step.init({"w": start, "b": torch.ones((), dtype=torch.float64)})
            for _ in range(3):
                state, _ = step(state, target)
            whole = ft.parallel.whole(state)
            states.append((whole.params, whole.slots))
        results[name] = states
    if rank == 0:
        torch.save(results, path)


@pytest.mark.parametrize("names", [["powersgd", "sign"], *exhaustive([["bf16", "fp16"]])], ids="+".join)
def test_compressed_gradients_are_the_same_in_eager_and_compiled_steps(names, tmp_path):
    path = tmp_path / "states.pt"
    with started(2, compressing, path, names) as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0]
    states = torch.load(path)
    assert [*states] == names
    for eager, compiled in states.values():
        assert_leaves_near(compiled, eager)


def compiling(tell, rank, path, level, blocks):
    """Save the state after three captured steps. Other tests compile such graphs with AOTAutograd."""
    sharded = ft.sharded(ft.parallel.mesh(), level)
    compiled = ft.compiled(lowering="whole", backend="eager")
    state, history = models.train(models.step_of(ft.accumulate(2), ft.clip(0.05), sharded, compiled, blocks=blocks))
    if rank == 0:
        torch.save((state.params, history), path)


@pytest.mark.parametrize(("level", "blocks"), [(1, 1), *exhaustive_rows([(0, 1), (2, 1), (1, 2), (3, 2)])])
def test_a_compiled_step_of_each_level_equals_one_rank(level, blocks, tmp_path):
    path = tmp_path / "state.pt"
    with started(2, compiling, path, level, blocks) as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0]

    def alone(_):
        wrappers = ft.accumulate(2), ft.clip(0.05), ft.sharded(ft.parallel.mesh())
        return models.train(models.step_of(*wrappers, blocks=blocks))

    ((reference, reference_history),) = run(1, alone)
    params, history = torch.load(path)
    assert_leaves_near(params, reference.params)
    assert_histories_near(history, reference_history)


def planning(tell, rank):
    """Plan for as many ranks as there are, and train on them."""
    step, batch = models.step_of(), next(models.batches())
    planned = ft.anatomy(step, None, batch, mesh=(1, 2), level=3)
    state, _ = models.train(ft.sharded(ft.parallel.mesh(), 3)(step), [batch])
    tell([planned.params, sum(leaf.numel() for leaf in state.params.values())])


def test_a_plan_does_not_change_the_shapes_of_tensors_on_a_mesh_of_the_same_size():
    """Torch caches properties of tensors on a mesh, and uses them for meshes that equal it."""
    with started(2, planning) as ranks:
        counts = [rank.receive() for rank in ranks]
        assert [rank.wait() for rank in ranks] == [0, 0]
    for planned, actual in counts:
        assert planned == actual


def contrastive(axis, *wrappers):
    """Return the parameters after three steps of a loss that compares all examples of the batch."""

    def of_all_ranks(rows):
        return DTensor.from_local(rows, axis, [Shard(0)]).full_tensor(grad_placements=[Partial()])

    def loss(params, batch):
        first, second = torch.tanh(batch @ params["w"]), torch.cos(batch @ params["w"])
        if axis is not None:
            first, second = of_all_ranks(first), of_all_ranks(second)
        similarity = first @ second.T * params["scale"]
        return torch.nn.functional.cross_entropy(similarity, torch.arange(len(similarity)))

    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = ft.compose(ft.train_step(loss, ft.optim.adam(0.1)), *wrappers)
    state = step.init({"w": draw(3, 4), "scale": torch.ones((), dtype=torch.float64)})
    for _ in range(3):
        state, _ = step(state, draw(6, 3))
    return ft.parallel.whole(state.params)


def contrasting(tell, rank, path):
    """Save the parameters after steps of two ranks, eager and compiled."""
    mesh = ft.parallel.mesh()
    compiled = ft.compiled(lowering="whole", backend="aot_eager")
    params = [contrastive(mesh["shard"], ft.sharded(mesh, 1), *wrappers) for wrappers in ([], [compiled])]
    if rank == 0:
        torch.save(params, path)


def test_a_loss_of_the_features_of_all_ranks_is_that_of_one_rank(tmp_path):
    path = tmp_path / "params.pt"
    with started(2, contrasting, path) as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0]
    expected = contrastive(None)
    for params in torch.load(path):
        assert_leaves_near(params, expected)
