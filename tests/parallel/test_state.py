"""The leaves of a divided state, and moving a state from one mesh to another."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ftrain as ft
from ftrain.errors import StructureError
from ftrain.parallel.loss_results import _addends
from ftrain.parallel.sharded import _RankStep
from tests.bits import assert_same_bits
from tests.parallel import models
from tests.parallel.ranks import run


def sharded_step(level=3, **mesh):
    return models.step_of(ft.ema(0.8), ft.sharded(ft.parallel.mesh(**mesh), level))


def test_each_rank_keeps_its_part_of_parameters_optimizer_state_and_averages():
    def sizes(rank):
        state = sharded_step().init()
        leaves = ft.tree.leaves((state.params, state.opt_state, state.slots))
        return [leaf.to_local().numel() for leaf in leaves if hasattr(leaf, "to_local")]

    whole = run(1, sizes)[0]
    parts = run(4, sizes)
    assert [sum(column) for column in zip(*parts, strict=True)] == whole
    # Blocks of equal length: no rank has more than a fourth of an axis, rounded up.
    assert max(map(sum, parts)) < 0.35 * sum(whole)


def test_the_whole_state_of_four_ranks_continues_on_two_and_on_one():
    def first(rank):
        return models.train(sharded_step(), data=list(models.batches())[:2])[0]

    saved = run(4, first)[0]
    reference = run(4, lambda rank: models.train(sharded_step()))[0][0]

    def second(level):
        def rank(_):
            step = sharded_step(level)
            return models.train(step, list(models.batches())[2:], ft.parallel.divided(saved, like=step.init()))[0]

        return rank

    for size, level in ((2, 3), (1, 0)):
        for state in run(size, second(level)):
            torch.testing.assert_close(state.params, reference.params, rtol=1e-12, atol=1e-12)
            assert torch.equal(state.step, reference.step)


def test_a_donated_state_is_updated_in_its_memory_with_the_same_bits():
    def rank(_):
        step = ft.donated()(sharded_step())
        state = step.init(seed=5)
        pointers = [leaf.to_local().data_ptr() for leaf in state.params.values() if hasattr(leaf, "to_local")]
        for batch in models.batches():
            state, _ = step(state, batch)
        after = [leaf.to_local().data_ptr() for leaf in state.params.values() if hasattr(leaf, "to_local")]
        return ft.parallel.whole(state), pointers == after

    reference = run(2, lambda rank: models.train(sharded_step()))[0][0]
    for state, in_place in run(2, rank):
        assert in_place
        assert_same_bits(state.params, reference.params)


def test_the_whole_state_fills_a_module_and_is_evaluated():
    def rank(_):
        step = sharded_step()
        state = step.init(seed=5)
        state, _ = step(state, next(models.batches()))
        module = ft.to_module(models.Model().double(), ft.parallel.whole(state))
        evaluate = ft.eval_step(step.loss)
        return evaluate(ft.parallel.whole(state), next(models.batches())), module.head.weight.detach()

    ((expected_metrics, expected_head),) = run(1, rank)
    for metrics, head in run(3, rank):
        torch.testing.assert_close(head, expected_head, rtol=1e-12, atol=1e-12)
        assert float(metrics["loss"]) == pytest.approx(float(expected_metrics["loss"]), rel=1e-12)


def test_a_state_of_another_mesh_or_level_is_an_error_that_says_how_to_convert_it():
    def rank(_):
        state = sharded_step(shard=2).init()
        with pytest.raises(StructureError, match=r"ft.parallel.divided\(ft.parallel.whole"):
            sharded_step(shard=4)(state, next(models.batches()))
        with pytest.raises(StructureError, match=r"are DTensors; this step needs whole tensors, as level 0"):
            sharded_step(level=0, shard=2)(state, next(models.batches()))
        with pytest.raises(StructureError, match=r"whole tensors; this step needs DTensors, as level 3"):
            sharded_step()(models.step_of(ft.ema(0.8)).init(), next(models.batches()))

    run(4, rank)


def test_all_ranks_start_with_the_parameters_of_the_first():
    def rank(number):
        step = ft.compose(
            ft.train_step(lambda p, b: (p["w"] * b).sum(), ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh())
        )
        return ft.parallel.whole(step.init({"w": torch.full((5,), float(number))})).params["w"].tolist()

    assert run(3, rank) == [[0.0] * 5] * 3


def test_tensors_on_the_host_go_to_the_device_of_the_mesh():
    """The library of the device can send nothing from the host; ``meta`` stands for the device."""
    rank = SimpleNamespace(_mesh=SimpleNamespace(device_type="meta"))
    assert _RankStep._on_device(rank, torch.ones(2)).device.type == "meta"
    total, host = torch.zeros((), device="meta"), torch.ones(())
    metrics = {"plain": host, "mean": ft.Mean(host, host)}
    rows = SimpleNamespace(share_of=lambda metric: metric)
    addends = _addends(total, metrics, rows)["metrics"]
    assert {leaf.device.type for leaf in ft.tree.leaves(addends)} == {"meta"}


def test_torch_saves_a_divided_state_and_reads_it_on_any_number_of_ranks(tmp_path):
    """By torch.distributed.checkpoint, which takes the leaves as the DTensors that they are."""

    def parts_of(state):
        return {"params": state.params, "opt_state": state.opt_state, "slots": state.slots}

    def saved(_):
        step = sharded_step()
        state, _ = step(step.init(seed=5), next(models.batches()))
        dcp.save(parts_of(state), checkpoint_id=tmp_path / "saved")
        return parts_of(ft.parallel.whole(state))

    def loaded(level, **mesh):
        def rank(_):
            parts = parts_of(sharded_step(level, **mesh).init(seed=6))
            dcp.load(parts, checkpoint_id=tmp_path / "saved")
            return ft.parallel.whole(parts)

        return rank

    expected, *_ = run(3, saved)
    for size, level, mesh in ((3, 3, {}), (4, 1, {"replicate": 2}), (1, 0, {})):
        for parts in run(size, loaded(level, **mesh)):
            assert_same_bits(parts, expected)


@pytest.mark.parametrize("level", [1, 3])
def test_a_state_of_numbers_which_no_rank_divides_trains_as_on_one_rank(level):
    def rank(_):
        step = ft.compose(
            ft.train_step(
                lambda params, batch: (params["a"] * batch - params["b"]).square().mean(), ft.optim.adamw(0.1)
            ),
            ft.sharded(ft.parallel.mesh(), level),
        )
        state = step.init({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
        for _ in range(2):
            state, metrics = step(state, torch.arange(4.0))
        return float(metrics["loss"])

    assert run(2, rank) == pytest.approx(run(1, rank) * 2, rel=1e-6)


@pytest.mark.parametrize("level", [1, 2])
def test_frozen_parameters_may_be_the_trained_ones_of_another_state(level):
    # A local part of the scale, of one element, would multiply like the whole one.
    first_params = {"scale": torch.tensor([0.5, -2.0]), "weight": torch.arange(6.0).view(2, 3)}
    batch = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.0], [2.0, 2.0]], dtype=torch.float64)

    def train(*wrappers):
        module = torch.nn.ParameterDict(first_params).double()
        loss = ft.from_module(module, lambda m, x: ((x * m["scale"]) @ m["weight"]).square().mean())
        first = ft.compose(ft.train_step(loss, ft.optim.adam(0.1), trainable=["scale"]), *wrappers)
        second = ft.compose(ft.train_step(loss, ft.optim.adam(0.1), trainable=["weight"]), *wrappers)
        a, b = first.init(), second.init()
        for _ in range(3):
            a, _ = first(dataclasses.replace(a, frozen=b.params), batch)
            b, _ = second(dataclasses.replace(b, frozen=a.params), batch)
        return ft.parallel.whole({"scale": a.params["scale"], "weight": b.params["weight"]})

    for params in run(2, lambda _: train(ft.sharded(ft.parallel.mesh(), level))):
        torch.testing.assert_close(params, train(), rtol=1e-12, atol=1e-12)


def continued(size, level, *wrappers, trainable=None):
    """Train two steps, and then two of another step that begins with the parameters of this state."""

    def rank(_):
        mesh = ft.parallel.mesh()
        first = models.step_of(ft.sharded(mesh, level))
        state = first.init(seed=5)
        for batch in models.batches(2):
            state, _ = first(state, batch)
        more = {"optimizer": ft.optim.lamb(1e-2, eps=1e-3), "trainable": trainable}
        second = models.step_of(*wrappers, ft.sharded(mesh, level), **more)
        begun = second.init(state.params, buffers=state.buffers, seed=5)
        state, history = models.train(second, list(models.batches(2)), dataclasses.replace(begun, step=state.step))
        return ft.parallel.whole(begun), state, history

    return run(size, rank)


@pytest.mark.parametrize(
    ("wrappers", "trainable"),
    [((ft.ema(0.8),), None), ((), ["head.*", "blocks.0.hidden.*"]), ((ft.lora(2, targets=["head"], dora=True),), None)],
    ids=["all", "some", "adapters"],
)
@pytest.mark.parametrize(("size", "level"), [(3, 1), (2, 3)])
def test_a_new_state_takes_the_divided_parameters_of_another_one(size, level, wrappers, trainable):
    ((begun, expected, history),) = continued(1, 0, *wrappers, trainable=trainable)
    for own, state, own_history in continued(size, level, *wrappers, trainable=trainable):
        for part in ("params", "frozen", "slots"):
            torch.testing.assert_close(getattr(own, part), getattr(begun, part), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(getattr(state, part), getattr(expected, part), rtol=1e-12, atol=1e-12)
        for metrics, others in zip(own_history, history, strict=True):
            assert metrics == pytest.approx(others, rel=1e-12)


@pytest.mark.parametrize(("mesh", "level"), [({"shard": 2}, 3), ({}, 0)])
def test_a_new_state_refuses_parameters_that_are_divided_otherwise(mesh, level):
    def rank(_):
        params = sharded_step().init().params
        step = sharded_step(level, **mesh)
        with pytest.raises(StructureError, match=r"Step.init: params.bias is a DTensor on .*whole\(state\)"):
            step.init(params)
        assert isinstance(step.init(ft.parallel.whole(params)), ft.TrainState)

    run(4, rank)


def test_divided_parameters_on_one_rank_alone_are_an_error_on_every_rank():
    def rank(number):
        step = sharded_step()
        params = step.init().params
        whole = ft.parallel.whole(params)
        with pytest.raises(StructureError, match=r"the ranks begin with different tensors: .*, a DTensor"):
            step.init(params if number else whole)

    run(2, rank)
