"""N ranks compute what one does: every wrapper, level and number of ranks, in float64."""

import dataclasses
import importlib
import itertools

import numpy as np
import pytest
import torch
from torch import nn

import ftrain as ft
from ftrain._torch import collectives
from ftrain.errors import BatchError, ComposeError
from tests.bits import assert_same_bits
from tests.exhaustive import exhaustive_rows
from tests.laws import registry
from tests.parallel import models
from tests.parallel.ranks import run
from tests.parallel.results import NARROW, assert_leaves_near, assert_near


def trained(size, level, wrappers=lambda: (), mesh=None, **options):
    """Return the whole states and histories of `size` ranks."""

    def rank(_):
        mesh_of_ranks = ft.parallel.mesh(**(mesh or {}))
        step = models.step_of(*wrappers(), ft.sharded(mesh_of_ranks, level), **options)
        return models.train(step)

    return run(size, rank)


def assert_wrappers_equal_one_rank(names, sizes_and_levels):
    def wrappers():
        return registry.make(names)

    tolerance = NARROW if registry.is_narrow(names) else 1e-12
    (reference,) = trained(1, 0, wrappers)
    for size, level in sizes_and_levels:
        assert_near(trained(size, level, wrappers), reference, tolerance)


@pytest.mark.parametrize("names", registry.ALONE, ids="+".join)
def test_each_wrapper_on_two_ranks_equals_one_rank(names):
    assert_wrappers_equal_one_rank(names, [(2, 3)])


@pytest.mark.parametrize("names", registry.STACKS, ids="+".join)
def test_stacks_on_ranks_equal_one_rank(names):
    """Each stack on one number of ranks, in turn."""
    sizes_and_levels = [(4, 3), (2, 1), (3, 2)]
    assert_wrappers_equal_one_rank(names, [sizes_and_levels[registry.STACKS.index(names) % 3]])


@pytest.mark.parametrize("level", [0, 3])
def test_two_parameters_of_one_name_are_refused_and_keys_of_two_types_are_not(level):
    def loss(params, batch):
        return sum((leaf * batch).square().mean() for leaf in ft.tree.leaves(params))

    def rank(_):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.sharded(ft.parallel.mesh(), level))
        with pytest.raises(ComposeError, match=r"sharded: two parameters are called a\.b; rename one"):
            step.init({"a": {"b": torch.ones(1), "c": torch.ones(1)}, "a.b": torch.ones(1)})
        state, _ = step(step.init({1: torch.ones(1), "a": torch.zeros(1)}), torch.ones(4, 1))
        return ft.parallel.whole(state).params

    for params in run(2, rank):
        assert (float(params[1]), float(params["a"])) == (pytest.approx(0.8), 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [*registry.ALONE, *registry.STACKS], ids="+".join)
def test_wrappers_at_every_level_on_ranks_equal_one_rank(names):
    assert_wrappers_equal_one_rank(names, [(2, 0), (2, 1), (3, 2), (4, 3)])


@pytest.mark.parametrize(
    ("size", "levels"), [(2, (0, 1, 2, 3)), (5, (0,)), (8, (3,)), *exhaustive_rows([(8, (2,)), (16, (3,))])], ids=str
)
def test_any_number_of_ranks_equals_one_rank_also_without_examples(size, levels):
    def wrappers():
        return ft.accumulate(2), ft.clip(0.05), ft.ema(0.8), ft.skip_nonfinite(3)

    # A microbatch has six examples, so some of 8 or 16 ranks have none. The weights of the first four examples are 0.
    (reference,) = trained(1, 0, wrappers)
    for level in levels:
        assert_near(trained(size, level, wrappers), reference)


