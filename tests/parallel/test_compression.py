"""Gradients that are sent in fewer bits: the sums, the residuals, and the part of the state that keeps them."""

import functools
from contextlib import nullcontext

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from ftrain.parallel.compression import Exchange
from ftrain.parallel.compression.reduction import compression_of
from ftrain.parallel.compression.sign import packed, unpacked
from ftrain.parallel.mesh import ALL, groups
from tests.exhaustive import choose, exhaustive_rows
from tests.parallel import models
from tests.parallel.ranks import run

METHODS = {
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    "powersgd": lambda: ft.parallel.powersgd(2),
    "sign": lambda: ft.parallel.sign(),
}
REMEMBERING = ["powersgd", "sign"]
SHAPES = (7, 5), (), (6,), (4, 3, 3), (0, 4)


def gradients(rank, step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def combined(name, size, steps=3, shapes=SHAPES):
    """Return for each rank and step its gradients, its old memory, the sums that it got, and its new memory."""

    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        method, history = compression_of(METHODS[name]()), []
        memories = [
            method.init(index, torch.empty(shape, dtype=torch.float64), None) if method.init else {}
            for index, shape in enumerate(shapes)
        ]
        for step in range(steps):
            grads = gradients(number, step, shapes)
            sums, new = method.combine(grads, memories, Exchange(ranks, [None] * len(shapes)))
            history.append((grads, memories, sums, new))
            memories = new
        return history

    return run(size, rank)


def residual(memory):
    return memory.get("residual", torch.zeros(()))


@pytest.mark.parametrize("name", REMEMBERING)
def test_the_sums_and_the_new_residuals_are_the_gradients_and_the_old_residuals(name):
    """Over all ranks together: a rank gets only the sum of what all have sent."""
    for ranks in zip(*combined(name, 3), strict=True):
        for index in range(len(SHAPES)):
            expected = sum(grads[index] + residual(old[index]) for grads, old, _, _ in ranks)
            not_sent = sum(residual(new[index]) for _, _, _, new in ranks)
            for _, _, sums, _ in ranks:
                torch.testing.assert_close(sums[index] + not_sent, expected, rtol=1e-13, atol=1e-13)
    assert any(residual(new[0]).norm() > 0.1 for _, _, _, new in ranks)


def test_every_rank_sends_its_signs_and_its_mean_magnitude():
    for history in combined("sign", 2):
        (grads, _, _, new), *_ = history
        for grad, memory in zip(grads, new, strict=True):
            sent = grad.abs().mean() * ((grad >= 0) * 2 - 1) if grad.numel() else grad
            torch.testing.assert_close(memory["residual"], grad - sent, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", METHODS)
def test_all_ranks_get_the_same_bits(name):
    for steps in zip(*combined(name, 3), strict=True):
        for _, _, sums, _ in steps[1:]:
            assert all(map(torch.equal, sums, steps[0][2]))


def test_sums_of_no_higher_rank_than_that_of_powersgd_are_exact():
    shape = (8, 9)

    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        method = ft.parallel.powersgd(2)
        # Each of the two ranks has a gradient of matrix rank 1, so their sum has matrix rank 2.
        column, row = gradients(number, 0, [(8, 1), (1, 9)])
        memory = method.init(0, torch.empty(shape, dtype=torch.float64), None)
        (total,), (new,) = method.combine([column @ row], [memory], Exchange(ranks, [None]))
        return column @ row, total, new["residual"]

    (first, total, first_residual), (second, _, second_residual) = run(2, rank)
    torch.testing.assert_close(total, first + second, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first_residual, torch.zeros(shape).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(second_residual, torch.zeros(shape).double(), rtol=0, atol=1e-12)


def test_a_power_iteration_continues_with_the_factors_of_the_last_step():
    """For a constant gradient, without residuals, the sums converge to the best approximation of that rank."""

    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        method, shape = ft.parallel.powersgd(1), (6, 7)
        grad = gradients(number, 0, [shape])[0]
        memory = method.init(0, torch.empty(shape, dtype=torch.float64), None)
        for _ in range(200):
            (total,), (memory,) = method.combine([grad], [memory], Exchange(ranks, [None]))
            memory = {**memory, "residual": torch.zeros_like(grad)}
        return grad, total

    (first, total), (second, _) = run(2, rank)
    left, values, right = torch.linalg.svd(first + second)
    torch.testing.assert_close(total, values[0] * left[:, :1] @ right[:1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_float16_neither_overflows_nor_loses_small_gradients(scale):
    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        grads = [grad.float() * scale * (number + 1) for grad in gradients(number, 0)]
        sums, _ = compression_of("fp16").combine(grads, [{}] * len(grads), Exchange(ranks, [None] * len(grads)))
        return grads, sums

    results = run(3, rank)
    for index in range(len(SHAPES)):
        exact = sum(grads[index].double() for grads, _ in results)
        largest = max((grads[index].abs().max() for grads, _ in results if grads[index].numel()), default=0.0)
        torch.testing.assert_close(results[0][1][index].double(), exact, rtol=0, atol=float(largest) * 4e-3)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_bits_are_packed_by_eight(length):
    bits = torch.randn(length, generator=torch.Generator().manual_seed(0)) > 0
    assert packed(bits).dtype == torch.uint8
    assert packed(bits).numel() == -(-length // 8)
    assert torch.equal(unpacked(packed(bits), length), bits)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_gives_a_sum_that_is_not_finite(name, bad):
    def rank(number):
        ranks = groups(ft.parallel.mesh())[ALL]
        method, shape = compression_of(METHODS[name]()), (7, 5)
        grad = gradients(number, 0, [shape])[0]
        grad[2, 3] = bad if number else 1.0
        memory = method.init(0, grad, None) if method.init else {}
        return method.combine([grad], [memory], Exchange(ranks, [None]))[0][0]

    assert not any(total.isfinite().all() for total in run(2, rank))


# In a step


def trained(size, level, name, wrappers=lambda: (), mesh=None, data=None, **options):
    def rank(_):
        reduce = METHODS[name]() if name in METHODS else "fp32"
        step = models.step_of(*wrappers(), ft.sharded(ft.parallel.mesh(**(mesh or {})), level, reduce), **options)
        return models.train(step, data)

    return run(size, rank)


def everything():
    return ft.accumulate(2), ft.clip(0.05), ft.ema(0.8), ft.skip_nonfinite(3)


@functools.cache
def alone():
    """Return the state of one rank after its steps, and its first state."""
    return trained(1, 0, "fp32", everything)[0][0], trained(1, 0, "fp32", everything, data=())[0][0]


def _alignment(params, reference, start):
    """Return the cosine of the angle between two changes of the parameters `start`."""
    first, second = (torch.cat([(end[name] - start[name]).flatten() for name in start]) for end in (params, reference))
    return torch.nn.functional.cosine_similarity(first, second, dim=0)


MESHES = [
    (3, 1, {}),
    (4, 3, {"replicate": 2}),
    (6, 3, {"replicate": 3}),
    (3, 0, {}),
    (4, 1, {"replicate": 2}),
    (4, 2, {}),
    (4, 0, {"replicate": 2}),
]
# The first mesh with every method; a mesh of two axes with one method that casts, and one that has a memory.
EVERY_TIME = [*((MESHES[0], name) for name in METHODS), (MESHES[1], "fp16"), (MESHES[1], "powersgd")]


@pytest.mark.parametrize(
    ("size", "level", "mesh", "name"),
    [
        pytest.param(
            *(size, level, mesh, name),
            id=f"{size}-{level}-mesh{index}-{name}",
            marks=[] if ((size, level, mesh), name) in EVERY_TIME else pytest.mark.exhaustive,
        )
        for index, (size, level, mesh) in enumerate(MESHES)
        for name in METHODS
    ],
)
def test_ranks_end_with_the_same_bits_near_those_of_one(name, size, level, mesh):
    reference, start = alone()
    results = trained(size, level, name, everything, mesh)
    for state, _ in results:
        assert all(map(torch.equal, ft.tree.leaves(state), ft.tree.leaves(results[0][0])))
        # Three steps are not quite aligned: the residuals are sent in later steps.
        alignment = _alignment(state.params, reference.params, start.params)
        assert alignment > {"powersgd": 0.9, "sign": 0.8}.get(name, 0.99999)
    assert not all(map(torch.equal, state.params.values(), reference.params.values()))


@pytest.mark.parametrize("name", METHODS)
def test_on_one_rank_nothing_is_compressed(name):
    (plain, _), (reduced, _) = trained(1, 3, "fp32")[0], trained(1, 3, name)[0]
    assert all(map(torch.equal, ft.tree.leaves(plain), ft.tree.leaves(reduced)))
    assert ft.tree.signature(plain) == ft.tree.signature(reduced)


@pytest.mark.parametrize(
    ("size", "level", "mesh"), [(2, 0, {}), pytest.param(4, 1, {"replicate": 2}, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("name", REMEMBERING)
def test_a_quadratic_converges(name, size, level, mesh):
    """Without residuals it would end elsewhere, because the ranks have examples with different minima."""
    start, target = gradients(0, 0, [(6, 6)])[0], gradients(1, 0, [(4, 6, 6)])[0]

    def rank(_):
        loss = lambda params, batch: (params["w"] - batch).square().sum((1, 2)).mean()  # noqa: E731
        optimizer = ft.optim.sgd(ft.schedules.exponential(0.1, 0.98, 1))
        reduce = ft.parallel.powersgd(1) if name == "powersgd" else ft.parallel.sign()
        step = ft.compose(ft.train_step(loss, optimizer), ft.sharded(ft.parallel.mesh(**mesh), level, reduce))
        state = step.init({"w": start})
        for _ in range(200):
            state, _ = step(state, target)
        return ft.parallel.whole(state).params["w"]

    torch.testing.assert_close(run(size, rank)[0], target.mean(0), rtol=0, atol=5e-2)


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("guard", ["skip_nonfinite", "skip_spikes"])
def test_a_skipped_step_does_not_change_the_memory(name, guard):
    def rank(_):
        wrappers = {"skip_nonfinite": ft.skip_nonfinite(3), "skip_spikes": ft.skip_spikes(2.0, window=2, warmup=1)}
        step = models.step_of(wrappers[guard], ft.sharded(ft.parallel.mesh(), 1, METHODS[name]()))
        good, better, bad = models.batches()
        state, _ = step(step.init(), good)
        state, _ = step(state, better)
        factor = float("nan") if guard == "skip_nonfinite" else 1e6
        after, _ = step(state, {**bad, "y": bad["y"] * factor})
        return ft.parallel.whole(state), ft.parallel.whole(after)

    for state, after in run(2, rank):
        assert all(map(torch.equal, ft.tree.leaves(state.params), ft.tree.leaves(after.params)))
        memories = ft.tree.leaves(state.slots["sharded"])
        assert any(memory.any() for memory in memories)
        assert all(map(torch.equal, memories, ft.tree.leaves(after.slots["sharded"])))


@pytest.mark.parametrize(
    ("name", "size", "level", "mesh"),
    [
        ("sign", 3, 0, {}),
        ("powersgd", 4, 2, {"replicate": 2}),
        *exhaustive_rows(
            [
                ("powersgd", 3, 0, {}),
                ("sign", 4, 2, {"replicate": 2}),
                *((name, 4, 0, {"replicate": 2}) for name in ("powersgd", "sign")),
            ]
        ),
    ],
)
def test_a_run_continues_from_its_whole_state_with_the_same_bits(name, size, level, mesh):
    def rank(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh(**mesh), level, METHODS[name]()))
        first, *others = models.batches()
        saved, _ = models.train(step, [first])
        again = models.step_of(ft.sharded(ft.parallel.mesh(**mesh), level, METHODS[name]()))
        return models.train(again, others, ft.parallel.divided(saved, like=again.init()))[0]

    reference = trained(size, level, name, mesh=mesh)[0][0]
    for state in run(size, rank):
        assert all(map(torch.equal, ft.tree.leaves(state), ft.tree.leaves(reference)))


@pytest.mark.parametrize(("size", "level", "mesh"), [(2, 0, {}), (4, 1, {"replicate": 2})])
def test_a_checkpoint_has_the_residuals_of_each_rank(size, level, mesh, tmp_path):
    def rank(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh(**mesh), level, ft.parallel.sign()))
        state, _ = step(step.init(), next(models.batches()))
        ft.checkpoint.save(tmp_path / "saved", state)
        loaded = ft.checkpoint.load(tmp_path / "saved", like=step.init())
        return [ft.parallel.whole(divided).slots["sharded"] for divided in (state, loaded)]

    for saved, loaded in run(size, rank):
        assert any(memory["residual"].any() for memory in saved.values())
        assert all(map(torch.equal, ft.tree.leaves(loaded), ft.tree.leaves(saved)))


@pytest.mark.parametrize("name", choose(REMEMBERING, ["powersgd"]))
def test_on_another_mesh_the_sum_of_the_residuals_stays(name):
    saved = trained(4, 1, name, mesh={"replicate": 2})[0][0]

    def moved(level, mesh):
        def rank(_):
            step = models.step_of(ft.sharded(ft.parallel.mesh(**mesh), level, METHODS[name]()))
            state = ft.parallel.divided(saved, like=step.init())
            whole = ft.parallel.whole(state)
            step(state, next(models.batches()))
            return whole

        return rank

    def residuals(state):
        memories = state.slots["sharded"]
        return {name: memory["residual"].sum(0) for name, memory in memories.items() if memory}

    for size, level, mesh in ((3, 0, {}), (2, 2, {}), (6, 3, {"replicate": 3})):
        state, *_ = run(size, moved(level, mesh))
        before, after = residuals(saved), residuals(state)
        # Whether a leaf is compressed may depend on how it is divided.
        names = before.keys() & after.keys()
        assert {"inner.weight", "blocks.0.hidden.weight"} & names
        for leaf in names:
            torch.testing.assert_close(after[leaf], before[leaf], rtol=1e-13, atol=1e-13)
    (alone,) = run(1, moved(0, {}))
    assert "sharded" not in alone.slots


@pytest.mark.parametrize("name", choose([*REMEMBERING, "bf16"], ["powersgd", "bf16"]))
def test_fit_continues_on_another_number_of_ranks(name, tmp_path):
    """4 -> 3 -> 1 ranks: the sum of the residuals stays, and with one rank there is nothing to send."""

    def fit(size, level, steps, mesh=None):
        def rank(number):
            step = models.step_of(ft.sharded(ft.parallel.mesh(**(mesh or {})), level, METHODS[name]()))
            states = []
            data = list(models.batches(4))

            def function(state, batch):
                states.append(ft.parallel.whole(state))
                return step(state, batch)

            checkpoints = ft.Checkpoints(tmp_path, every=1)
            state, history = ft.fit(
                function, step.init(seed=5), data, steps=steps, checkpoints=checkpoints, progress=False
            )
            assert len(history) == steps
            return states[0], ft.parallel.whole(state)

        return run(size, rank)

    def residuals(state):
        memories = state.slots.get("sharded", {})
        return {leaf: memory["residual"].sum(0) for leaf, memory in memories.items() if memory}

    _, saved = fit(4, 1, 1, {"replicate": 2})[0]
    with warns(name, "is of other ranks; what these had not sent yet is divided equally"):
        (begun, _), (_, ended), _ = fit(3, 0, 2)
    for part in ("params", "opt_state", "step", "rng"):
        assert all(map(torch.equal, ft.tree.leaves(getattr(begun, part)), ft.tree.leaves(getattr(saved, part))))
    before, after = residuals(saved), residuals(begun)
    shared = before.keys() & after.keys()
    assert any(before[leaf].any() for leaf in shared) == (name in REMEMBERING)
    for leaf in shared:
        torch.testing.assert_close(after[leaf], before[leaf], rtol=1e-13, atol=1e-13)
    with warns(name, "what these had not sent yet is dropped"):
        ((begun, _),) = fit(1, 3, 3)
    assert all(map(torch.equal, ft.tree.leaves(begun.params), ft.tree.leaves(ended.params)))
    fit(2, 2, 4)


def warns(name, text):
    return pytest.warns(UserWarning, match=text) if name in REMEMBERING else nullcontext()


def test_options_that_cannot_be_combined_are_refused():
    def rank(_):
        mesh = ft.parallel.mesh()
        with pytest.raises(OptionError, match=r"level 3 on a mesh of 1x2.*use level=2"):
            ft.sharded(mesh, reduce="bf16")
        with pytest.raises(OptionError, match="reduce is 'int8'; needs 'fp32'"):
            ft.sharded(mesh, 0, reduce="int8")
        with pytest.raises(ComposeError, match=r"sam.* takes several gradients"):
            models.step_of(ft.sam(0.05), ft.sharded(mesh, 0, ft.parallel.sign()))
        models.step_of(ft.sam(0.05), ft.sharded(mesh, 0, "bf16"))

    run(2, rank)
    with pytest.raises(OptionError, match="powersgd: rank"):
        ft.parallel.powersgd(0)
