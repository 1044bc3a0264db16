"""Every optimizer on many ranks: with divided leaves the same bits as with whole ones."""

import importlib
import threading
from collections import Counter

import pytest
import torch

import ftrain as ft
from ftrain.optim import offloaded
from ftrain.parallel import bucket_order
from ftrain.parallel.mesh import Group
from ftrain.parallel.whole_update import ownership
from tests.bits import assert_same_bits
from tests.exhaustive import exhaustive
from tests.laws.optimizers import COMBINED, MATRICES_ONLY, OPTIMIZERS
from tests.parallel import models, script
from tests.parallel.ranks import run
from tests.parallel.results import assert_near

muon = importlib.import_module("ftrain.optim.muon")
update_in_backward = importlib.import_module("ftrain.transforms.update_in_backward")
whole_update = importlib.import_module("ftrain.parallel.whole_update.update")

EVERY = {**OPTIMIZERS, **COMBINED}


SOME = ["adamw", "stochastic", "adamw_8bit", "lamb", "adafactor", "muon", "noisy", "nested"]
"""Optimizers that need different things of a leaf."""

FEW = ["stochastic", "adamw_8bit", "lamb", "muon", "nested"]
"""One for each need: elements and their places, blocks, a norm, a matrix, and several of these."""

REST = exhaustive([name for name in EVERY if name not in FEW])


def params_of(name, dtype=torch.float32):
    """Return parameters that two and three ranks cannot divide evenly, and no multiples of a CPU's vector length."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (7, 3), "b": (2, 5), "c": (1, 4), "d": (7, 3), "e": (19, 33)}
    if name not in MATRICES_ONLY:
        shapes |= {"f": (5,), "g": (), "h": (3, 2, 5), "i": (1,)}
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes.items()}


def linear(params, batch):
    """A loss whose gradient is the mean of the batch: exact, in any order, for small whole numbers."""
    return sum((params[key] * batch[key].mean(0)).sum() for key in params)


def batch_of(params, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randint(-8, 9, (8, *leaf.shape), generator=generator).to(leaf.dtype) for key, leaf in params.items()
    }


def trained(size, level, name, *wrappers, after=None, steps=2, dtype=torch.float32, start=None):
    """Return the whole states of all ranks after some steps, as pairs of parameters and optimizer state.

    Args:
        size: the number of ranks.
        level: the level of `sharded`.
        name: the name of the optimizer.
        wrappers: factories of further wrappers.
        after: a factory of a wrapper around `sharded`.
        steps: the number of steps.
        dtype: the dtype of the parameters.
        start: the parameters. Default: `params_of`.
    """

    def rank(_):
        params = params_of(name, dtype) if start is None else start
        step = ft.compose(
            ft.train_step(linear, EVERY[name]()),
            *(make() for make in wrappers),
            ft.sharded(ft.parallel.mesh(), level),
            *([after()] if after else []),
        )
        state = step.init(params, seed=4)
        for seed in range(steps):
            state, _ = step(state, batch_of(params, seed))
        return ft.parallel.whole((state.params, state.opt_state))

    return run(size, rank)


def assert_equal(results, reference, tolerance=0.0):
    for result in results:
        torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance)


def tolerance_of(name):
    """Return a dtype and the tolerance against one rank: 0 for optimizers that update whole leaves.

    Kernels may round the last elements of parts of leaves otherwise.
    """
    return (torch.float64, 1e-14) if EVERY[name]().by_element else (torch.float32, 0.0)


@pytest.fixture
def small_groups(monkeypatch):
    """Limit the bytes of groups and rounds, so that small leaves need several of them."""
    for module, constant in ((ownership, "ROUND_BYTES"), (offloaded, "GROUP_BYTES"), (bucket_order, "STREAM_BYTES")):
        monkeypatch.setattr(module, constant, 100)
    monkeypatch.setattr(update_in_backward, "GROUP_BYTES", 150)


@pytest.mark.parametrize("name", EVERY)
def test_each_optimizer_on_ranks_equals_one(name):
    dtype, tolerance = tolerance_of(name)
    (reference,) = trained(1, 0, name, dtype=dtype)
    for size, level in ((2, 1), (3, 2)) if name in SOME else ((2, 3),):
        assert_equal(trained(size, level, name, dtype=dtype), reference, tolerance)


@pytest.mark.parametrize("name", [name for name, make in EVERY.items() if make().by_element])
def test_each_elementwise_optimizer_on_ranks_has_the_bits_of_one(name):
    """The part of each rank is a whole number of a CPU's vectors, so that kernels round all elements alike."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (64, 32), "long": (192,), "m": (96, 64), "scalar": ()}
    start = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    (reference,) = trained(1, 0, name, start=start)
    for actual in trained(3, 3, name, start=start):
        assert_same_bits(actual, reference)


