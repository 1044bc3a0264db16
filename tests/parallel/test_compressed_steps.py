"""Steps that send gradients in fewer bits, and the part of the state that keeps what was not sent."""

import functools
from contextlib import nullcontext

import pytest
import torch

import ftrain as ft
from ftrain.errors import ComposeError, OptionError
from tests.bits import assert_same_bits
from tests.exhaustive import choose, exhaustive_rows
from tests.parallel import models
from tests.parallel.compression import METHODS, REMEMBERING, gradients
from tests.parallel.ranks import run


def trained(size, level, name, wrappers=lambda: (), mesh=None, data=None, **options):
    def rank(_):
        reduce = METHODS[name]() if name in METHODS else "fp32"
        step = models.step_of(*wrappers(), ft.sharded(ft.parallel.mesh(**(mesh or {})), level, reduce), **options)
        return models.train(step, data)

    return run(size, rank)


def everything():
    return ft.accumulate(2), ft.clip(0.05), ft.ema(0.8), ft.skip_nonfinite(3)


@functools.cache
def of_one_rank():
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
            id=f"{size}-{level}-{mesh}-{name}",
            marks=[] if ((size, level, mesh), name) in EVERY_TIME else pytest.mark.exhaustive,
        )
        for size, level, mesh in MESHES
        for name in METHODS
    ],
)
def test_ranks_end_with_the_same_bits_near_those_of_one_rank(name, size, level, mesh):
    reference, start = of_one_rank()
    results = trained(size, level, name, everything, mesh)
    for state, _ in results:
        assert_same_bits(state, results[0][0])
        # Three steps are not quite aligned: the residuals are sent in later steps.
        alignment = _alignment(state.params, reference.params, start.params)
        assert alignment > {"powersgd": 0.9, "sign": 0.8}.get(name, 0.99999)
    assert not all(map(torch.equal, state.params.values(), reference.params.values()))


@pytest.mark.parametrize("name", METHODS)
def test_on_one_rank_nothing_is_compressed(name):
    (plain, _), (reduced, _) = trained(1, 3, "fp32")[0], trained(1, 3, name)[0]
    assert_same_bits(reduced, plain)


@pytest.mark.parametrize(
    ("size", "level", "mesh"), [(2, 0, {}), pytest.param(4, 1, {"replicate": 2}, marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize("name", REMEMBERING)
def test_ranks_with_different_minima_converge_to_that_of_the_mean(name, size, level, mesh):
    """Without residuals they would end elsewhere."""
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
        assert_same_bits(after.params, state.params)
        assert any(memory.any() for memory in ft.tree.leaves(state.slots["sharded"]))
        assert_same_bits(after.slots["sharded"], state.slots["sharded"])


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
    ids=str,
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
        assert_same_bits(state, reference)


@pytest.mark.parametrize(("size", "level", "mesh"), [(2, 0, {}), (4, 1, {"replicate": 2})], ids=str)
def test_a_checkpoint_has_the_residuals_of_each_rank(size, level, mesh, tmp_path):
    def rank(_):
        step = models.step_of(ft.sharded(ft.parallel.mesh(**mesh), level, ft.parallel.sign()))
        state, _ = step(step.init(), next(models.batches()))
        ft.checkpoint.save(tmp_path / "saved", state)
        loaded = ft.checkpoint.load(tmp_path / "saved", like=step.init())
        return [ft.parallel.whole(divided).slots["sharded"] for divided in (state, loaded)]

    for saved, loaded in run(size, rank):
        assert any(memory["residual"].any() for memory in saved.values())
        assert_same_bits(loaded, saved)


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
    (state,) = run(1, moved(0, {}))
    assert "sharded" not in state.slots


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
        assert_same_bits(getattr(begun, part), getattr(saved, part))
    before, after = residuals(saved), residuals(begun)
    shared = before.keys() & after.keys()
    assert any(before[leaf].any() for leaf in shared) == (name in REMEMBERING)
    for leaf in shared:
        torch.testing.assert_close(after[leaf], before[leaf], rtol=1e-13, atol=1e-13)
    with warns(name, "what these had not sent yet is dropped"):
        ((begun, _),) = fit(1, 3, 3)
    assert_same_bits(begun.params, ended.params)
    fit(2, 2, 4)


def warns(name, text):
    return pytest.warns(UserWarning, match=text) if name in REMEMBERING else nullcontext()


def test_wrong_options_and_those_that_cannot_be_combined_are_refused():
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