def test_a_rank_without_examples_does_not_count_the_one_that_it_computes_on():
    def loss(params, batch):
        return ft.Mean((params["w"] * batch["x"] * batch["weight"]).sum(), batch["weight"].sum())

    def rank(_):
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(1.0)), ft.sharded(ft.parallel.mesh()))
        batch = {"x": torch.tensor([1.0, 2.0]), "weight": torch.tensor([1.0, 3.0])}
        state, metrics = step(step.init({"w": torch.ones(())}), batch)
        return float(metrics["loss"]), float(ft.parallel.whole(state).params["w"])

    assert run(3, rank) == [(1.75, -0.75)] * 3


@pytest.mark.parametrize(
    ("level", "accumulates"),
    [
        *((0, False), (1, True), (2, False), (3, True)),
        *exhaustive_rows([(0, True), (1, False), (2, True), (3, False)]),
    ],
)
def test_an_overflow_on_one_rank_alone_skips_the_step_on_all(level, accumulates):
    def rank(_):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        wrappers = [ft.accumulate(2)] if accumulates else []
        step = ft.compose(
            ft.train_step(ft.from_module(model, models.plain_loss), ft.optim.adamw(1e-2)),
            ft.with_amp("fp16"),
            *wrappers,
            ft.sharded(ft.parallel.mesh(), level),
        )
        # The last example of each microbatch, which the last rank has.
        overflowing = torch.where((torch.arange(12) % 6 == 5)[:, None], 1e6, torch.ones(12, 5))
        params = {name: torch.full_like(param, 0.1) for name, param in model.named_parameters()}
        state = step.init(params)
        for x in (torch.ones(12, 5), overflowing, torch.ones(12, 5)):
            state, _ = step(state, {"x": x, "y": torch.ones(12, 3)})
        return ft.parallel.whole(state)

    (reference,), states = run(1, rank), run(3, rank)
    assert [int(leaf) for leaf in ft.tree.leaves(reference.slots)] == [1, 32768]  # Good steps since, and the scale.
    for state in states:
        assert ft.tree.leaves(state.slots) == ft.tree.leaves(reference.slots)
        torch.testing.assert_close(state.params, reference.params, rtol=0, atol=NARROW)
        assert_same_bits(state.params, states[0].params)


@pytest.mark.parametrize(
    ("criterion", "level"),
    [(models.plain_loss, 0), (models.loss, 3), *exhaustive_rows([(models.loss, 0), (models.plain_loss, 3)])],
)
def test_ranks_that_read_their_rows_alone_equal_one_with_the_whole_batch(criterion, level):
    """Dropout too: one rank has their examples one after the other, whatever its microbatches are."""

    def rank(number):
        step = models.step_of(ft.accumulate(2), ft.sharded(ft.parallel.mesh(), level, batches="rows"), **options)
        parts = [ft.tree.map(lambda leaf: leaf.chunk(3)[number], batch) for batch in models.batches()]
        return models.train(step, parts)

    options = {"criterion": criterion}
    (reference,) = trained(1, 0, lambda: (ft.accumulate(2),), **options)
    assert_near(run(3, rank), reference)


def test_rows_of_different_lengths_are_an_error_on_every_rank():
    def rank(number):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 0, batches="rows"))
        state, batch = step.init(seed=0), next(models.batches())
        with pytest.raises(BatchError, match="rank 0 has a batch of 4 examples, and rank 1 has a batch of 5 examples"):
            step(state, ft.tree.map(lambda leaf: leaf[: 4 + number], batch))
        with pytest.raises(BatchError, match=r"^sharded: "):
            step(state, {**batch, "x": batch["x"][:3]})
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 0, batches="rows"))
        state, _ = step(state, ft.tree.map(lambda leaf: leaf.roll(number, 0), batch))
        with pytest.raises(
            BatchError, match=r"the first batch had 12 examples, and this one has 4.*drop_last=True.*batches='whole'"
        ):
            step(state, ft.tree.map(lambda leaf: leaf[:4], batch))

    run(2, rank)


COPIES, ONE_COPY, NO_SHARDS = {"replicate": 2}, {"shard": 4, "replicate": 1}, {"shard": 1}