@pytest.mark.parametrize("name", [*FEW, *REST])
def test_update_in_backward_on_ranks_equals_one_rank(name, small_groups):
    dtype, tolerance = tolerance_of(name)
    (reference,) = trained(1, 0, name, dtype=dtype)
    for size, level in ((3, 1), (2, 3)):
        assert_equal(trained(size, level, name, ft.update_in_backward, dtype=dtype), reference, tolerance)


@pytest.mark.parametrize("name", [*FEW, *REST])
def test_an_offloaded_state_on_ranks_equals_one_rank(name, small_groups, tmp_path):
    def offload():
        return ft.offload("opt_state", directory=tmp_path, min_bytes=8)

    dtype, tolerance = tolerance_of(name)
    (reference,) = trained(1, 0, name, dtype=dtype)
    assert_equal(trained(3, 3, name, offload, dtype=dtype), reference, tolerance)
    assert_equal(trained(2, 1, name, after=offload, dtype=dtype), reference, tolerance)


def test_a_stack_with_optimizers_of_every_kind_on_ranks_equals_one_rank():
    def train(size, level, **mesh):
        def rank(_):
            wrappers = ft.accumulate(2), ft.clip(0.05), ft.ema(0.8), ft.skip_nonfinite(3)
            mesh_of_ranks = ft.parallel.mesh(**mesh)
            return models.train(
                models.step_of(*wrappers, ft.sharded(mesh_of_ranks, level), optimizer=script.optimizer())
            )

        return run(size, rank)

    ((reference, _),) = train(1, 0)
    for state, _ in (*train(3, 1), *train(4, 3, replicate=2)):
        torch.testing.assert_close(state.params, reference.params, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(state.opt_state, reference.opt_state, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(state.slots, reference.slots, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", SOME)
def test_a_donated_state_of_each_optimizer_is_updated_in_its_memory(name):
    def rank(_):
        step = ft.compose(ft.train_step(linear, EVERY[name]()), ft.sharded(ft.parallel.mesh(), 1), ft.donated())
        params = params_of(name)
        state = step.init(params, seed=4)

        def pointers(state):
            leaves = ft.tree.leaves((state.params, state.opt_state))
            return [getattr(leaf, "_local_tensor", leaf).data_ptr() for leaf in leaves]

        first = pointers(state)
        for seed in range(2):
            state, _ = step(state, batch_of(params, seed))
        return ft.parallel.whole((state.params, state.opt_state)), pointers(state) == first

    (reference,) = trained(1, 0, name)
    for state, is_in_place in run(3, rank):
        assert is_in_place
        if not EVERY[name]().by_element:
            assert_equal([state], reference)


def test_ranks_share_the_work_and_each_matrix_is_updated_once(monkeypatch, small_groups):
    """Ten matrices of one size on four ranks: each updates two or three of them."""
    elements = []
    orthogonal = muon._orthogonal

    def counted(matrices, *options):
        elements.append((threading.get_ident(), len(matrices)))
        return orthogonal(matrices, *options)

    monkeypatch.setattr(muon, "_orthogonal", counted)
    params = {str(number): torch.randn(4, 5) for number in range(10)}

    def rank(_):
        step = ft.compose(ft.train_step(linear, ft.optim.muon(0.1)), ft.sharded(ft.parallel.mesh(), 1))
        step(step.init(params), batch_of(params, 0))

    run(4, rank)
    counts = Counter()
    for thread, count in elements:
        counts[thread] += count
    assert sorted(counts.values()) == [2, 2, 3, 3]


@pytest.mark.parametrize("name", ["adamw_8bit", "adafactor", "muon", "stochastic"])
def test_a_state_continues_on_another_mesh_to_the_bit(name):
    def two_steps(size, level, start=None):
        def rank(_):
            params = params_of(name)
            step = ft.compose(ft.train_step(linear, EVERY[name]()), ft.sharded(ft.parallel.mesh(), level))
            state = step.init(params, seed=4)
            if start is not None:
                state = ft.parallel.divided(start, like=state)
            for seed in (2, 3) if start is not None else (0, 1):
                state, _ = step(state, batch_of(params, seed))
            return ft.parallel.whole(state)

        return run(size, rank)

    (reference,) = two_steps(1, 0, two_steps(1, 0)[0])
    for state in two_steps(2, 3, two_steps(3, 1)[0]):
        assert_equal([(state.params, state.opt_state)], (reference.params, reference.opt_state))


def test_in_a_partition_only_leaves_that_are_needed_whole_are_exchanged(monkeypatch):
    """Parameter, gradient and momentum of a matrix are sent to its owner; parameter and momentum are sent back."""
    sent = []
    start_exchange = Group.start_exchange

    def counted(group, tensor, *counts):
        sent.append(tensor.numel())
        return start_exchange(group, tensor, *counts)

    monkeypatch.setattr(Group, "start_exchange", counted)
    params = {"big": torch.ones(50, 4), "matrix": torch.ones(6, 5), "vector": torch.ones(7)}
    labels = {"muon": ["matrix"]}

    def rank(_):
        optimizer = ft.optim.partition({"muon": ft.optim.muon(0.1), "rest": ft.optim.adamw(0.1)}, labels)
        step = ft.compose(ft.train_step(linear, optimizer), ft.sharded(ft.parallel.mesh(), 1))
        state = step.init(params)
        step(state, batch_of(params, 0))

    run(1, rank)
    assert not sent
    run(3, rank)
    assert sum(sent) == 5 * params["matrix"].numel()


def by_shape(name, leaf):
    return leaf.numel() >= 36


@pytest.mark.parametrize(
    "optimizer",
    [
        ft.optim.adamw(1e-2, weight_decay=0.5, decay_mask=by_shape),
        ft.optim.chain(ft.optim.sign(by_shape), ft.optim.sgd(0.1)),
        ft.optim.partition({"large": ft.optim.sgd(0.1), "small": ft.optim.adamw(1e-3)}, {"large": by_shape}),
    ],
    ids=str,
)
def test_masks_and_labels_by_shape_are_those_of_whole_leaves(optimizer):
    def rank(level):
        return models.train(models.step_of(ft.sharded(ft.parallel.mesh(), level), optimizer=optimizer))

    (reference,) = run(1, lambda _: rank(0))
    for level in (1, 3):
        assert_near(run(3, lambda _, level=level: rank(level)), reference)


def test_a_rank_without_any_leaf_counts_the_updates_too():
    def rank(_):
        step = ft.compose(ft.train_step(linear, ft.optim.lamb(0.1)), ft.sharded(ft.parallel.mesh(), 3))
        params = {"w": torch.ones(3, 2), "v": torch.ones(2)}
        state = step.init(params)
        for seed in range(2):
            state, _ = step(state, batch_of(params, seed))
        return float(state.opt_state["count"])

    assert run(4, rank) == [2.0] * 4


@pytest.mark.parametrize("names", [("remat", "ema"), ("donated", "swa"), ("lora",), ("bf16",)], ids="+".join)
def test_update_in_backward_of_a_model_with_other_wrappers_equals_one_rank(names):
    """At level 3 the gradients of a block come while it is gathered, and its dropout draws as in the forward pass."""
    factories = {
        "remat": ft.remat,
        "ema": lambda: ft.ema(0.8),
        "swa": lambda: ft.swa(1),
        "donated": ft.donated,
        "lora": lambda: ft.lora(2, targets=["blocks.*.hidden", "head"]),
        "bf16": lambda: ft.with_amp("bf16"),
    }

    def train(size, level):
        def rank(_):
            wrappers = [ft.update_in_backward(), *(factories[name]() for name in names)]
            step = models.step_of(*wrappers, ft.sharded(ft.parallel.mesh(), level), optimizer=optimizer)
            return models.train(step)

        return run(size, rank)

    optimizer = ft.optim.muon(0.01) if "lora" in names else script.optimizer()
    ((reference, history),) = train(1, 0)
    tolerance = 2e-3 if "bf16" in names else 1e-11
    for size, level in ((2, 0), (3, 3)):
        for state, metrics in train(size, level):
            torch.testing.assert_close(state.params, reference.params, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(state.slots, reference.slots, rtol=tolerance, atol=tolerance)
            losses = [record["loss"] for record in metrics]
            assert losses == pytest.approx([record["loss"] for record in history], tolerance)


def test_a_split_finds_the_owners_once(monkeypatch):
    # `assign` makes an optimizer for every leaf.
    calls = []
    monkeypatch.setattr(whole_update, "assign", lambda *args: calls.append(args) or ownership.assign(*args))
    params = params_of("muon")
    parts = whole_update.whole_update(ft.optim.muon(0.1), Group("shard", 2, 0)).split(params, [[i] for i in range(5)])
    assert (len(parts), len(calls)) == (len(params), 1)
