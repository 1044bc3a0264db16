"""Wrappers that a user writes, on ranks."""

import dataclasses

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError
from tests.parallel import models
from tests.parallel.ranks import run
from tests.parallel.results import assert_near


def trained(size, level, wrappers, reduce="fp32"):
    def rank(_):
        return models.train(models.step_of(*wrappers(), ft.sharded(ft.parallel.mesh(), level, reduce)))

    return run(size, rank)


def changed_params(change, **options):
    """Return a wrapper that changes each parameter after an update: ``change(new, old) -> new``."""

    def wrap(update):
        def changing(state, gradients, hyper, *, donate):
            new = update(state, gradients, hyper, donate=donate)
            return dataclasses.replace(new, params=ft.tree.map(change, new.params, state.params))

        return changing

    return ft.Wrapper("changed", update=ft.OnUpdate(wrap, **options))


def test_a_wrapper_of_the_update_that_needs_whole_leaves_is_refused_where_ranks_have_parts():
    def wrappers():
        return (changed_params(lambda new, old: new / new.norm(dim=0) if new.ndim > 1 else new),)

    (reference,) = trained(1, 0, wrappers)
    assert_near(trained(2, 0, wrappers), reference)
    with pytest.raises(ComposeError, match=r"changed does not say .*an update by itself.*ft.OnUpdate\(wrap, by_elem"):
        trained(2, 1, wrappers)


def test_a_wrapper_that_shortens_the_update_of_each_leaf_by_its_norm():
    def shorten(new, old):
        return old + (new - old) / (1 + ft.tree.global_norm(new - old))

    def wrappers():
        return (changed_params(shorten, by_element=True), ft.donated())

    (reference,) = trained(1, 0, wrappers)
    for level in (1, 3):
        assert_near(trained(3, level, wrappers), reference)


@pytest.mark.parametrize("optimizer", [ft.optim.adamw(1e-2), ft.optim.lamb(1e-2)], ids=["adamw", "lamb"])
def test_a_wrapper_that_replaces_the_optimizer_is_refused_after_sharded(optimizer):
    own = ft.Wrapper("own", update=ft.OnUpdate(optimizer=lambda inner: ft.optim.chain(ft.optim.centralize(), inner)))

    def rank(_):
        mesh = ft.parallel.mesh()
        with pytest.raises(ComposeError, match=r"own replaces the optimizer .*level=1; list it before sharded"):
            models.step_of(ft.sharded(mesh, 1), own, optimizer=optimizer)
        models.step_of(ft.sharded(mesh, 1), ft.ema(decay=lambda step: 0.5), optimizer=optimizer)
        return models.train(models.step_of(own, ft.sharded(mesh, 1), optimizer=optimizer))

    (reference,) = run(1, rank)
    assert_near(run(3, rank), reference)


def by_task():
    """Return a wrapper that combines the gradients of two tasks, whose weights are 0-d tensors of the batch."""

    def wrap(grad):
        def adding(state, batch, rng):
            def of(task):
                return ft.tree.map_named(
                    lambda name, leaf: leaf * name.endswith(task) if "task_" in name else leaf, batch
                )

            first, second = (grad(state, of(task), rng) for task in ("task_a", "task_b"))
            return dataclasses.replace(first, grads=ft.tree.map(lambda a, b: a.sign() + b, first.grads, second.grads))

        return adding

    return ft.Wrapper("by_task", grad=ft.OnGrad(wrap, evaluations=2))


def test_a_wrapper_that_takes_the_gradient_of_each_task_on_ranks_equals_one_rank():
    def criterion(model, batch):
        outputs = model(batch["x"]) - batch["y"]
        return batch["task_a"] * outputs.square().mean() + batch["task_b"] * outputs.abs().mean()

    def rank(_):
        step = models.step_of(ft.accumulate(2), by_task(), ft.sharded(ft.parallel.mesh(), 0), criterion=criterion)
        tasks = {"task_a": torch.ones(()).double(), "task_b": torch.ones(()).double()}
        return models.train(step, [{**batch, **tasks} for batch in models.batches()])

    (reference,) = run(1, rank)
    assert_near(run(3, rank), reference)


def penalised():
    """Return a wrapper that adds a penalty of parameters to the loss."""

    def wrap(loss):
        def penalised_loss(params, batch, *, rng, buffers):
            mean, metrics, buffers = loss.fn(params, batch, rng=rng, buffers=buffers)
            penalty = params["inner.weight"].norm() + params["head.weight"].norm()
            total = mean.total + penalty * mean.weight
            return dataclasses.replace(mean, total=total), {**metrics, "penalty": penalty.detach()}, buffers

        return dataclasses.replace(loss, fn=penalised_loss)

    return ft.Wrapper("penalised", loss=ft.OnLoss(wrap))


@pytest.mark.parametrize("others", [(), (ft.accumulate(2), ft.remat())], ids=["alone", "stack"])
def test_a_wrapper_of_the_loss_gets_whole_parameters_and_the_loss_of_the_rows(others):
    def wrappers():
        return penalised(), *others

    (reference,) = trained(1, 0, wrappers)
    for level in (0, 1, 3):
        assert_near(trained(3, level, wrappers), reference)


def test_a_compression_remembers_what_it_has_not_sent_of_microbatches():
    """`clip` before `accumulate` clips the sum over ranks of each microbatch, so that each is compressed alone."""

    def rank(_):
        reduce = ft.parallel.powersgd(1)
        step = models.step_of(ft.clip(1.0), ft.accumulate(2), ft.sharded(ft.parallel.mesh(), 0, reduce))
        return ft.parallel.whole(step.init(seed=5)).slots, models.train(step)[0].slots

    first, last = run(2, rank)[0]
    assert not any(map(torch.equal, ft.tree.leaves(first), ft.tree.leaves(last)))