@pytest.mark.parametrize(
    ("shape", "level"),
    [
        *((COPIES, 1), (COPIES, 3), (ONE_COPY, 1), (NO_SHARDS, 3)),
        *exhaustive_rows([*((shape, 0) for shape in (COPIES, ONE_COPY, NO_SHARDS)), (ONE_COPY, 3), (NO_SHARDS, 1)]),
    ],
    ids=str,
)
def test_every_shape_of_a_mesh_equals_one_rank(shape, level):
    (reference,) = trained(1, 0, lambda: [ft.clip(0.05)])
    assert_near(trained(4, level, lambda: [ft.clip(0.05)], shape), reference)


@pytest.mark.parametrize(("level", "mesh"), [(1, {}), (3, {"replicate": 2})], ids=str)
def test_with_a_library_without_a_reduce_scatter_ranks_equal_one_rank(level, mesh, monkeypatch):
    """As gloo: ranks exchange parts of gradients and add them, and also gather parameters by an exchange."""
    module = importlib.import_module("ftrain.parallel.mesh")
    group = module._group

    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr(module, "_group", lambda *args: dataclasses.replace(group(*args), has_reduce_scatter=False))
    monkeypatch.setattr(collectives, "reduce_scatter", refuse)
    monkeypatch.setattr(collectives, "all_gather", refuse)
    (reference,) = trained(1, 0, lambda: [ft.accumulate(2)])
    assert_near(trained(4, level, lambda: [ft.accumulate(2)], mesh), reference)


