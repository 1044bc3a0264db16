"""Low-rank adapters of a divided state: merged, unmerged, saved and loaded by all ranks as by one."""

from dataclasses import replace

import pytest
import torch

import ftrain as ft
from ftrain.errors import CheckpointError, StructureError
from tests.exhaustive import choose, exhaustive
from tests.parallel import models
from tests.parallel.ranks import run, seeded
from tests.parallel.results import assert_leaves_near

TARGETS = ["inner", "blocks.*.hidden", "head"]
levels = pytest.mark.parametrize("level", choose([0, 1, 3], [0, 3]))


def adapted(level, **options):
    return models.step_of(ft.lora(2, 5, targets=TARGETS, **options), ft.ema(0.8), ft.sharded(ft.parallel.mesh(), level))


def trained(step):
    state = step.init(seed=5)
    for batch in models.batches(2):
        state, _ = step(state, batch)
    return state


def assert_divided_alike(actual, expected):
    """Check that leaves are divided over ranks as those of the same names are in another tree."""
    for name, leaf in expected.items():
        if leaf is not None and name in actual:
            assert type(actual[name]) is type(leaf), name
            assert getattr(actual[name], "placements", None) == getattr(leaf, "placements", None), name


def merged_and_back(level, dora):
    """Return a function of a rank that merges and unmerges: it returns both whole states, and their metrics."""

    def rank(_):
        step, (batch,) = adapted(level, dora=dora), models.batches(1, seed=9)
        state = trained(step)
        merged = ft.adapters.merge(step, state)
        assert_divided_alike(merged.params, ft.tree.overlay(state.params, state.frozen))
        loss = ft.from_module(models.Model().double(), models.loss)
        metrics = ft.eval_step(loss)(merged, batch)
        module = ft.to_module(models.Model().double(), merged)
        back = ft.adapters.unmerge(step, merged)
        assert_divided_alike(back.params, state.params)
        assert_divided_alike(back.frozen, state.frozen)
        after, _ = step(back, batch)
        return ft.parallel.whole((merged.params, metrics, dict(module.named_parameters()), after.params, back.frozen))

    return rank


@levels
@pytest.mark.parametrize("dora", [True, *exhaustive([False])])
def test_ranks_merge_and_unmerge_as_one_rank_does_and_states_are_divided_as_before(level, dora):
    (expected,) = run(1, merged_and_back(0, dora))
    for actual in run(2, merged_and_back(level, dora)):
        assert_leaves_near(actual, expected)


@levels
def test_adapters_of_a_tree_are_merged_by_all_ranks(level):
    def step_of(level):
        step = ft.train_step(lambda params, batch: (batch @ params["w"]).square().mean(), ft.optim.sgd(0.1))
        return ft.compose(step, ft.lora(2, targets=["w"]), ft.sharded(ft.parallel.mesh(), level))

    def rank_at(level):
        def rank(_):
            step, batch = step_of(level), torch.arange(12.0, dtype=torch.float64).view(4, 3)
            weights = torch.arange(15.0, dtype=torch.float64).view(3, 5)
            state, _ = step(step.init({"w": weights, "b": weights[0]}), batch / 10)
            merged = ft.adapters.merge(step, state)
            assert_divided_alike(merged.params, state.frozen["base"])
            after, _ = step(ft.adapters.unmerge(step, merged), batch / 10)
            return ft.parallel.whole((merged.params, after.params))

        return rank

    (expected,) = run(1, rank_at(0))
    for actual in run(2, rank_at(level)):
        assert_leaves_near(actual, expected)


def same_on_any_mesh(step):
    """Return a state whose adapters and base do not depend on the mesh, to the bit."""
    state = step.init(seed=5)
    params = ft.tree.map(lambda leaf: leaf + 0.5, ft.parallel.whole(state.params))
    return replace(state, params=ft.parallel.divided(params, like=state.params))


def save(path, level):
    def rank(number):
        step = adapted(level)
        ft.adapters.save(path, step, same_on_any_mesh(step))
        with pytest.raises(CheckpointError, match="exists already") as caught:
            ft.adapters.save(path, step, same_on_any_mesh(step))
        assert str(caught.value).startswith("rank 0: ") == (number != 0)

    return rank


def load_and_step(path, level):
    def rank(_):
        step, (batch,) = adapted(level), models.batches(1)
        start = step.init(seed=6)
        loaded = ft.adapters.load(path, step, start)
        assert_divided_alike(loaded.params, start.params)
        after, metrics = step(loaded, batch)
        return ft.parallel.whole((after.params, after.slots, metrics))

    return rank


@levels
def test_ranks_save_the_files_of_one_rank_and_train_as_it_does_after_loading_them(level, tmp_path):
    run(1, save(tmp_path / "alone", 0))
    run(2, save(tmp_path / "together", level))
    alone, together = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("alone", "together")
    )
    assert together == alone
    (expected,) = run(1, load_and_step(tmp_path / "alone", 0))
    for actual in run(2, load_and_step(tmp_path / "together", level)):
        assert_leaves_near(actual, expected)


def test_a_divided_base_that_differs_is_refused_on_every_rank(tmp_path):
    def rank(_):
        step = adapted(3)
        state = same_on_any_mesh(step)
        ft.adapters.save(tmp_path / "adapter", step, state)
        other = replace(state, frozen={**state.frozen, "bias": state.frozen["bias"] * 1.001})
        with pytest.raises(StructureError, match="another base, with other values in bias; any_base=True"):
            ft.adapters.load(tmp_path / "adapter", step, other)

    run(2, rank)


@pytest.mark.parametrize("level", [0, 3])
def test_a_base_quantised_by_torchao_is_whole_on_every_rank_and_resumes_on_one(level, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="quantises the base")
    batches = [{name: leaf.float() for name, leaf in batch.items()} for batch in models.batches(4)]

    def train(level, first, last):
        def rank(_):
            with seeded(1):
                module = models.Model()
                module.head = torch.nn.Linear(6, 3)
                quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
            step = ft.train_step(ft.from_module(module, models.loss), ft.optim.adamw(0.01))
            step = ft.compose(step, ft.lora(2, 5, targets=TARGETS), ft.sharded(ft.parallel.mesh(), level))
            state = step.init(seed=5)
            with ft.Checkpoints(tmp_path, every=1, keep=9) as checkpoints:
                if first:
                    state = checkpoints.latest({"state": state}, before=first).parts["state"]
                for batch in batches[first:last]:
                    state, _ = step(state, batch)
                    if not first:
                        checkpoints.save(int(state.step), {"state": state})
            assert "Int8Tensor" in {type(leaf).__name__ for leaf in ft.tree.leaves(state.frozen)}
            return ft.parallel.whole(state).params

        return rank

    saved = run(2, train(level, 0, 4))[0]
    resumed = run(1, train(level, 2, 4))[0]
    torch.testing.assert_close(resumed, saved, rtol=1e-4, atol=1e-6)
    assert all(bool(leaf.any()) for leaf in ft.tree.leaves(resumed))  # B begins with zeros.
