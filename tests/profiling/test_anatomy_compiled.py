"""Anatomy: a compiled step is predicted as if it ran eagerly, and takes at most the predicted memory."""

import pytest
import torch

import ftrain as ft
from ftrain import optim
from ftrain.transforms.compile import capture
from tests.profiling import problem
from tests.profiling.models import MODELS, build


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("model", "wrappers", "options"),
    [
        pytest.param("small", (), {"lowering": "split"}, marks=pytest.mark.exhaustive),
        pytest.param("gpt", (ft.remat(),), {"lowering": "whole", "donate": True}, marks=pytest.mark.exhaustive),
        pytest.param("gpt", (), {"lowering": "split"}, marks=pytest.mark.exhaustive),
        pytest.param("bert", (ft.with_amp("bf16"),), {"lowering": "whole"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiled_step_takes_at_most_the_predicted_memory(model, wrappers, options):
    if model == "small":
        step, batch = problem.make(*wrappers, width=64), problem.batch(512, 64)
    else:
        loss, batch = MODELS[model]()
        step = ft.compose(ft.train_step(loss, optim.adamw(1e-3)), *wrappers)
    step = ft.compiled(**options)(step)
    anatomy = ft.anatomy(step, step.init(), batch)
    assert anatomy.compiled
    assert anatomy.at_rest.total() < anatomy.measured
    assert anatomy.measured <= anatomy.peak, anatomy
    assert anatomy.measured_ratio == anatomy.measured / anatomy.peak


def test_the_measured_ratio_of_a_compiled_step_by_hand():
    """The one compiled kernel holds the parameters, the batch and the new parameters, and no activations."""
    size = 100_000
    step = ft.train_step(lambda params, batch: (params["w"] * batch).cos().exp().sum(), optim.sgd(0.1))
    state, batch = step.init({"w": torch.randn(size)}), torch.randn(size)
    eager = ft.anatomy(step, state, batch)
    compiled = ft.anatomy(ft.compiled(lowering="whole")(step), state, batch)
    assert compiled.peak == eager.peak
    assert compiled.measured == pytest.approx(3 * 4 * size, abs=4096)
    assert compiled.measured_ratio == pytest.approx(3 * 4 * size / eager.peak, rel=0.01)
    assert compiled.measured_ratio < 0.7
    assert compiled.overhead is None
    assert (eager.compiled, compiled.compiled) == (False, True)
    text = repr(compiled)
    assert "predicted as if the step ran eagerly; compiled, it usually takes less; " in text
    assert f"measured ({compiled.measured_ratio:.1%} of it)" in text
    assert "The times are of operations that run outside of compiled kernels" in text
    assert "beyond" not in text
    numbers = compiled.as_dict()
    assert (numbers["compiled"], numbers["measured_ratio"]) == (True, compiled.measured_ratio)


OPTIONS = {}, {"lowering": "split"}, {"lowering": "whole", "donate": True}

COMPILED = {("gpt", "bf16"): OPTIONS, ("bert", "accumulate"): (), ("convnet", "remat"): ()}
"""Model and wrappers -> the options of `compiled` that `make test` runs; `make test-all` runs all with each."""


@pytest.mark.parametrize(
    ("model", "wrapper", "options"),
    [
        pytest.param(model, wrapper, options, marks=[] if options in chosen else pytest.mark.exhaustive)
        for (model, wrapper), chosen in COMPILED.items()
        for options in OPTIONS
    ],
    ids=str,
)
def test_a_compiled_step_is_predicted_as_the_eager_one_without_compilation(model, wrapper, options, monkeypatch):
    step, batch = build(model, wrapper)
    compiled = ft.compiled(**options)(step)
    eager = ft.donated()(step) if options.get("donate") else step

    def fail(*args, **kwargs):
        raise AssertionError("the step is compiled")

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(capture, "capture", fail)
    expected = ft.anatomy(eager, eager.init(), batch, measure=False)
    actual = ft.anatomy(compiled, compiled.init(), batch, measure=False)
    assert actual.compiled
    assert not expected.compiled
    assert actual.measured_ratio is None
    assert {**actual.as_dict(), "compiled": False} == expected.as_dict()
    assert "predicted as if the step ran eagerly; compiled, it usually takes less\n" in repr(actual)