PAIRS_ON_RANKS = [
    (pair, size, level, mesh)
    for pair, (size, level, mesh) in zip(
        [pair for pair in registry.SAME_ARROW if not registry.is_narrow(pair)],
        itertools.cycle([(2, 1, {}), (3, 3, {}), (4, 2, {"replicate": 2}), (3, 0, {}), (4, 3, {"replicate": 2})]),
        strict=False,
    )
]
"""Pairs of wrappers that work on the same part of a step, each on one mesh."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("names", "size", "level", "mesh"),
    [
        pytest.param(pair, size, level, mesh, id=f"{'+'.join(pair)}-{size}-{level}")
        for pair, size, level, mesh in PAIRS_ON_RANKS
    ],
)
def test_pairs_of_wrappers_of_one_part_on_ranks_equal_one_rank(names, size, level, mesh):
    (reference,) = trained(1, 0, lambda: registry.make(names))
    assert_near(trained(size, level, lambda: registry.make(names), mesh), reference)


def test_the_order_among_wrappers_of_the_gradient_is_kept():
    for wrappers in (lambda: (ft.sam(0.05), ft.accumulate(2)), lambda: (ft.accumulate(2), ft.sam(0.05))):
        (reference,) = trained(1, 0, wrappers)
        assert_near(trained(3, 2, wrappers), reference)


def test_a_plain_loss_is_weighted_by_the_examples_of_each_rank():
    (reference,) = trained(1, 0, criterion=models.plain_loss)
    assert_near(trained(5, 3, criterion=models.plain_loss), reference)


def test_batch_norm_normalises_by_the_rows_of_each_rank():
    (expected, expected_history), *_ = trained(1, 0, batch_norm=True)
    for state, history in trained(3, 1, batch_norm=True):
        assert history[0]["size"] != pytest.approx(expected_history[0]["size"], rel=1e-6)
        assert state.buffers["norm.num_batches_tracked"] == expected.buffers["norm.num_batches_tracked"] == 3


def test_buffers_are_means_over_ranks_by_their_examples():
    """Of 12 examples five ranks have two or three each."""

    def running_mean(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh(), 0), batch_norm=True)
        return step(step.init(seed=5), next(models.batches()))[0].buffers["norm.running_mean"]

    (expected,) = run(1, running_mean)
    for mean in run(5, running_mean):
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)


def test_adapters_of_a_frozen_base_on_ranks_equal_one_rank():
    def wrappers():
        return (ft.lora(2, targets=["blocks.*.hidden", "head"]),)

    (reference,) = trained(1, 0, wrappers)
    for level in (1, 3):
        assert_near(trained(3, level, wrappers), reference)


def test_a_remat_budget_with_blocks_that_are_gathered():
    def wrappers():
        return ft.remat(budget=0.5), ft.accumulate(2)

    (reference,) = trained(1, 0, wrappers)
    assert_near(trained(3, 3, wrappers), reference)


def changed_gradients(change, **options):
    """Return a wrapper that changes each gradient."""

    def wrap(grad):
        def changing(state, batch, rng):
            gradients = grad(state, batch, rng)
            return dataclasses.replace(gradients, grads=ft.tree.map(change, gradients.grads))

        return changing

    return ft.Wrapper("changed", grad=ft.OnGrad(wrap, **options))


def test_a_wrapper_that_scales_elements_by_the_norm_of_their_leaf():
    def wrappers():
        return (changed_gradients(lambda g: g / (1 + ft.tree.global_norm(g)), by_element=True),)

    (reference,) = trained(1, 0, wrappers)
    for level in (1, 3):
        assert_near(trained(3, level, wrappers), reference)


def test_a_wrapper_that_takes_means_of_rows_has_whole_gradients_at_level_0_and_else_is_a_gradient_transform():
    def centred(g):
        return g - g.mean(0) if g.ndim > 1 else g

    transform = ft.optim.GradientTransform(lambda g, *_: centred(g), ft.optim.everything, "centred")
    as_wrapper = trained(3, 0, lambda: (changed_gradients(centred),), optimizer=ft.optim.sgd(0.1))
    as_transform = trained(3, 3, optimizer=ft.optim.chain(transform, ft.optim.sgd(0.1)))
    for (expected, _), (state, _) in zip(as_wrapper, as_transform, strict=True):
        assert_leaves_near(state.params, expected.params)


def test_a_loss_that_is_a_function_gets_whole_parameters():
    def results(size, level):
        def rank(_):
            generator = torch.Generator().manual_seed(0)
            params = {"w": torch.randn(5, 3, generator=generator, dtype=torch.float64), "b": torch.zeros(()).double()}
            loss = lambda p, batch: (batch["x"] @ p["w"] + p["b"] - batch["y"]).square().mean()  # noqa: E731
            step = ft.compose(
                ft.train_step(loss, ft.optim.sgd(0.1, momentum=0.9)), ft.sharded(ft.parallel.mesh(), level)
            )
            return models.train(step, state=step.init(params))

        return run(size, rank)

    assert_near(results(4, 3), results(1, 0)[0])


def test_random_numbers_of_the_loss_are_by_example():
    def noisy(model, batch, rng):
        return model(batch["x"] + ft.random.normal(rng, batch["x"].shape, dtype=torch.float64)).square().mean()

    (reference,) = trained(1, 0, lambda: [ft.accumulate(2)], criterion=noisy)
    assert_near(trained(4, 2, lambda: [ft.accumulate(2)], criterion=noisy), reference)


@pytest.mark.parametrize("convert", [list, np.array], ids=["list", "array"])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_lists_and_arrays_are_divided_over_ranks_like_tensors(convert, microbatches):
    lengths, x = [1, 1, 2, 2, 3, 3, 4, 4], torch.arange(32, dtype=torch.float64).reshape(8, 4) / 16
    batch, params = {"x": x, "lengths": convert(lengths)}, {"w": torch.eye(4, dtype=torch.float64)}

    def rank(_):
        wrappers = [ft.accumulate(microbatches)] if microbatches > 1 else []
        step = ft.compose(
            ft.train_step(models.ragged_mean, ft.optim.sgd(0.1)), *wrappers, ft.sharded(ft.parallel.mesh(), level=0)
        )
        state, metrics = step(step.init(params), batch)
        evaluated = ft.evaluate(ft.eval_step(step.loss), step.init(params), [batch])
        return ft.parallel.whole(state).params["w"], metrics["loss"], evaluated["loss"]

    (expected,) = run(1, rank)
    for actual in run(2, rank):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
